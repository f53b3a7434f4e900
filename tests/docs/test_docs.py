"""What the documents say is so: the code of README.md runs, and its tables are those of the installed packages."""

from __future__ import annotations

import inspect
import io
import itertools
import math
import re
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same
from helpers.anchors import anchors
from helpers.object_server import ObjectServer
from PIL import Image
from torchvision.transforms import v2

import torchdali
from torchdali import DALILoader
from torchdali.datasets import Tar
from torchdali.tools.parity.compare import find_exceeded_bounds, measure
from torchdali.tools.parity.distributions import compare_distributions
from torchdali.tools.parity.photographs import write_photographs
from torchdali.tools.parity.report import TORCH_ONLY, list_names, list_rules

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ADDING = (ROOT / "docs" / "adding_a_transform.md").read_text()
ARGUMENTS = (ROOT / "docs" / "arguments.md").read_text()
DIFFERENCES = (ROOT / "docs" / "differences.md").read_text()
PARITY = (ROOT / "docs" / "parity.md").read_text()
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", *PAGES)


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for name, block in fenced if name == language]


def rows(document: str, heading: str) -> Iterator[list[str]]:
    """The cells of the table whose first column has this heading."""
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", document, re.MULTILINE)
    for line in table.splitlines():
        yield [cell.strip() for cell in line.strip("|").split(" |")]


