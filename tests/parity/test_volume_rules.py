"""Transforms of volumes in DALI: equal to their torch bodies, with the same numbers, for volumes and labels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError, TransformError
from torchdali.datasets import Volumes
from torchdali.pipeline.compile import compile_plan
from torchdali.tools.parity import results
from torchdali.tools.parity.groups import GROUPS
from torchdali.tools.parity.report import list_rules
from torchdali.tools.parity.volumes import VOLUMES, measure_volumes
from torchdali.transforms import (
    GaussianBlur3D,
    RandomAffine3D,
    RandomCrop3D,
    RandomFlip3D,
    RandomIntensity,
    RandomRotate3D,
    find_rule,
)
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import InputKind, Spec

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
PATCH = (16, 20, 18)
SEED = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two smooth volumes of two channels, with values from about -2 to 2, and labels 0 and 3."""
    root = tmp_path_factory.mktemp("volumes")
    rng = np.random.default_rng(0)
    for name in ("images", "labels"):
        (root / name).mkdir()
    for number, sides in enumerate([(20, 30, 24), (17, 26, 28)]):
        noise = gaussian_filter(rng.normal(size=(2, *sides)), (0, 1.5, 1.5, 1.5)) * 10
        np.save(root / "images" / f"{number}.npy", noise.astype(np.float32))
        np.save(root / "labels" / f"{number}.npy", (noise[0] > 0.3).astype(np.uint8) * 3)
    return root


def of(folder: Path, **options: Any) -> Volumes:
    return Volumes(folder / "images", PATCH, folder / "labels", per_volume=3, seed=2, **options)


# The chain, the largest difference of a value, and the share of labels that may differ.
CHAINS: dict[str, tuple[list[Any], float, float]] = {
    "crop": ([RandomCrop3D((7, 20, 9))], 0, 0),
    "flip": ([RandomFlip3D(0.6)], 0, 0),
    "flip two axes": ([RandomFlip3D(1.0, axes=(0, 2))], 0, 0),
    "intensity": ([RandomIntensity((0.5, 1.5), (-1, 1))], 5e-7, 0),
    "blur": ([GaussianBlur3D((0.0, 2.0))], 2e-6, 0),
    "no blur": ([GaussianBlur3D(0.0)], 0, 0),
    "rotate": ([RandomRotate3D(((-30, 30), (-20, 20), (-10, 10)))], 1e-3, 1e-3),
    "affine": ([RandomAffine3D((-40, 40), (-4, 4), (0.7, 1.4), fill=-1.5)], 1e-3, 1e-3),
    "all": (
        [
            RandomFlip3D(),
            v2.Compose([RandomRotate3D((-15, 15)), RandomCrop3D((12, 14, 10))]),
            GaussianBlur3D((0.3, 1.0)),
            RandomIntensity(),
        ],
        1e-3,
        1e-3,
    ),
}


