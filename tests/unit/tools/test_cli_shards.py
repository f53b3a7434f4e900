"""``torchdali pack``, ``index``, and ``check`` of shards."""

from __future__ import annotations

import io
import multiprocessing
import os
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import DatasetFolder, ImageFolder

from torchdali.datasets import Table, Tar, pack, packing
from torchdali.sources import ImageIndex
from torchdali.tools.cli import commands
from torchdali.tools.commands.shards import format_size


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands(), [str(argument) for argument in arguments])


def test_pack_keeps_bytes_and_order(pictures: Path, tmp_path: Path) -> None:
    result = run("pack", pictures, tmp_path / "out", "--shard-size", "20KB", "--workers", 2)
    assert result.exit_code == 0, result.output
    folder, shards = ImageFolder(pictures), sorted((tmp_path / "out").glob("shard-*.tar"))
    size = sum(path.stat().st_size for path in shards)
    assert f"{len(folder)} images in {len(shards)} shards of {tmp_path / 'out'}, {size / 1000:.1f} kB" in result.output
    assert len(shards) > 2
    dataset = Tar(shards)
    assert [label for _, label in dataset] == folder.targets
    assert [dataset.read(range_of(row))[0].tobytes() for row in range(len(dataset))] == [
        Path(path).read_bytes() for path, _ in folder.samples
    ]
    assert (tmp_path / "out" / "classes.txt").read_text().split() == folder.classes == dataset.classes
    assert Tar(shards, label=None).classes == []
    names: list[str] = []
    for shard in shards:
        with tarfile.open(shard) as archive:  # any program reads it
            names += archive.getnames()[1::2]
    assert names == [f"{number:08}.cls" for number in range(len(folder))]
    assert all(path.stat().st_size < 20_000 + 10240 for path in shards)
    again = run("pack", pictures, tmp_path / "out")
    assert again.exit_code == 2
    assert "has shards already, such as shard-000000.tar" in again.output
    assert run("pack", pictures, tmp_path / "new", "--shard-size", "much").exit_code == 2
    assert run("pack", tmp_path / "out", tmp_path / "new").exit_code == 2


def range_of(row: int) -> np.ndarray:
    return np.array([row])


def test_pack_takes_datasets_of_files(pictures: Path, tmp_path: Path) -> None:
    samples = ImageFolder(pictures).samples
    ImageIndex.write(tmp_path / "index.npz", samples)
    (tmp_path / "list.csv").write_text("\n".join(["file,y", *(f"{path},{label}" for path, label in samples)]))
    several = ConcatDataset(
        [
            Subset(ImageFolder(pictures, transform=len, target_transform=str), [5, 2]),
            DatasetFolder(str(pictures), lambda _: None, (".jpg", ".png")),
            Subset(ImageIndex(tmp_path / "index.npz", target_transform=str), [1]),
            Table(tmp_path / "list.csv", label="y"),
            Subset(samples, [3]),  # type: ignore[arg-type]
        ]
    )
    dataset = pack(several, tmp_path / "out")
    expected = [samples[5], samples[2], *samples, samples[1], *samples, samples[3]]
    assert dataset.labels(np.arange(len(dataset))).tolist() == [label for _, label in expected]
    data = [dataset.read(range_of(row))[0].tobytes() for row in range(len(dataset))]
    assert data == [Path(path).read_bytes() for path, _ in expected]
    with pytest.raises(TypeError, match=r"images in files of their own to be packed, got .*Tar of .*; give an ImageF"):
        pack(dataset, tmp_path / "none")
    with pytest.raises(TypeError, match=r"Table of paths, got \('.*', None\)"):
        pack(Table(tmp_path / "list.csv"), tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 kB"), (2560, "2.6 kB"), (999_999, "1000.0 kB"), (10**6, "1.0 MB"), (10**14, "100.0 TB")]
)
def test_sizes_have_the_unit_that_fits(size: int, text: str) -> None:
    assert format_size(size) == text


def test_pack_refuses_what_it_would_ignore(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="samples must have at least one image, got none"):
        pack([], tmp_path / "out")
    with pytest.raises(ValueError, match="quality= goes with resize=, got quality=90 alone"):
        pack(pictures, tmp_path / "out", quality=90)
    for folder, *options in ((tmp_path / "empty",), (pictures, "--quality", 90)):
        result = run("pack", folder, tmp_path / "out", *options)
        assert result.exit_code == 2, result.output
    assert "--quality goes with --resize" in result.output
    assert not (tmp_path / "out").exists()


