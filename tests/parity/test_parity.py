"""``torchdali parity``: the command, its document, and that it sees what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from helpers.design import design_bound, is_looser, leaves
from torchvision.transforms import v2

from torchdali.tools import cli
from torchdali.tools.parity import results
from torchdali.tools.parity.case import Case, GroupCase, GroupDifferences
from torchdali.tools.parity.cases import CASES
from torchdali.tools.parity.compare import Differences, compile_chain, find_exceeded_bounds, measure
from torchdali.tools.parity.decoding import FORMATS, DecodingDifferences, measure_decoding
from torchdali.tools.parity.distributions import LEVEL, compare_distributions, p_value, significance_level
from torchdali.tools.parity.draws import DRAWS, Draw
from torchdali.tools.parity.groups import GROUPS
from torchdali.tools.parity.photographs import write_photographs
from torchdali.tools.parity.report import TORCH_ONLY, list_names, list_rules
from torchdali.tools.parity.targets import TARGETS
from torchdali.transforms import Rule, find_rule
from torchdali.transforms.rules.flip import RandomHorizontalFlip
from torchdali.transforms.targets import Boxes, Targets

SOME = "^(CenterCrop|RandomHorizontalFlip|RandomHorizontalFlip: flip|decoding PNG)$"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "made" / "parity.md"


def run_parity(out: Path, *options: str) -> Result:
    """Run the command on the CPU alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return CliRunner().invoke(
            cli.commands(), ["parity", "--out", str(out), "--only", SOME, *options], catch_exceptions=False
        )


@pytest.fixture
def parity(out: Path) -> Callable[..., Result]:
    return partial(run_parity, out)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, str, str]:
    """What the command prints, its document and its results."""
    out = tmp_path_factory.mktemp("measured") / "parity.md"
    return run_parity(out), out.read_text(), out.with_suffix(".json").read_text()