def names(document: str, heading: str) -> list[str]:
    """What stands in backquotes in the first column."""
    return [name for row in rows(document, heading) for name in re.findall(r"`(\w+)", row[0])]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with ``data/train``, 24 pictures in 3 classes, on a machine without a GPU."""
    rng = np.random.default_rng(0)
    for name, number in itertools.product(("cat", "dog", "owl"), range(8)):
        file = tmp_path / "data" / "train" / name / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        height, width = rng.integers(30, 50, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("in_folder")
def test_code_of_the_readme(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (code,) = blocks("python")
    assert len(list(filter(None, code.splitlines()))) == 15
    assert code.count("batch_size=256") == code.count("# the one changed line") == 1
    namespace: dict[str, Any] = {}
    exec(compile(code.replace("batch_size=256", "batch_size=12"), "README.md", "exec"), namespace)

    assert namespace["DataLoader"] is DALILoader
    assert namespace["images"].shape == (12, 3, 224, 224)
    assert namespace["labels"].shape == (12,)
    assert math.isfinite(namespace["loss"].item())

    namespace["loader"].explain()
    (shown,) = blocks("text")
    assert len(shown.splitlines()) == 8
    pattern = re.escape(shown).replace(re.escape("...\n"), "(?:.*\n)*?")
    assert re.match(pattern, capsys.readouterr().out), "README.md shows other lines than explain() prints"


def test_readme_is_short() -> None:
    text = re.sub(r"\]\([^)]*\)", "]", README)
    assert len(README.splitlines()) <= 130
    assert len(text.split()) <= 1_200


def test_parts_of_the_readme() -> None:
    """It says as much as a stranger reads: eight features with links, five rows of numbers, five limits."""
    _, *parts = re.split(r"^## (.*)$", README, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    features = re.findall(r"^- .*$", sections["What you get"], re.MULTILINE)
    assert len(features) == 8
    assert all("](https://" in feature for feature in features)
    assert len(re.findall(r"^\| .*$", sections["Numbers"], re.MULTILINE)) == 1 + 5
    assert len(re.findall(r"^- \*\*", sections["When it does not help"], re.MULTILINE)) == 5
    to_do = "".join(re.findall(r"^\| .*$", sections["What you get"], re.MULTILINE))
    assert all(words in to_do for words in ("nothing to change", "move its transforms to `transform=`", "not yet"))


def test_table_of_what_does_not_run_in_dali() -> None:
    listed = names(DIFFERENCES, "Transform")
    assert len(listed) == len(set(listed))
    elsewhere = {"Compose", "Transform", "AutoAugmentPolicy", "InterpolationMode"}  # no transform, or a container
    assert set(listed) == {*TORCH_ONLY, "LinearTransformation", "ToDtype", "Normalize"} - elsewhere


def test_certificate_names_every_rule() -> None:
    certified = {name for row in rows(PARITY, "Transform") for name in re.findall(r"`([^`]+)`", row[0])}
    missing = {name for rule in list_rules().values() for name in list_names(rule)} - certified
    assert not missing, f"docs/parity.md does not show {missing}: run `torchdali parity`"


@pytest.mark.timeout(60)
def test_code_of_adding_a_transform(tmp_path: Path) -> None:
    code = re.findall(r"^```python\n(.*?)^```$", ADDING, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "adding_a_transform"}
    exec(compile("\n".join(code), "docs/adding_a_transform.md", "exec"), namespace)
    case, draw = namespace["CASES"]["Darken"], namespace["DRAWS"]["Darken: factor"]
    assert find_exceeded_bounds(case, measure(case, write_photographs(tmp_path), "cpu")) == ""
    assert compare_distributions(draw).p > 1e-3


def test_table_of_arguments() -> None:
    listed = {name for row in rows(ARGUMENTS, "Argument") for name in re.findall(r"`(\w+)`", row[0])}
    signature = set(inspect.signature(DALILoader).parameters)
    own = {"transform", "batch_transform", "device", "seed", "fidelity", "cache", "cache_bytes", "distributed"}
    own |= {"on_error", "max_errors", "images", "decode_bytes", "cache_dir"}
    assert listed == signature - own
    assert all(f"`{name}=" in ARGUMENTS for name in own)


def test_readme_names_both_commands() -> None:
    commands = [line for block in blocks("") for line in block.splitlines()]
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        assert f"`make {target}`" in README
    assert {"make demo", "make test"} <= set(commands)


def run_page(page: str, replaced: dict[str, str] | None = None, **names: Any) -> dict[str, Any]:
    """Run the code of a page, and return its names."""
    code = "\n".join(
        re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    )
    for written, instead in (replaced or {}).items():
        assert written in code, f"{page} no longer says {written}"
        code = code.replace(written, instead)
    exec(compile(code, f"docs/{page}", "exec"), names)
    return names


def write_table(name: str, header: str, lines: list[str]) -> None:
    Path(name).write_text("\n".join([header, *lines]))


def test_code_of_own_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [path for path, _ in write_photographs(tmp_path / "data" / "train").samples]
    write_table("scans.csv", "file,age,patient", [f"{path},{40 + i},p{i}" for i, path in enumerate(files)])
    # Without worker processes, which could not import what is defined here.
    batch = run_page("own_datasets.md", {"num_workers=8": 'device="cpu"'})["batch"]
    assert batch["scan"].shape == (len(files), 3, 224, 224)
    assert batch["scan"].dtype == torch.float32
    assert sorted(batch["age"].tolist()) == [40 + i for i in range(len(files))]


def test_code_of_image_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = [path for path, _ in write_photographs(tmp_path / "data" / "train").samples]
    write_table("list.csv", "path,label", [f"{path},{i % 3}" for i, path in enumerate(files)])
    names = run_page("image_folders.md")
    assert names["classes"] == names["dataset"].classes
    assert len(names["dataset"]) == len(names["ImageIndex"]("listed.npz")) == len(files)
    assert len(next(iter(names["loader"]))[0]) == len(files)


def test_code_of_csv_and_medical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files = [path for path, _ in write_photographs(tmp_path / "data" / "train").samples]
    lines = [f"{path},{i % 3},{i % 2},0.5,p{i}" for i, path in enumerate(files)]
    write_table("labels.csv", "file,label,edema,effusion,patient", lines)
    Path("scans").mkdir()
    for number in range(4):
        scan = np.random.default_rng(number).integers(0, 60_000, (40 + number, 50), np.uint16)
        Image.fromarray(scan).save(f"scans/{number}.png")
    keep = 'findings = batch\nbatch["image"], '
    names = run_page("csv_and_medical.md", {", num_workers=2": "", "(224, 224)": "(64, 48)", 'batch["image"], ': keep})
    assert names["labels"].tolist().count(0) == len(files) // 3
    assert names["columns"] == ["edema", "effusion", "patient"]
    assert sorted(names["findings"]["edema"].tolist()) == sorted(i % 2 for i in range(len(files)))
    assert names["batch"].shape == (4, 1, 64, 48)
    assert names["batch"].dtype == torch.float32
    most = 2 + 1e-6  # the bound of Normalize in docs/parity.md
    assert -most <= float(names["batch"].min()) < float(names["batch"].max()) <= most


def test_code_of_detection_and_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/train").mkdir(parents=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), np.uint8)).save("data/train/0.jpg")
    small = {"min_size=[480, 512, 544], max_size=800": "min_size=[100], max_size=200", "batch_size=16": "device='cpu'"}
    names = run_page("detection_and_masks.md", small)
    (image,), (target,) = names["images"], names["targets"]
    assert image.shape == (3, 100, 120)
    assert image.dtype == torch.float32
    assert target["labels"].tolist() == [0, 2]
    assert target["boxes"].canvas_size == (100, 120)
    widths = (target["boxes"][:, 2] - target["boxes"][:, 0]).tolist()
    assert widths == [52, 38], "twice as wide as before, flipped or not"


@pytest.mark.usefixtures("in_folder")
def test_code_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    Path("shards").mkdir()
    with tarfile.open("shards/shard-000000.tar", "w") as shard:
        for number, path in enumerate(sorted(Path("data").rglob("*.jpg"))):
            shard.add(path, f"{number}.jpg")
            entry = tarfile.TarInfo(f"{number}.cls")
            entry.size = 1
            shard.addfile(entry, io.BytesIO(str(number % 3).encode()))
    with ObjectServer({"bucket/train-000.tar": Path("shards/shard-000000.tar").read_bytes()}) as server:
        for name, value in {**server.environment(), "XDG_CACHE_HOME": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        names = run_page(
            "shards_and_remote_storage.md",
            {
                "{000000..000146}": "000000",
                "{000..146}": "000",
                "/local/cache": str(tmp_path / "cache"),
                '"timeout": "10s"': '"timeout": "10s", "allow_http": True',
            },
        )
        names["dataset"].transform = v2.ToImage()
        assert same(list(names["dataset"]), list(Tar("shards/shard-000000.tar", transform=v2.ToImage())))
    assert names["images"].shape == (24, 3, 224, 224)
    assert torch.bincount(names["labels"]).tolist() == [8, 8, 8]


@pytest.mark.usefixtures("in_folder")
def test_code_of_bad_samples(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data/train/dog/3.jpg").write_bytes(b"no image")
    train = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(32)])
    names = run_page("bad_samples.md", train=train)
    assert [error.path for error in names["loader"].errors] == ["data/train/dog/3.jpg"]
    assert "11 data/train/dog/3.jpg" in capsys.readouterr().out


def test_code_of_transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), np.uint8))
    image.save("a.jpg")
    image.save("b.jpg")
    crop = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(32)])
    tensor = torch.zeros((3, 40, 40), dtype=torch.uint8)
    names = run_page(
        "transforms.md",
        {'open("b.jpg", "rb").read()': "image_bytes"},
        image_bytes=Path("b.jpg").read_bytes(),
        v2=v2,
        global_crops=crop,
        local_crops=crop,
        pil_image=image,
        tensor=tensor,
    )
    assert len(names["views"](tensor)) == 8
    assert names["batch"].shape == (4, 3, 224, 224)


def test_code_of_volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("images", "labels"):
        Path(name).mkdir()
        voxels = np.random.default_rng(0).integers(0, 9, (20, 24, 18))
        np.save(Path(name) / "0.npy", voxels.astype(np.float32 if name == "images" else np.uint8))
    names = run_page(
        "volumes.md", {"96, 96, 96": "16, 16, 16", "range(10)": "range(1)", "num_workers=4": "num_workers=0"}
    )
    assert names["images"].shape == names["labels"].shape == (2, 1, 16, 16, 16)


def test_python_of_every_page_runs() -> None:
    """A test here names each page with Python. What explain-and-stats and the first page have is on other pages too."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if "```python\n" in path.read_text()}
    run = {page for page in pages if re.search(rf'[/"]{page.removesuffix(".md")}(?:\.md)?"', tests)}
    assert pages - run - {"index.md"} == {"explain" + "_and_stats.md"}


@pytest.mark.usefixtures("in_folder")
def test_code_of_caches(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "caches.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, "docs/caches.md", "exec"), {})
    assert "after ToImage, Resize, on cpu" in capsys.readouterr().out


@pytest.mark.usefixtures("in_folder")
def test_code_of_distributed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "distributed.md").read_text(), re.MULTILINE | re.DOTALL
    )
    begin = partial(torch.distributed.init_process_group, "gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(torch.distributed, "init_process_group", begin)
    namespace: dict[str, Any] = {"train": v2.Compose([v2.ToImage(), v2.RandomResizedCrop(32)]), "seen": []}
    try:
        for code in blocks:
            assert code.count("batch_size=256") == code.count("range(90)") == code.count("        ...") == 1
            code = (
                code.replace("=256", "=9").replace("(90)", "(2)").replace("        ...", "        seen.append(images)")
            )
            exec(compile(code, "docs/distributed.md", "exec"), namespace)
    finally:
        torch.distributed.destroy_process_group()
    auto, by_hand = torch.cat(namespace["seen"]).chunk(len(blocks))
    assert len(blocks) == 2
    assert len(auto) == 2 * 24
    assert torch.equal(auto, by_hand)


def test_code_of_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, of_ranks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "resuming.md").read_text(), re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    count = len(write_photographs(tmp_path / "data" / "train").samples)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    namespace: dict[str, Any] = {}
    exec(compile(code.replace("batch_size=4", "batch_size=1"), "docs/resuming.md", "exec"), namespace)
    assert (len(namespace["rest"]), len(namespace["following"])) == (count - 3, count)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        exec(compile(of_ranks.replace("batch_size=4", "batch_size=1"), "docs/resuming.md", "exec"), namespace)
    finally:
        torch.distributed.destroy_process_group()
    assert len(namespace["rest"]) == count - 3


_PROJECT = r"(?:raw\.githubusercontent\.com/torchdali/torchdali|github\.com/torchdali/torchdali/(?:blob|tree))"
IN_REPOSITORY = rf"https://{_PROJECT}/main/"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """Also absolute links to files of the repository."""
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text()):
        absolute = re.match(IN_REPOSITORY, target)
        if absolute or not target.startswith("https://"):
            name, _, anchor = target[absolute.end() if absolute else 0 :].partition("#")
            folder = ROOT if absolute else (ROOT / document).parent
            path = folder / name if name else ROOT / document
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


def test_links_of_the_readme_are_absolute() -> None:
    """PyPI shows it too, where no other file of the repository is."""
    assert not [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("https://")]


def test_first_page_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[[^]]*\]\((\w+)\.md\)", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert sorted([*listed, "index"]) == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def test_badges_of_the_readme_are_true() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', metadata)
    assert f"python-3.{pythons[0]}%20to%203.{pythons[-1]}-" in README
    assert 'license = "Apache-2.0"' in metadata
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_every_extra_is_listed() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    (table,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", metadata, re.MULTILINE | re.DOTALL)
    extras = set(re.findall(r"^(\w+) = ", table, re.MULTILINE)) - {"bench", "dev", "docs"}
    assert set(names((ROOT / "docs" / "install.md").read_text(), "Extra")) == extras


def test_api_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"^\.\. auto\w+:: torchdali\.([\w.]+)$", page, re.MULTILINE))
    errors = {name for name in torchdali.__all__ if name.endswith("Error")}
    assert "errors" in documented
    assert not set(torchdali.__all__) - errors - documented


def test_names_of_the_architecture_exist() -> None:
    """Each name in code is defined in the package or imported there; each path is a file or folder of it."""
    package = Path(torchdali.__file__).parent
    source = "\n".join(path.read_text() for path in package.rglob("*.py"))
    defined = set(re.findall(r"\b(?:class|def) (\w+)|^ *(?:self\.)?(\w+)(?::| =)", source, re.MULTILINE))
    defined = {word for words in defined for word in words}
    defined |= {word for line in re.findall(r"\bimport (.*)", source) for word in re.findall(r"\w+", line)}
    paths = {str(path.relative_to(package)) for path in package.rglob("*")}
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"(?<!`)`([^`\n]+)`", text)) | set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", text))
    missing: list[str] = []
    for name in named:
        if name.startswith("tests/") or name.endswith(("/", ".py")):
            known = (ROOT / name).exists() or any(f"/{path}".endswith(f"/{name.strip('/')}") for path in paths)
        else:
            words = set(re.findall(r"\w+", name.removeprefix("torchdali.")))
            known = {name, f"{name}.py"} & paths or words <= defined
        missing += [] if known else [name]
    assert not missing


def test_changelog_has_this_version() -> None:
    assert f"## [{torchdali.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_recipe_is_listed() -> None:
    folder = ROOT / "recipes"
    listed = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\) \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert all(name == link for name, link in listed)
    assert {name for name, _ in listed} == {path.name for path in folder.glob("*.py")}
