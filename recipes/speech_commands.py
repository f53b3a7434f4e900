"""Train a small network to recognise spoken words.

What it shows: ``torchdali.datasets.AudioFolder``, and torchaudio's transforms in DALI: mel spectrograms in decibels.
The training has random masks over frequencies and time, too (SpecAugment). Sounds differ in length, so ``pad_collate``
pads their spectrograms. ``--loader torch`` gives the same datasets to ``DataLoader``.

FOLDER is the unpacked archive of Speech Commands, or has its layout: ``<word>/<name>.wav``, and ``validation_list.txt``
with the paths of the sounds that are not for training. The second command first writes such a folder: tones that rise,
fall or stay, in noise::

    python recipes/speech_commands.py SpeechCommands/speech_commands_v0.02
    python recipes/speech_commands.py /tmp/words --example --epochs 4
    python recipes/speech_commands.py SpeechCommands/speech_commands_v0.02 --loader torch

What to expect: what runs where, then one line for each epoch, with the loss, the share of validation sounds that are
recognised, and the speed of training. It needs ``pip install 'torchdali[audio]'``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchaudio.transforms import AmplitudeToDB, FrequencyMasking, MelSpectrogram, TimeMasking
from torchvision.transforms import v2

from torchdali import DALILoader, pad_collate
from torchdali.datasets import AudioFolder

RATE = 16_000


def main() -> None:
    args = parse_args()
    if args.example:
        write_example(args.folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    words, train_rows, val_rows = list_sounds(args.folder)
    mel = [MelSpectrogram(RATE, n_fft=512, hop_length=160, n_mels=64), AmplitudeToDB(top_db=80)]
    normalize = v2.Normalize([-30.0], [20.0])
    augment = v2.Compose([*mel, FrequencyMasking(16), TimeMasking(20), normalize])
    train = AudioFolder(train_rows, augment, sample_rate=RATE, mono=True)
    val = AudioFolder(val_rows, v2.Compose([*mel, normalize]), sample_rate=RATE, mono=True)

    kind = DALILoader if args.loader == "torchdali" else DataLoader
    options = {"num_workers": args.workers, "collate_fn": pad_collate}
    train_loader = kind(train, args.batch_size, shuffle=True, **options)
    val_loader = kind(val, args.batch_size, **options)
    if isinstance(train_loader, DALILoader):
        train_loader.explain()

    network = make_network(len(words)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), args.lr)
    for epoch in range(1, args.epochs + 1):
        losses: list[float] = []
        start = time.perf_counter()
        for spectrograms, labels in train_loader:
            loss = nn.functional.cross_entropy(network(spectrograms.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        speed = len(train) / (time.perf_counter() - start)
        share = evaluate(network, val_loader, device)
        print(
            f"epoch {epoch}/{args.epochs}  loss {np.mean(losses):.4f}  acc {share:.1%}  {speed:.0f} sounds/s",
            flush=True,
        )


@torch.no_grad()
def evaluate(network: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the share of the sounds that are recognised."""
    network.eval()
    found, count = 0, 0
    for spectrograms, labels in loader:
        found += int((network(spectrograms.to(device)).argmax(1) == labels.to(device)).sum())
        count += len(labels)
    network.train()
    return found / count


def make_network(num_classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((8, 4)), nn.Flatten(), nn.Linear(64 * 32, num_classes))


def list_sounds(folder: Path) -> tuple[list[str], list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Return the words, and the sounds for training and for validation with their labels."""
    validation = set((folder / "validation_list.txt").read_text().split())
    words = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("_"))
    train, val = [], []
    for label, word in enumerate(words):
        for path in sorted((folder / word).glob("*.wav")):
            (val if f"{word}/{path.name}" in validation else train).append((path, label))
    return words, train, val


def write_example(folder: Path) -> None:
    """Write tones that rise, fall or stay, of different lengths and in noise, and the list of those for validation."""
    rng = np.random.default_rng(0)
    validation = []
    for word, slope in (("falls", -1.0), ("rises", 1.0), ("stays", 0.0)):
        (folder / word).mkdir(parents=True, exist_ok=True)
        for number in range(40):
            seconds = rng.uniform(0.3, 0.5)
            time_ = np.arange(int(seconds * RATE)) / RATE
            pitch = rng.uniform(1500, 3000) + slope * rng.uniform(3000, 5000) * (time_ - seconds / 2)
            tone = rng.uniform(0.1, 0.4) * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
            name = f"{number:02}_nohash_0.wav"
            soundfile.write(folder / word / name, tone + rng.normal(0, 0.05, len(tone)), RATE)
            validation += [f"{word}/{name}"] if number % 4 == 0 else []
    (folder / "validation_list.txt").write_text("\n".join(validation) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--example", action="store_true", help="write an example into the folder first")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    return parser.parse_args()


if __name__ == "__main__":
    main()