def rows(text: str, heading: str) -> dict[str, dict[str, str]]:
    """The tables whose first column has this heading: by the first cell, the cells by the heading of their column."""
    found: dict[str, dict[str, str]] = {}
    for head, body in re.findall(rf"^\| ({heading} \|.*) \|\n\|[-| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE):
        columns = head.split(" | ")
        for line in body.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            assert len(cells) == len(columns), line
            found[cells[0]] = dict(zip(columns, cells, strict=True))
    return found


def cell(row: dict[str, str], start: str) -> str:
    (value,) = [value for column, value in row.items() if column.startswith(start)]
    return value


def test_command_writes_what_it_measured(measured: tuple[Result, str, str]) -> None:
    done, text, _ = measured
    assert done.exit_code == 0, done.output
    assert "2 cases, 1 random parameters and 1 formats; no failures" in done.output
    cases = rows(text, "Case")
    assert list(cases) == list(CASES)
    assert cell(cases["CenterCrop"], "CPU") == "0 / 0 / 0 / 0 %"
    assert cases["CenterCrop"]["Chain"] == "`CenterCrop(size=(101, 90))`"
    assert cases["CenterCrop"]["Operators on a GPU"] == "decoders.image; slice"
    assert cases["RandomHorizontalFlip"]["Random numbers"] == "flip with probability 0.5"
    assert cell(cases["Resize"], "CPU") == "not measured"
    assert cases["Resize"]["Why"] == CASES["Resize"].why
    assert not any(column.startswith("GPU") for column in cases["Resize"])

    draws = rows(text, "Parameter")
    assert list(draws) == list(DRAWS)
    assert float(draws["RandomHorizontalFlip: flip"]["p"]) > significance_level()
    formats = rows(text, "Format")
    assert list(formats) == list(FORMATS)
    assert formats["PNG"]["Max / mean"] == formats["PNG"]["Bound"] == "0 / 0"
    assert formats["PNG"]["torchdali decodes with"] == "DALI"
    assert {name.strip("`") for name in rows(text, "Name")} == set(TORCH_ONLY)
    assert len(rows(text, "Transform")) == len(set(list_rules().values()))
    assert torch.__version__ in text
    assert not re.search(r"20\d\d-\d\d|\d\d:\d\d", text), "a date would make every run a change"


def test_command_is_reproducible(parity: Callable[..., Result], out: Path, measured: tuple[Result, str, str]) -> None:
    parity()
    assert (out.read_text(), out.with_suffix(".json").read_text()) == measured[1:]


@pytest.fixture
def with_gpu(measured: tuple[Result, str, str], out: Path) -> Path:
    """The JSON of a run on the CPU, and on a GPU that is not here, where nothing was as it should be."""
    out.parent.mkdir()
    stored = out.with_suffix(".json")
    kept = json.loads(measured[2])
    gpu = json.loads(json.dumps(kept["devices"]["cpu"]))
    gpu["machine"] = {"name": "Some GPU", "versions": {"torch": "9.9"}}
    gpu["cases"]["CenterCrop"]["measured"] |= {
        "max_abs": 3.0,
        "max_abs_interior": 2.0,
        "mean_abs": 0.0125,
        "frac_above_1": 0.5,
    }
    gpu["decoding"] = {"JPEG 4:2:0": {"max_abs": 200.0, "mean_abs": 0.5, "by": "DALI", "error": ""}}
    kept["devices"]["cuda"] = gpu
    stored.write_text(json.dumps(kept))
    return stored


def test_two_machines_make_one_document(with_gpu: Path, parity: Callable[..., Result], out: Path) -> None:
    done = parity("--only", "^PILToTensor$")
    assert done.exit_code == 1, "what fails in the document fails, whoever measured it"
    assert "CenterCrop on cuda: max 3, bound 0; max inside 2, bound 0; mean 0.0125, bound 0" in done.output
    assert "decoding JPEG 4:2:0 on cuda: max 200, bound 64" in done.output
    assert "2 failures" in done.output

    text = out.read_text()
    cases = rows(text, "Case")
    assert cell(cases["CenterCrop"], "GPU") == "**3 / 2 / 0.013 / 50 %**"
    assert cell(cases["CenterCrop"], "CPU") == cell(cases["PILToTensor"], "CPU") == "0 / 0 / 0 / 0 %"
    assert cell(cases["PILToTensor"], "GPU") == "not measured"
    assert rows(text, "Device")["GPU"] | {"Machine": "Some GPU", "torch": "9.9"} == rows(text, "Device")["GPU"]
    assert "**200 / 0.5**" in text


def test_results_of_another_machine_are_not_mixed(with_gpu: Path) -> None:
    found = results.read(with_gpu)
    here = results.describe_machine("cpu")
    assert set(found.select_device("cpu", here).cases) == {"CenterCrop", "RandomHorizontalFlip"}
    assert not found.select_device("cuda", here).cases


def test_a_part_is_not_measured_where_other_results_would_be_lost(
    with_gpu: Path, parity: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = with_gpu.read_text()
    monkeypatch.setattr(results, "describe_machine", lambda device: results.Machine("Other processor", {}))
    done = parity("--only", "^PILToTensor$")
    assert done.exit_code == 2
    assert "has results of other versions for cpu" in done.output
    assert with_gpu.read_text() == before


def test_a_part_that_another_machine_measured_is_marked(
    with_gpu: Path, parity: Callable[..., Result], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = results.describe_machine("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(results, "describe_machine", lambda _: results.Machine("Other processor", here.versions))
        parity("--only", "^CenterCrop$")
    text = out.read_text()
    assert "\n(†): measured on Other processor.\n" in text
    assert cell(rows(text, "Case")["CenterCrop"], "CPU") == "0 / 0 / 0 / 0 % (†)"
    assert cell(rows(text, "Case")["RandomHorizontalFlip"], "CPU") == "0 / 0 / 0 / 0 %"
    assert results.read(with_gpu).devices["cpu"].elsewhere == {"CenterCrop": "Other processor"}
    parity("--only", "^CenterCrop$")
    assert "†" not in out.read_text()


def test_results_of_what_is_no_longer_so_are_dropped(with_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "CenterCrop", Case([v2.CenterCrop(7)], 0, 0, 0))
    monkeypatch.delitem(DRAWS, "RandomHorizontalFlip: flip")
    found = results.read(with_gpu)
    assert set(found.devices["cpu"].cases) == {"RandomHorizontalFlip"}
    assert not found.draws
    results.write(found, with_gpu)
    assert results.read(with_gpu) == found


def test_a_rule_that_does_something_else_is_seen(
    parity: Callable[..., Result], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned(_: Any, ops: Any, image: Any, params: Any) -> Any:
        return ops.fn.flip(image, horizontal=0, vertical=params["flip"])

    monkeypatch.setattr(RandomHorizontalFlip, "lower", turned)
    done = parity()
    assert done.exit_code == 1
    assert re.search(r"^RandomHorizontalFlip on cpu: max \d+, bound 0", done.output, re.MULTILINE)
    cases = rows(out.read_text(), "Case")
    assert cell(cases["RandomHorizontalFlip"], "CPU").startswith("**")
    assert not cell(cases["CenterCrop"], "CPU").startswith("**")


def test_a_rule_that_raises_is_seen_and_the_others_go_on(
    parity: Callable[..., Result], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower(*_: Any) -> Any:
        raise AttributeError("no such operator")

    monkeypatch.setattr(RandomHorizontalFlip, "lower", lower)
    done = parity()
    assert done.exit_code == 1
    assert "RandomHorizontalFlip on cpu: AttributeError: no such operator" in done.output
    assert cell(rows(out.read_text(), "Case")["CenterCrop"], "CPU") == "0 / 0 / 0 / 0 %"


def test_a_rule_that_draws_otherwise_is_seen(parity: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = RandomHorizontalFlip.draw
    monkeypatch.setattr(RandomHorizontalFlip, "draw", lambda *a: {"flip": 1 - draw(*a)["flip"]})
    done = parity()
    assert done.exit_code == 1
    assert re.search(r"^RandomHorizontalFlip: flip: p = \S+, below", done.output, re.MULTILINE)


def test_a_decoder_that_differs_is_seen(parity: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    for found, exit_code in ((DecodingDifferences(), 0), (DecodingDifferences(1, 0.001), 1)):
        monkeypatch.setattr("torchdali.tools.parity.certify.measure_decoding", lambda *_, found=found: found)
        assert parity().exit_code == exit_code


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "cuda"), "no CUDA device"),
        (("--only", "("), "not a regular expression"),
        (("--only", "no such case"), "'no such case' is found in no name of a case"),
    ],
)
def test_what_cannot_be_measured(parity: Callable[..., Result], out: Path, options: Any, said: str) -> None:
    done = parity(*options)
    assert done.exit_code == 2
    assert said in done.output
    assert not out.exists()


def test_boxes_points_and_masks_are_on_the_page(parity: Callable[..., Result], out: Path) -> None:
    done = parity("--only", "^targets RandomHorizontalFlip$")
    assert done.exit_code == 0, done.output
    assert "1 cases, 0 random parameters and 0 formats; no failures" in done.output
    cases = rows(out.read_text(), "Targets")
    assert [f"targets {name}" for name in cases] == list(TARGETS)
    assert cell(cases["RandomHorizontalFlip"], "CPU") == "0 px / 0 px / 0 %"
    assert cell(cases["RandomRotation"], "CPU") == "not measured"
    found = results.read(out.with_suffix(".json"))
    results.write(found, out.with_suffix(".json"))
    assert results.read(out.with_suffix(".json")) == found
    assert set(found.devices["cpu"].groups["targets"]) == {"targets RandomHorizontalFlip"}


def test_moves_that_do_something_else_are_seen(
    parity: Callable[..., Result], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip = Boxes.flip
    monkeypatch.setattr(
        Boxes, "flip", lambda self, *args: (flip(self, *args), setattr(self, "values", self.values + 1e-3))
    )
    assert parity("--only", "^targets RandomHorizontalFlip$").exit_code == 1
    assert re.match(
        r"\*\*0.001 px / 0 px / 0 %\*\*", cell(rows(out.read_text(), "Targets")["RandomHorizontalFlip"], "CPU")
    )
    monkeypatch.setattr(Targets, "flip", lambda self, *_: self.size)
    done = parity("--only", "^targets RandomHorizontalFlip$")
    assert re.search(
        r"^targets RandomHorizontalFlip on cpu: boxes \d+, bound 0; points \d+, .*; masks 0.\d+", done.output, re.M
    )


# What is measured


def images(*, add: float = 0.0, at: Any = ..., dtype: torch.dtype = torch.uint8) -> Iterator[Any]:
    for _ in range(2):
        theirs = torch.full((3, 20, 30), 100.0)
        ours = theirs.clone()
        ours[at] += add
        yield ours.to(dtype), theirs.to(dtype)


def test_differences_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(**options: Any) -> Differences:
        monkeypatch.setattr("torchdali.tools.parity.compare.compare_chain", lambda *_: images(**options))
        return measure(Case([], 0, 0, 0), None, "cpu")

    assert measured() == Differences()
    border = (slice(None), slice(0, 4), slice(None))
    assert measured(add=-2, at=border) == Differences(2, 0, 0.4, 0.2)
    assert measured(add=1) == Differences(1, 1, 1, 0)
    assert measured(add=-2, at=(0, 10)) == Differences(2, 2, pytest.approx(2 / 60), 0.05)
    assert measured(add=0.5, dtype=torch.float32) == Differences(0.5, 0.5, 0.5, 1)
    nan = measured(add=float("nan"), dtype=torch.float32)
    assert nan.max_abs == nan.mean_abs == float("inf")


@pytest.mark.parametrize("field", ["max_abs", "max_abs_interior", "mean_abs"])
def test_each_bound_counts(field: str) -> None:
    case = Case([], 1, 1, 1)
    assert find_exceeded_bounds(case, Differences(1, 1, 1)) == ""
    for beyond in (1.01, float("inf"), float("nan")):
        assert find_exceeded_bounds(
            case, Differences(**{"max_abs": 1, "max_abs_interior": 1, "mean_abs": 1, field: beyond})
        )
    assert find_exceeded_bounds(case, Differences(error="broken")) == "broken"


def test_each_bound_of_targets_counts() -> None:
    case, names = GroupCase([], (1, 1, 1)), ("boxes", "points", "masks")
    find_exceeded = GROUPS["targets"].find_exceeded
    assert find_exceeded(case, GroupDifferences(dict.fromkeys(names, 1.0))) == ""
    for name in names:
        wrong = GroupDifferences({**dict.fromkeys(names, 1.0), name: float("nan")})
        assert find_exceeded(case, wrong).startswith(name)
    assert find_exceeded(case, GroupDifferences(error="broken")) == "broken"


def test_a_chain_that_runs_in_torch_is_not_measured(tmp_path: Path) -> None:
    folder = write_photographs(tmp_path / "photographs")
    with pytest.raises(ValueError, match="a part of the chain runs in torch"):
        measure(Case([v2.Lambda(lambda x: x)], 0, 0, 0), folder, "cpu")


def test_distributions_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    for draw, other in (
        (lambda: rng.random(3000), lambda: rng.random(3000) * 1.1),
        (lambda: rng.integers(0, 10, 3000), lambda: rng.integers(0, 9, 3000)),
        (lambda: np.zeros(3000), lambda: np.ones(3000)),
        (lambda: rng.integers(0, 24, 3000), lambda: rng.integers(0, 23, 3000)),
    ):
        assert p_value(draw(), draw()).p > significance_level()
        assert p_value(draw(), other()).p < significance_level()
    one_of_two = v2.RandomChoice([v2.Identity(), v2.Grayscale(3)], p=[0.5, 0.5])
    assert compare_distributions(Draw(one_of_two, lambda p: p["chain1"], 0.4)).p < significance_level()
    assert compare_distributions(Draw(one_of_two, lambda p: p["chain1"], (0.6, 0.4))).p < significance_level()
    assert significance_level() == LEVEL / len(DRAWS)


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_is_pils(name: str, tmp_path: Path, device: str) -> None:
    found = results.Results()
    of_device = found.select_device(device, results.describe_machine(device))
    of_device.decoding[name] = measure_decoding(tmp_path / "pictures", name, device)
    assert not results.find_failures(found)


# What there is


def test_every_name_of_torchvision_is_known() -> None:
    with_rule = {one for one in list_rules() if isinstance(one, type)}
    public = {name: one for name, one in vars(v2).items() if not name.startswith("_") and isinstance(one, type)}
    ruled = {name for name, one in public.items() if one in with_rule}
    assert len(ruled) > 20
    unknown = set(public) - ruled - set(TORCH_ONLY)
    assert not unknown, "give each a rule in torchdali/transforms/, or a reason in torchdali/tools/parity/report.py"
    assert not ruled & set(TORCH_ONLY)
    gone = set(TORCH_ONLY) - set(public)
    assert gone <= {"SanitizeKeyPoints"}, "torchvision, which has that one since 0.24, has these no more"
    assert all(TORCH_ONLY.values())


def own(rule: type[Rule]) -> bool:
    """Whether it is torchdali's, and not one that a test has made."""
    return rule.__module__.startswith("torchdali.")


def test_every_rule_has_a_case() -> None:
    tried = {type(one) for case in CASES.values() for one in leaves(case.chain)}
    of_torchvision = {rule for one, rule in list_rules().items() if isinstance(one, type) and own(rule)}
    missing = {rule for rule in of_torchvision if not tried & set(rule.handles)}
    assert {name for rule in missing for name in list_names(rule)} <= {
        "LinearTransformation",  # it never runs in DALI
        "ExifTranspose",  # contract/test_exif.py has files with EXIF data
        *("SanitizeBoundingBoxes", "SanitizeKeyPoints", "RandomIoUCrop"),  # test_annotations.py has boxes and points
    }


def test_every_rule_that_moves_boxes_has_a_case() -> None:
    tried = {type(one) for case in TARGETS.values() for one in leaves(case.chain)}
    moving = {
        type(rule)
        for case in CASES.values()
        for rule in compile_chain(case.chain, fused=False).all_rules
        if rule.moves and not rule.moves_in_torch
    }
    assert {rule.__name__ for rule in moving if not tried & set(rule.handles)} == {
        "ToPureTensor",  # parity/test_annotations.py has plain tensors
        "_Corner",  # of FiveCrop and TenCrop, which torchvision refuses for boxes
    }


def test_every_random_rule_has_its_distributions_tested() -> None:
    drawn = {type(find_rule(one)) for draw in DRAWS.values() for one in leaves([draw.transform])}
    random = {
        type(rule)
        for case in CASES.values()
        for rule in compile_chain(case.chain, fused=False).all_rules
        if rule.randomness
    }
    assert {one.__name__ for one in random - drawn} == set()


@pytest.mark.parametrize("name", CASES)
def test_a_bound_looser_than_the_designs_says_why(name: str) -> None:
    case = CASES[name]
    assert case.why or not is_looser(case), design_bound(case)
    assert "\n" not in case.why


def test_the_designs_bounds() -> None:
    to_float = v2.ToDtype(torch.float32, scale=True)
    assert design_bound(Case([v2.ToImage(), v2.CenterCrop(3)], 0, 0, 0)) == (0, 0, 0)
    assert design_bound(Case([v2.Resize(3)], 0, 0, 0)) == (11, 1, 0.03)
    assert design_bound(Case([v2.RandomApply([v2.Resize(3), v2.ColorJitter(hue=0.1)])], 0, 0, 0)) == (11, 1, 0.03)
    assert design_bound(Case([v2.ToImage(), to_float, v2.ColorJitter(0.1, 0.1)], 0, 0, 0))[0] == pytest.approx(
        3 / 255, abs=1e-5
    )
    assert is_looser(Case([v2.Pad(3)], 0, 0, 0.001))
    assert not is_looser(Case([v2.RandomRotation(9)], 1, 1, 1e-4))
