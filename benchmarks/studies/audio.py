"""Measure sounds: decoding of WAV files beside torchaudio, and a mel spectrogram beside DataLoader with torchaudio.

    python -m benchmarks.studies.audio --files 4096 --workers 16

The files are speech-like: three tones that glide, and noise, at 16 kHz. Both loaders read them by ``AudioFolder``. In
``DataLoader`` torchaudio makes the spectrograms in workers, and batches are copied to the device. The loaders take
turns. ``torchaudio.load`` is measured where torchcodec and FFmpeg are installed.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torchaudio
from torch.utils.data import DataLoader
from torchaudio.transforms import AmplitudeToDB, FrequencyMasking, MelSpectrogram, TimeMasking

from benchmarks.common.script import make_parser
from torchdali import DALILoader
from torchdali.datasets import AudioFolder
from torchdali.datasets.audio import decode_sound

RATE = 16_000
DECODED = 400
CHAINS = {
    "MelSpectrogram, AmplitudeToDB": lambda: [MelSpectrogram(RATE, n_fft=400, n_mels=64), AmplitudeToDB(top_db=80)],
    "the same with masks": lambda: [*CHAINS["MelSpectrogram, AmplitudeToDB"](), FrequencyMasking(10), TimeMasking(20)],
}


def make_files(folder: Path, count: int, seconds: float) -> list[Path]:
    """Write WAV files of 16 bits, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:05}.wav" for number in range(count)]
    times = np.arange(int(RATE * seconds)) / RATE
    for number, path in enumerate(paths):
        if not path.exists():
            draws = np.random.default_rng(number)
            glides = draws.uniform((90, -40), (2000, 40), (3, 2))
            tones = [np.sin(2 * np.pi * (tone + rise * times) * times) for tone, rise in glides]
            soundfile.write(path, 0.2 * sum(tones) + 0.02 * draws.standard_normal(len(times)), RATE, subtype="PCM_16")
    return paths


def measure_decoding(paths: list[Path]) -> None:
    """Print CPU milliseconds to decode a file, by torchdali and by torchaudio."""
    decoders: dict[str, Callable[[str], Any]] = {"torchdali": decode_sound, "torchaudio.load": torchaudio.load}
    for name, decode in decoders.items():
        try:
            decode(str(paths[0]))
        except (ImportError, RuntimeError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        start = time.process_time()
        for path in paths[:DECODED]:
            decode(str(path))
        print(f"{name:16} {(time.process_time() - start) / len(paths[:DECODED]) * 1000:7.3f} CPU-ms a file")


def run_epoch(batches: Any, device: torch.device) -> float:
    """Return sounds/s of one epoch. Batches are copied to the device."""
    start, count = time.perf_counter(), 0
    for sounds, _ in batches:
        count += len(sounds.to(device, non_blocking=True))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def compare(paths: list[Path], chain: list[Any], size: int, workers: int, turns: int) -> None:
    """Print sounds/s of both loaders: the median, the least and the largest turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = AudioFolder([(path, number % 10) for number, path in enumerate(paths)], torch.nn.Sequential(*chain))
    ours = DALILoader(dataset, size, shuffle=True, drop_last=True)
    theirs = DataLoader(
        dataset,
        size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )
    found: dict[str, list[float]] = {"torchdali": [], "DataLoader": []}
    for turn in range(turns + 1):  # the first warms up
        for name, loader in (("torchdali", ours), ("DataLoader", theirs)):
            speed = run_epoch(loader, device)
            if turn:
                found[name].append(speed)
    for name, speeds in found.items():
        print(f"{name:12} {statistics.median(speeds):9,.0f} sounds/s ({min(speeds):,.0f} to {max(speeds):,.0f})")
    print(f"torchdali is {statistics.median(a / b for a, b in zip(*found.values(), strict=True)):.2f} times as fast")
    ours.close()


def main() -> None:
    """Run the study."""
    parser = make_parser("studies.audio", (__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a sound")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of DataLoader")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir(), "torchdali-sounds"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in DataLoader's workers
    paths = make_files(args.root / f"{args.seconds:g}", args.files, args.seconds)
    print(f"{args.files} WAV files of {args.seconds:g} s, batches of {args.batch_size}, {args.workers} workers")
    measure_decoding(paths)
    for name, make in CHAINS.items():
        print(name)
        compare(paths, make(), args.batch_size, args.workers, args.turns)


if __name__ == "__main__":
    main()
