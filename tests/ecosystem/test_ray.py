"""Ray Train with two workers on the CPU: loaders prepared by torchdali and by Ray, and the recipe.

Starting Ray and its workers takes long, so that they run both.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "ray_train.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = '''
import json
import sys
import warnings
from pathlib import Path

import ray
import ray.train.torch
import torch
from torch.utils import data as torch_data
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, WeightedRandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

root, out = map(Path, sys.argv[1:3])
del sys.argv[1:3]
chain = v2.Compose([v2.ToImage(), v2.Resize((8, 8)), v2.ToDtype(torch.float32, scale=True)])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def compare(config):
    """Write each worker's labels in two epochs, from both loaders, and what becomes of other loaders."""
    from torchdali import DALILoader
    from torchdali.ray import prepare_data_loader

    rank = ray.train.get_context().get_world_rank()
    data = ImageFolder(root)

    def epochs(prepare, loader):
        loader = prepare(loader)
        labels = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            labels.append([label for _, batch in loader for label in batch.tolist()])
        return labels

    transformed = ImageFolder(root, chain)
    found = {}
    for shuffle in (False, True):
        theirs = torch_data.DataLoader(transformed, 5, shuffle, drop_last=True)
        ours = DALILoader(data, 5, shuffle, drop_last=True, transform=chain, seed=7)
        found[f"shuffle {shuffle}"] = [
            epochs(ray.train.torch.prepare_data_loader, theirs), epochs(prepare_data_loader, ours)
        ]
    ours = prepare_data_loader(DALILoader(data, 5, transform=chain, seed=7, on_error="skip"))
    found["kept"] = [type(ours).__name__, ours.seed, ours.on_error, str(ours.device), ours.transform is chain]
    images, _ = next(iter(ours))
    expected, _ = next(iter(ray.train.torch.prepare_data_loader(torch_data.DataLoader(transformed, 5))))
    found["off"] = float((images - expected).abs().max())
    plain = prepare_data_loader(torch_data.DataLoader(transformed, 5))
    found["plain"] = [type(plain).__name__, len(plain)]
    auto = prepare_data_loader(DALILoader(data, 5, shuffle=True, transform=chain, distributed="auto"))
    found["auto"] = [auto.distributed, type(auto.sampler).__name__, auto.sampler.shuffle]
    alone = prepare_data_loader(DALILoader(data, 5, transform=chain), add_dist_sampler=False, move_to_device=False)
    found["alone"] = [len(alone), alone.device]
    batches = BatchSampler(SequentialSampler(data), 5, False)
    kept = prepare_data_loader(DALILoader(data, batch_sampler=batches, transform=chain), add_dist_sampler=False)
    found["batches"] = kept.batch_sampler is batches
    try:
        prepare_data_loader(DALILoader(data, batch_sampler=batches, transform=chain))
    except ValueError as error:
        found["refused"] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weighted = WeightedRandomSampler([1.0] * len(data), 10)
        prepare_data_loader(DALILoader(data, 5, sampler=weighted, transform=chain))
    found["warned"] = [str(one.message) for one in caught if "WeightedRandomSampler" in str(one.message)]
    found["stream"] = [batch.tolist() for batch in prepare_data_loader(DALILoader(Stream(), 2))]
    (out / f"{rank}.json").write_text(json.dumps(found))


recipes_loop = train_loop


def train_loop(config):
    compare(config)
    recipes_loop(config)


ray.init(num_cpus=2, include_dashboard=False)
main()
ray.shutdown()
'''


def test_each_worker_gets_its_share_by_dali(
    pictures: Path, run_script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs ray[train]")
    out = tmp_path / "out"
    out.mkdir()
    shutil.copytree(pictures, tmp_path / "data" / "train")
    monkeypatch.chdir(tmp_path)
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["--model", "shufflenet_v2_x0_5", "--size", 32, "--batch-size", 4, "--epochs", 2]
    recipe = RECIPE.read_text().partition('if __name__ == "__main__":')[0]
    arguments = [pictures, out, tmp_path / "data", *options, "--results", tmp_path / "results"]
    done = run_script(recipe + SCRIPT, *arguments, fresh=True, timeout=560, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"epoch +(\d)/2  loss [\d.]+  (\d+) images", done.stdout)
    assert lines == [("1", "24"), ("2", "24")]
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(ranks):
        for shuffle in (False, True):
            theirs, ours = found[f"shuffle {shuffle}"]
            assert ours == theirs
            assert (theirs[0] != theirs[1]) == shuffle
        assert found["kept"] == ["DALILoader", 7, "skip", "cpu", True]
        assert found["off"] < 20 / 255  # the decoders differ at edges of colours
        assert found["plain"] == ["_WrappedDataLoader", 3]
        assert found["auto"] == ["auto", "Shard", True]
        assert found["alone"] == [5, "auto"]
        assert found["batches"]
        assert (
            "prepare_data_loader must be given a loader with batch_size, got one with the batch sampler Batch"
            in (found["refused"])
        )
        assert len(found["warned"]) == (rank == 0)
        assert found["stream"] == [[0, 1], [2, 3]]
    assert ranks[0]["shuffle True"] != ranks[1]["shuffle True"]


def test_the_page_shows_lines_of_the_recipe() -> None:
    page, lines = (ROOT / "docs" / "ray_train.md").read_text(), RECIPE.read_text().splitlines()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [line for line in block.splitlines() if line.strip() != "..." and line not in lines] == []
