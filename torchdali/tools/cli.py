"""Options and exit codes of the command line.

The commands themselves are in their own packages. The packages of the ``cli`` extra are imported when a command runs,
so this module needs only torchdali's own dependencies.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdali.errors import DALIUnavailableError, OptionError, TorchDALIError

if TYPE_CHECKING:
    import click

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def commands() -> click.Group:
    """Build the command group. Needs the ``cli`` extra."""
    import click
    from rich.console import Console

    class Command(click.Command):
        """Command whose ``OptionError`` is a wrong option, and whose summary is not cut."""

        def get_short_help_str(self, limit: int = 45) -> str:  # noqa: ARG002 - click wraps it
            return " ".join((self.help or "").partition("\n\n")[0].split())

        def invoke(self, ctx: click.Context) -> Any:
            try:
                return super().invoke(ctx)
            except OptionError as error:
                raise click.UsageError(str(error), ctx) from error

    class ScriptCommand(Command):
        """Command whose argument may be a script with its own arguments."""

        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            script = next((arg for arg in args if arg.endswith(".py")), None)
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                if script is None:
                    raise
                message = f"{error.message} Give the options of {script} after it and --."
                raise click.NoSuchOption(error.option_name, message, error.possibilities, ctx) from error

    class Commands(click.Group):
        command_class = Command

    def output_option(*names: str, endings: tuple[str, ...] = (), parents: bool = False, **options: Any) -> Decorator:
        """Return an option for a file, or a folder with ``file_okay=False``, that is checked before the work begins.

        Args:
            names: Names of the option.
            endings: Endings that the file's name may have. Empty for any.
            parents: Whether the command makes missing parent folders.
            options: More arguments of ``click.option``.
        """
        file_okay = options.pop("file_okay", True)

        def check(_: click.Context, __: click.Parameter, out: Path | None) -> Path | None:
            if out is None:
                return None
            folders = out.absolute().parents if parents else [out.absolute().parent]
            existing = next((path for path in (out.absolute(), *folders) if path.exists()), out.parent)
            if not os.access(existing, os.W_OK) or not (existing.is_dir() or out.exists()):
                raise click.BadParameter(f"{str(out)!r} cannot be written: {existing} is no folder, or not open to you")
            if endings and out.suffix.lower() not in endings:
                raise click.BadParameter(f"the name must end in {' or '.join(endings)}, got {out.name!r}")
            return out

        kind: Any = click.Path(file_okay=file_okay, dir_okay=not file_okay, path_type=Path)
        return click.option(*names, type=kind, callback=check, show_default="default" in options, **options)

    def device_option(text: str, default: str = "auto") -> Decorator:
        def check(_: click.Context, __: click.Parameter, device: str) -> str:
            import torch

            if device == "cuda" and not torch.cuda.is_available():
                raise click.BadParameter("torch sees no CUDA device on this machine")
            return device

        choice = click.Choice([default, "cpu", "cuda"])
        return click.option("--device", type=choice, default=default, show_default=True, help=text, callback=check)

    def count_option(name: str, least: int = 1, **options: Any) -> Decorator:
        return click.option(name, type=click.IntRange(min=least), show_default="default" in options, **options)

    folder_argument = click.argument(
        "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
    )
    transform_option = click.option(
        "--transform", metavar="FILE:NAME", help="Your transform.  [default for DIR: ImageNet's for training]"
    )

    image_option = click.option(
        "--image", metavar="PART", help="The image in SHARDS: parts of a tar, a feature of a TFRecord, keys of an LMDB."
    )

    def parse_bytes(_: click.Context, __: click.Parameter, text: str) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", text.upper())
        if match is None or not (size := int(float(match[1]) * 1000 ** " KMGT".index(match[2] or " "))):
            raise click.BadParameter(f"must be a size such as 500MB or 1GB, got {text!r}")
        return size

    @click.group(cls=Commands)
    @click.version_option(package_name="torchdali")
    def torchdali() -> None:
        """A drop-in replacement for torch.utils.data.DataLoader on NVIDIA DALI."""

    @torchdali.command()
    @output_option(
        "--out",
        file_okay=False,
        parents=True,
        default=Path("torchdali-demo"),
        help="Folder for the pictures and the grid.",
    )
    @count_option("--epochs", default=8, help="Epochs of each training.")
    @device_option("Where the network and DALI run.")
    @count_option("--seed", 0, default=0, help="Seed of the crops and of both trainings.")
    def demo(out: Path, epochs: int, device: str, seed: int) -> None:
        """Train the same small CNN with DataLoader and with DALILoader, and compare.

        Writes a few hundred crops of scikit-image's photographs. Downloads nothing.

        Exits with 1 if the loaders did not deliver the same pictures in the same order, and with 2 if an option is
        wrong.
        """
        from torchdali.tools.demo import run

        if not run(out, epochs=epochs, device=device, seed=seed, console=Console()).same_order:
            sys.exit(1)

    @torchdali.command()
    @output_option(
        "--out",
        parents=True,
        default=Path("docs/parity.md"),
        help="The page. The measurements go beside it, as JSON.",
    )
    @device_option("Where DALI runs.", "all")
    @click.option(
        "--only",
        metavar="REGEX",
        default="",
        help='Measure only cases, random parameters, "targets <name>", "sounds <name>", "volumes <name>" and '
        '"decoding <format>" whose names match.',
    )
    def parity(out: Path, device: str, only: str) -> None:
        """Compare every rule with torchvision, and write the certificate.

        Runs each case on photographs, gives the same random numbers to torchvision's functionals, tests the
        distribution of every random parameter, and compares decoded images with PIL's. Keeps the last results of
        devices that are not measured.

        Exits with 1 if anything on the page fails: a bound is exceeded, a case does not run, or a p-value is below
        0.001 divided by the number of random parameters. Exits with 2 if an option is wrong.
        """
        import torch

        from torchdali.tools.parity.certify import certify

        devices = (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]) if device == "all" else [device]
        if certify(out, devices, only, Console()):
            sys.exit(1)

    @torchdali.command()
    @folder_argument
    @click.option("--train", metavar="MODEL", help="Also train torchvision's model of this name.")
    @transform_option
    @count_option("--batch-size", help="Images in a batch.  [default: 256, or fewer]")
    @count_option("--cores", help="Number of cores to use.  [default: all]")
    @click.option(
        "--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Time of one measurement."
    )
    @output_option("--json", "out", help="File for all figures, as JSON.")
    def bench(folder: Path, train: str | None, **options: Any) -> None:
        """Measure DALILoader and DataLoader on your own pictures.

        DIR is a folder of class folders, or of images. The last line names the bottleneck, and says whether
        torchdali would help.

        Exits with 0 if that is known, with 1 if a loader could not be measured, and with 2 if an option is wrong.
        """
        from torchvision.models import list_models

        from torchdali.tools.bench.command import bench as run

        if train and train not in list_models():
            raise click.BadParameter(f"torchvision has no model {train!r}", param_hint="--train")
        if run(folder, train=train, console=Console(), **options) is None:
            sys.exit(1)

    @torchdali.command()
    @click.argument("targets", metavar="DIR|SHARDS...", nargs=-1, required=True)
    @output_option(
        "--output",
        "out",
        metavar="FILE.csv|FILE.json",
        endings=(".csv", ".json"),
        help="File for the problems, too.",
    )
    @device_option("Where DALI decodes. PIL decodes images in shards.")
    @image_option
    def check(targets: tuple[str, ...], out: Path | None, device: str, image: str | None) -> None:
        """Decode every image under DIR or in SHARDS, or every video, and list those with a problem.

        SHARDS are tar, zip, TFRecord, RecordIO or LMDB files. A problem is named by shard, key and offset. They may
        be videos, too, and so may the files of DIR if none is an image: PyAV then decodes all frames.

        Lists files that are truncated, corrupt, empty, unreadable, no images or too large for PIL, files whose names
        tell another format than they have, and files that PIL decodes and DALI does not. A bad file does not stop it.
        It cannot find damaged bytes in the middle of a JPEG that still decode.

        Exits with 0 if no file has a problem, with 1 if some have, and with 2 if an option is wrong, there are no
        images, or DALI cannot be used.
        """
        from torchdali.tools.commands.check import check as run
        from torchdali.tools.commands.check import check_shards, check_videos, write_result
        from torchdali.tools.commands.videos import is_video_name

        path = Path(targets[0])
        are_videos = all(map(is_video_name, targets)) and not path.is_dir()
        are_shards = not are_videos and (len(targets) > 1 or not path.is_dir() or (path / "data.mdb").exists())
        if image and not are_shards:
            raise click.UsageError(f"--image goes with SHARDS, got {path}")
        try:
            if are_videos:
                result = check_videos(path, targets)
            elif are_shards:
                result = check_shards(targets, image)
            else:
                result = run(path, device=device)
        except DALIUnavailableError as error:
            raise click.UsageError(str(error)) from error
        if out:
            write_result(result, out)
        if result.problems:
            sys.exit(1)

    @torchdali.command()
    @click.argument("shards", metavar="SHARDS...", nargs=-1, required=True)
    @image_option
    @click.option("--label", metavar="PART", help="The label, as label= in Python.  [default: that of Python]")
    @output_option("--output", "out", metavar="FILE", help="The index.  [default: a file beside the first shard]")
    def index(shards: tuple[str, ...], image: str | None, label: str | None, out: Path | None) -> None:
        """Make the index of SHARDS, which a dataset otherwise makes at its first use.

        SHARDS are tar, zip, TFRecord, RecordIO or LMDB files, or patterns such as 'train-{000..146}.tar'.

        Exits with 0 if the index is there, and with 2 if a shard is damaged or has changed, or an option is wrong.
        """
        from torchdali.tools.commands.shards import index_shards

        index_shards(shards, image, label, out, Console())

    @torchdali.command()
    @folder_argument
    @click.argument("out", metavar="OUT", type=click.Path(file_okay=False, path_type=Path))
    @click.option("--format", type=click.Choice(["tar"]), default="tar", expose_value=False, help="Format of shards.")
    @click.option(
        "--shard-size",
        "shard_bytes",
        default="1GB",
        show_default=True,
        callback=parse_bytes,
        help="Size of a shard at most.",
    )
    @count_option("--resize", metavar="PIXELS", help="Shorter side of the images. Smaller ones stay as they are.")
    @click.option("--quality", type=click.IntRange(1, 100), help="That of the JPEGs of --resize.  [default: 90]")
    @count_option("--workers", help="Processes that resize.  [default: one for each core; none without --resize]")
    def pack(folder: Path, out: Path, workers: int | None, resize: int | None, **options: Any) -> None:
        """Write the images under DIR, a folder of class folders, into tar files in the folder OUT.

        Images stay as they are, unless --resize is given. An index and the names of the classes are written, too.

        Exits with 0 if all was written, and with 2 if an image cannot be read, OUT has shards, or an option is wrong.
        """
        from torchdali.runtime.machine import count_available_cores
        from torchdali.tools.commands.shards import pack_folder

        if options["quality"] and not resize:
            raise click.UsageError("--quality goes with --resize; other images keep their bytes")
        workers = workers or (count_available_cores() if resize else 0)
        pack_folder(folder, out, Console(), resize=resize, num_workers=workers, **options)

    @torchdali.command(cls=ScriptCommand)
    @click.argument("target", metavar="DIR|SCRIPT|FILE:NAME")
    @click.argument("arguments", metavar="[-- ARGUMENTS]", nargs=-1)
    @transform_option
    @device_option("Where DALI would run. A DALILoader keeps its own device.")
    def explain(target: str, arguments: tuple[str, ...], transform: str | None, device: str) -> None:
        """Say what would run in DALI, in torch, and not at all.

        DIR: explain a loader of the images in this folder.

        FILE:NAME: explain the object of this name in this file. It may be a DALILoader, a dataset or a transform, or a
        DataLoader, of which a DALILoader with the same arguments is explained. It may also be a function or class
        without arguments that makes one of them. The file is imported, not run as a script.

        SCRIPT: explain the first loader of either kind that this script iterates over. The script runs up to there,
        with ARGUMENTS. Then it is killed, with all processes that it has started: no except or finally of it runs.
        What it does before, such as making folders, is done.

        Exits with 0 if something was explained, with 1 if the script ended before it iterated over a loader, or
        raised an exception, and with 2 if an option is wrong.
        """
        from torchdali.tools.commands.explain import explain_folder, explain_named, explain_script

        path = Path(target)
        if transform and not path.is_dir():
            raise click.UsageError("--transform goes with DIR")
        if arguments and not path.is_file():
            raise click.UsageError(f"{' '.join(arguments)!r}: ARGUMENTS go with SCRIPT")
        if path.is_dir():
            explain_folder(path, transform, device, sys.stdout)
        elif not path.is_file():
            explain_named(target, device, sys.stdout)
        elif path.suffix == ".ipynb":
            raise click.UsageError(f"{path} is a notebook: call loader.explain() in it, or export it as a script")
        elif b"\0" in path.read_bytes()[:4096]:
            raise click.UsageError(f"{path} is no Python script: SCRIPT, DIR or FILE:NAME is expected")
        elif not explain_script(path, arguments, device, sys.stdout):
            sys.exit(f"torchdali: {path} ended and did not iterate over a loader")

    @torchdali.command()
    @click.argument("target", metavar="DIR|FILE:NAME")
    @transform_option
    @count_option("--samples", default=8, help="Number of images.")
    @count_option("--seed", 0, default=0, help="Seed of the choice of images, and of the transform.")
    @output_option(
        "--output",
        "out",
        metavar="FILE.png|FILE.html",
        endings=(".png", ".html"),
        default=Path("torchdali-preview.png"),
        help="File for the grid.",
    )
    @device_option("Where DALI runs.")
    def preview(out: Path, **options: Any) -> None:
        """Show images through torchdali, the same through torchvision, and the difference.

        torchvision decodes with PIL, and gets the random numbers that torchdali has drawn. The difference is
        magnified until it can be seen. If a part of the transform runs in torch, both sides show the image before
        that part.

        DIR: show the images in this folder, or its videos if it has no images.

        FILE:NAME: show samples of the dataset of this name in this file, with their boxes, masks and key points. Of
        videos it shows some frames. It may also be the loader of a dataset, or a function or class without arguments
        that makes one of them. The transforms are those of the dataset, and then of --transform or of the loader.

        Exits with 0 if the grid was written, with 1 if a file cannot be read, and with 2 if an option is wrong or
        there are no images.
        """
        from torchdali.tools.commands.preview import preview as run

        summary = run(out=out, **options)
        Console(soft_wrap=True).print(f"{summary}\nWritten to {out}", highlight=False, markup=False)

    return torchdali


def main() -> None:
    """Run the command line. This is the console entry point ``torchdali``."""
    missing = [name for name in ("click", "rich", "scipy", "skimage") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"torchdali: the command line needs {', '.join(missing)}: pip install '.[cli]' in a checkout")
    try:
        commands()(prog_name="torchdali")
    except TorchDALIError as error:
        sys.exit(f"torchdali: {error}")


if __name__ == "__main__":
    main()