def replay(chain: list[Any], index: int, volume: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """What the torch bodies make of a sample with the numbers that its rules draw."""
    spec = Spec("volume", torch.float32, 2, unit=False)
    plan = compile_plan(chain, torch.device("cpu"), "exact", spec, InputKind.PIXELS)
    assert not plan.needs_torch
    draws = Draws(epoch_key(SEED, 0), np.array([index]), np.zeros(1, np.int64))
    size = np.array([PATCH], np.int64)
    for rule in plan.rules:
        drawn = rule.draw(draws.select_position(rule.position), size)
        size = rule.output_size(size, drawn)
        params = rule.make_params({name: values[0] for name, values in drawn.items()}, (0, 0))
        volume, labels = (rule.transform.transform(part, params) for part in (volume, labels))
    return [part.as_subclass(torch.Tensor) for part in (volume, labels)]


@pytest.mark.parametrize("name", CHAINS)
def test_dali_equals_torch(folder: Path, name: str, device: str) -> None:
    chain, bound, off = CHAINS[name]
    dataset = of(folder)
    loader = DALILoader(dataset, 4, transform=v2.Compose(chain), seed=SEED, device=device)
    assert loader._session.source is not None
    ours = [pair for batch in loader for pair in zip(*batch, strict=True)]
    differing: list[float] = []
    for index, (volume, labels) in enumerate(ours):
        expected, expected_labels = replay(chain, index, *dataset[index])
        assert (volume.shape, volume.dtype) == (expected.shape, expected.dtype)
        assert (labels.shape, labels.dtype) == (expected_labels.shape, expected_labels.dtype)
        assert (volume.cpu() - expected).abs().max() <= bound
        differing.append(float((labels.cpu() != expected_labels).double().mean()))
    assert len(differing) == 6
    assert sum(differing) <= off * 6


def draw(transform: Any, size: tuple[int, int, int]) -> dict[str, Any]:
    """What a rule draws for 500 samples of a size."""
    rule = find_rule(transform)
    assert rule
    draws = Draws(epoch_key(SEED, 0), np.arange(500), np.zeros(500, np.int64))
    return rule.draw(draws, np.tile(np.array(size, np.int64), (500, 1)))


def assert_uniform(values: Any, low: float, high: float) -> None:
    room = (high - low) / 50
    assert low <= values.min() <= low + room
    assert high - room <= values.max() <= high
    assert abs(values.mean() - (low + high) / 2) < 3 * room


def test_draws_follow_the_arguments() -> None:
    start = draw(RandomCrop3D((15, 20, 18)), (16, 20, 20))["start"]
    assert [np.unique(column).tolist() for column in start.T] == [[0, 1], [0], [0, 1, 2]]
    flips = draw(RandomFlip3D(0.3, axes=(0, 2)), (8, 8, 8))
    assert not flips["vertical"].any()
    assert all(100 < flips[name].sum() < 200 for name in ("depthwise", "horizontal"))
    assert (flips["depthwise"] != flips["horizontal"]).any()
    intensity = draw(RandomIntensity((0.5, 1.5), (-3, -1)), (8, 8, 8))
    assert_uniform(intensity["scale"], 0.5, 1.5)
    assert_uniform(intensity["shift"], -3, -1)
    assert_uniform(draw(GaussianBlur3D((0.5, 1.5)), (8, 8, 8))["sigma"], 0.5, 1.5)
    affine = draw(RandomAffine3D(((-40, 20), 0, 0), (0, (1, 3), (-5, 5)), (0.5, 1.5)), (8, 9, 10))["middle"]
    linear = affine[:, :, :3]
    scale = np.linalg.det(linear) ** (-1 / 3)
    shift = -np.linalg.solve(linear, affine[:, :, 3:])[:, :, 0]
    assert_uniform(scale, 0.5, 1.5)
    assert_uniform(np.degrees(np.arctan2(linear[:, 2, 1], linear[:, 1, 1])), -40, 20)
    assert np.allclose(shift[:, 0], 0)
    assert_uniform(shift[:, 1], 1, 3)
    assert_uniform(shift[:, 2], -5, 5)
    for axis in range(3):  # as the torch body turns
        degrees = [0.0, 0.0, 0.0]
        degrees[axis] = 30.0
        expected = RandomRotate3D(degrees).make_params([torch.zeros(4, 5, 6)])["matrix"]
        assert np.allclose(draw(RandomRotate3D(degrees), (4, 5, 6))["middle"], expected)


@pytest.mark.parametrize("name", ["volumes RandomAffine3D", "volumes of a training"])
def test_certificate(name: str, device: str) -> None:
    case = VOLUMES[name]
    measured = measure_volumes(case, None, device)
    assert not GROUPS["volumes"].find_exceeded(case, measured)
    found = results.Results()
    of_device = found.select_device("cpu", results.Machine())
    of_device.groups["volumes"]["volumes RandomFlip3D"] = results.GroupResult("", measured)
    (failure,) = results.find_failures(found)
    assert failure.startswith(f"volumes RandomFlip3D on cpu: values {measured.figures['values']:.3g}, bound 0")


def test_every_rule_is_in_a_case() -> None:
    ruled = {str(one).rpartition(".")[2] for one in list_rules() if "augment.volumes" in str(one)}
    assert ruled == {type(leaf).__name__ for case in VOLUMES.values() for leaf in case.chain}
    assert all(bool(case.why) == (case.bounds[0] > 0) for case in VOLUMES.values())


def test_samples_without_labels_and_of_a_collate_fn(folder: Path, device: str) -> None:
    options: Any = {"transform": RandomFlip3D(1.0), "seed": SEED, "device": device}
    alone = Volumes(folder / "images", PATCH, places="grid")
    (batch,) = DALILoader(alone, 100, **options)
    assert torch.equal(batch.cpu(), torch.stack([patch.flip([1, 2, 3]) for patch in alone]))
    dataset = of(folder)
    samples = next(iter(DALILoader(dataset, 3, collate_fn=list, **options)))
    for i, (volume, labels) in enumerate(samples):
        assert torch.equal(volume.cpu(), dataset[i][0].flip([1, 2, 3]))
        assert isinstance(labels, tv_tensors.Mask)
        assert torch.equal(labels.cpu(), dataset[i][1].as_subclass(torch.Tensor).flip([1, 2, 3]))


def test_places_without_a_seed_follow_from_the_loaders(folder: Path) -> None:
    def load(batch_size: int, seed: int) -> torch.Tensor:
        dataset = Volumes(folder / "images", PATCH, folder / "labels", per_volume=3)
        loader = DALILoader(dataset, batch_size, transform=RandomFlip3D(0), seed=seed, device="cpu")
        return torch.cat([volumes for volumes, _ in loader])

    first = load(2, 1)
    assert len({tuple(patch[0, 0, 0, :3].tolist()) for patch in first}) > 3
    assert torch.equal(first, load(3, 1))
    assert not torch.equal(first, load(3, 2))


def test_explain(folder: Path) -> None:
    text = io.StringIO()
    chain = v2.Compose([RandomRotate3D((-9, 9)), GaussianBlur3D(1.0)])
    loader = DALILoader(of(folder), 2, transform=chain, device="cpu")
    loader.explain(file=text)
    said = " ".join(text.getvalue().split())
    assert "2 of 2 transforms run in DALI" in said
    assert "6 patches (16, 20, 18) of 2 volumes" in said
    assert "view 1 float32 (2, D, H, W): warp_affine; gaussian_blur" in said
    assert "view 2 uint8 (1, D, H, W): labels; warp_affine" in said
    assert loader.stats(probe=True).probe is not None


def test_resuming(folder: Path) -> None:
    def open_loader() -> DALILoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DALILoader(of(folder), 2, transform=RandomFlip3D(), shuffle=True, generator=generator, device="cpu")

    loader = open_loader()
    epoch = iter(loader)
    next(epoch)
    state = loader.state_dict()
    rest = list(epoch)
    again = open_loader()
    again.load_state_dict(state)
    for ours, theirs in zip(again, rest, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_what_dali_cannot_run(folder: Path, tmp_path: Path) -> None:
    def open_loader(dataset: Any, *chain: Any) -> DALILoader[Any]:
        return DALILoader(dataset, 2, transform=v2.Compose(list(chain)) if chain else None, device="cpu")

    flip = RandomFlip3D()
    assert open_loader(of(folder))._session.source is None
    assert open_loader(of(folder, transform=flip), flip)._session.source is None
    np.save(tmp_path / "0.npy", np.zeros((20, 20, 20), np.int16))
    whole = Volumes([tmp_path / "0.npy"], (8, 8, 8))
    assert next(iter(open_loader(whole, flip, RandomIntensity(), GaussianBlur3D(1.0)))).dtype == torch.float32
    np.save(tmp_path / "1.npy", np.zeros((20, 20, 20), np.int64))
    labelled = Volumes([tmp_path / "0.npy"], (8, 8, 8), [tmp_path / "1.npy"])
    refused = [
        (of(folder), lambda *parts: parts, "function is none of torchdali's six transforms of volumes"),
        (Volumes(folder / "images", None), flip, "patch=None, so that they differ in size"),
        (
            whole,
            GaussianBlur3D(1.0),
            "GaussianBlur3D: DALI rounds other types than float32 otherwise, and this is int16",
        ),
        (
            whole,
            RandomRotate3D(9.0),
            "RandomRotate3D: DALI rounds other types than float32 otherwise, and this is int16",
        ),
        (labelled, flip, "labels must be uint8, int16, int32 or float32, got int64"),
    ]
    for dataset, transform, reason in refused:
        with pytest.raises(
            TransformError, match=f"DALI cannot run transform= on these volumes: .*{reason}; give the tr"
        ):
            open_loader(dataset, flip, transform)
    plan = compile_plan([flip], torch.device("cpu"), "exact", Spec("tensor"), InputKind.PIXELS)
    assert "it is for volumes" in plan.steps[0].note


def test_bad_volumes(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.load(folder / "images" / "0.npy"))
    np.save(tmp_path / "1.npy", np.zeros((20, 20, 20), np.float32))
    (tmp_path / "2.npy").write_text("no array")
    dataset = Volumes([tmp_path / f"{i}.npy" for i in range(4)], (8, 8, 8))
    reasons = {1: "is torch.float32 of 1 channels, and the first one is", 2: "must be a .npy file", 3: "no such file"}
    for bad, reason in reasons.items():
        with pytest.raises(SampleError, match=rf"^sample {bad} \(.*{bad}.npy\): .*{reason}"):
            next(iter(DALILoader(dataset, 1, sampler=[bad], transform=RandomFlip3D(), device="cpu")))
    loader = DALILoader(dataset, 4, transform=RandomFlip3D(0), on_error="replace", device="cpu")
    (batch,) = loader
    assert len(loader.errors) == 3
    assert batch[0].any()
    assert not batch[1:].any()
    with pytest.raises(SampleError, match="must be at least as large as the crop"):
        next(iter(DALILoader(dataset, 1, transform=RandomCrop3D((9, 8, 8)), device="cpu")))
    with pytest.raises(SampleError, match="blurs 9 voxels far"):
        next(iter(DALILoader(dataset, 1, transform=GaussianBlur3D(3.0), device="cpu")))