def test_pack_resizes(pictures: Path, tmp_path: Path) -> None:
    Image.new("RGBA", (300, 40)).save(tmp_path / "wide.png")
    samples = [(tmp_path / "wide.png", 2), *ImageFolder(pictures).samples[:2]]
    dataset = pack(samples, tmp_path / "out", resize=20, quality=50)
    assert (dataset[0][0].size, dataset[0][1]) == ((150, 20), 2)
    assert all(min(image.size) == 20 for image, _ in dataset)
    assert min(pack(samples, tmp_path / "large", resize=500)[1][0].size) < 100
    with pytest.raises(TypeError, match=r"pairs of a path and an int, or .* Table of paths, got \('a.jpg', 'cat'\)"):
        pack([("a.jpg", "cat")], tmp_path)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="must have a suffix and a label of 0 or more, got -1"):
        pack([("x.jpg", -1)], tmp_path / "none")
    one, several = (pack(samples * 5, tmp_path / str(count), 999, 20, num_workers=count) for count in (0, 2))
    assert len(list((tmp_path / "2").glob("*.tar"))) > 2
    assert [one.read(range_of(row))[0].tobytes() for row in range(15)] == [
        several.read(range_of(row))[0].tobytes() for row in range(15)
    ]
    truncated = tmp_path / "truncated.jpg"
    truncated.write_bytes(Path(samples[1][0]).read_bytes()[:300])
    with pytest.raises(OSError, match=r"truncated\.jpg cannot be resized: ") as caught:
        pack([*samples, (truncated, 0)], tmp_path / "none", resize=9, num_workers=2)
    assert caught.tb
    assert not multiprocessing.active_children(), "the collector would wait for them"
    assert list((tmp_path / "none").iterdir()) == []


def test_pack_resizes_in_workers(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_resize", lambda *_: str(os.getpid()).encode())
    state = torch.get_rng_state()
    dataset = pack(ImageFolder(pictures).samples[:4], tmp_path, resize=9, num_workers=2)
    assert torch.equal(torch.get_rng_state(), state)
    processes = {int(dataset.read(range_of(row))[0].tobytes()) for row in range(4)}
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_index_is_the_one_that_a_dataset_takes(pictures: Path, tmp_path: Path) -> None:
    pack(pictures, tmp_path)
    for file in tmp_path.glob("*.npz"):
        file.unlink()
    result = run("index", tmp_path / "shard-*.tar")
    assert result.exit_code == 0, result.output
    assert "24 images in 1 shard, 14 bytes for each, in " in result.output
    (made,) = tmp_path.glob("*.npz")
    assert Tar(tmp_path / "shard-000000.tar").index.file == made
    assert run("index", tmp_path / "shard-*.tar", "--label", "cls,json", "--output", tmp_path / "i.npz").exit_code == 0
    os.truncate(tmp_path / "shard-000000.tar", 2000)
    refused = run("index", tmp_path / "shard-*.tar")
    assert refused.exit_code == 2
    assert "has changed since" in " ".join(refused.output.split())


def test_an_option_that_a_kind_of_shards_does_not_take_is_refused(pictures: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(ImageFolder(pictures).samples[0][0])
    for command in ("index", "check"):
        result = run(command, tmp_path / "all.zip", "--image", "x")
        assert result.exit_code == 2
        assert "--image goes with tar, TFRecord and LMDB files, got " in " ".join(result.output.split())
    for target in (pictures, tmp_path / "a.mp4"):
        result = run("check", target, "--image", "x")
        assert (result.exit_code, "--image goes with SHARDS, got " in result.output) == (2, True)


def test_check_names_shard_key_and_offset(pictures: Path, tmp_path: Path) -> None:
    samples = ImageFolder(pictures).samples
    whole = Path(samples[0][0]).read_bytes()
    contents = {"cut": whole[: len(whole) // 2], "empty": b"", "html": b"<html>", "sound": whole}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for key, data in contents.items():
            member = tarfile.TarInfo(f"{key}.jpg")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    result = run("check", tmp_path / "a.tar")
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert f"truncated {tmp_path / 'a.tar'}, cut at byte 512 it ends before" in next(x for x in lines if "cut" in x)
    assert [sum(line.startswith(kind) for line in lines) for kind in ("truncated", "empty", "no image")] == [1, 1, 1]
    assert any("4 images" in line and "3 with problems" in line for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    assert run("check", pack(pictures, tmp_path / "out").shards.paths[0]).exit_code == 0
    (tmp_path / "b.tar").write_bytes(b"x" * 2000)
    assert "is no tar file, or damaged" in " ".join(run("check", tmp_path / "b.tar").output.split())
    assert run("check", tmp_path / "missing.tar").exit_code == 2


def test_check_names_records_that_are_left_out(pictures: Path, tmp_path: Path) -> None:
    image = Path(ImageFolder(pictures).samples[0][0]).read_bytes()
    with (tmp_path / "a.rec").open("wb") as stream:
        for labels, data in (((), image), ((), b""), ((1.0, 2.0), b""), ((1.0, 2.0, 3.0), b"")):
            content = struct.pack(f"<IfQQ{len(labels)}f", len(labels), 0, 0, 0, *labels) + data
            stream.write(struct.pack("<II", 0xCED7230A, len(content)) + content + bytes(-len(content) % 4))
    result = run("check", tmp_path / "a.rec")
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.output.splitlines() if line.startswith("empty")]
    places = [line.partition(" at byte ")[0] for line in lines]
    assert places == [f"empty {tmp_path / 'a.rec'}, record {number}" for number in (1, 3)]
    assert "it has no image, and RecordIO leaves it out" in lines[0]
    assert "1 images under" in result.output
