"""The command line: ``torchdali demo``, ``bench``, ``parity``, ``check``, ``explain`` and ``preview``.

Only options and exit codes live here; what a command does is in its own package. click, rich, scikit-image
and scipy are imported when a command line is run, so that this module needs nothing but torchdali's own dependencies.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchdali.errors import OptionError, TorchDALIError

if TYPE_CHECKING:
    from collections.abc import Callable

    import click

__all__ = ["commands", "main"]


def commands() -> click.Group:
    """Builds the command group; needs the ``cli`` extra."""
    import click
    from rich.console import Console

    def writable(makes_folders: bool = False) -> Callable[[click.Context, click.Parameter, Path | None], Path | None]:
        """Nobody wants to hear after an hour that what was found cannot be written."""

        def check(_: click.Context, __: click.Parameter, out: Path | None) -> Path | None:
            if out is None:
                return None
            above = out.absolute().parents if makes_folders else [out.absolute().parent]
            there = next((path for path in (out.absolute(), *above) if path.exists()), out.parent)
            if not os.access(there, os.W_OK) or not (there.is_dir() or out.exists()):
                raise click.BadParameter(f"{str(out)!r} cannot be written: {there} is no folder, or not open to you")
            return out

        return check

    class WithScript(click.Command):
        """A command whose argument may be a script with arguments of its own."""

        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            script = next((arg for arg in args if arg.endswith(".py")), None)
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                if script is None:
                    raise
                said = f"{error.message} What {script} is to get comes after it and --."
                raise click.NoSuchOption(error.option_name, said, error.possibilities, ctx) from error

    of_folder = click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
    with_transform = click.option(
        "--transform", metavar="FILE:NAME", help="Your transform.  [default: ImageNet's for training]"
    )

    def on_device(said: str, default: str = "auto") -> Callable[[Callable[..., None]], Callable[..., None]]:
        choice = click.Choice([default, "cpu", "cuda"])
        return click.option("--device", type=choice, default=default, show_default=True, help=said)

    def demand(device: str) -> None:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise click.BadParameter("torch sees no CUDA device on this machine", param_hint="--device")

    @click.group()
    @click.version_option(package_name="torchdali")
    def torchdali() -> None:
        """A drop-in replacement for torch.utils.data.DataLoader on NVIDIA DALI."""

    @torchdali.command()
    @click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("torchdali-demo"),
        show_default=True,
        callback=writable(makes_folders=True),
        help="Folder for the pictures and the grid.",
    )
    @click.option("--epochs", type=click.IntRange(min=1), default=8, show_default=True, help="Epochs of each training.")
    @on_device("Where the network and DALI run.")
    @click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Seed of the crops and of both trainings.",
    )
    def demo(out: Path, epochs: int, device: str, seed: int) -> None:
        """Train the same small CNN with DataLoader and with DALILoader, and compare.

        Writes a few hundred crops of scikit-image's bundled photographs; downloads nothing. Exits with 1
        if the two loaders did not deliver the same pictures in the same order.
        """
        from torchdali.tools.demo import run

        demand(device)
        if not run(out, epochs=epochs, device=device, seed=seed, console=Console()).same_order:
            sys.exit(1)

    @torchdali.command()
    @click.option(
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path("docs/parity.md"),
        show_default=True,
        callback=writable(makes_folders=True),
        help="The document; what was measured goes beside it, as JSON.",
    )
    @on_device("Where DALI runs; all that there are, or one of them.", "all")
    @click.option(
        "--only",
        metavar="REGEX",
        default="",
        help='Measure only cases, random parameters and "decoding <format>" in whose names this is found.',
    )
    def parity(out: Path, device: str, only: str) -> None:
        """Compare every rule with torchvision, and write the certificate.

        Runs each case on photographs, replays the drawn numbers through torchvision's functionals, tests the
        distribution of every random parameter, and compares decoded images with PIL's. Results of a device that is
        not measured are kept from the run before. Exits with 1 if anything in the document fails: a bound that is
        exceeded, a case that does not run, or a p-value below 0.001 divided by the number of random parameters.
        """
        import re

        import torch

        from torchdali.tools.parity.certify import certify

        demand(device)
        try:
            re.compile(only)
        except re.error as error:
            raise click.BadParameter(f"not a regular expression: {error}", param_hint="--only") from error
        devices = (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]) if device == "all" else [device]
        try:
            failures = certify(out, devices, only, Console())
        except OptionError as error:
            raise click.BadParameter(str(error), param_hint="--only") from error
        if failures:
            sys.exit(1)

    @torchdali.command()
    @of_folder
    @click.option("--train", metavar="MODEL", help="Measure beside a training step too: torchvision's name of a model.")
    @with_transform
    @click.option("--batch-size", type=click.IntRange(min=1), help="Images in a batch.  [default: 256, or fewer]")
    @click.option("--cores", type=click.IntRange(min=1), help="How many to use.  [default: all]")
    @click.option(
        "--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Time of one measurement."
    )
    @click.option(
        "--json",
        "out",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=writable(),
        help="Where to write all figures as JSON.",
    )
    def bench(
        folder: Path,
        train: str | None,
        transform: str | None,
        batch_size: int | None,
        cores: int | None,
        seconds: float,
        out: Path | None,
    ) -> None:
        """Measure DALILoader and DataLoader on your own pictures.

        DIR is a folder of class folders, or of images. Name the bottleneck, and whether torchdali would help.
        Exits with 0 when that could be said, with 1 when a loader that it takes could not be measured, and with 2
        when an option is wrong.
        """
        from torchvision.models import list_models

        from torchdali.tools.bench.command import bench as run

        if train and train not in list_models():
            raise click.BadParameter(f"torchvision has no model {train!r}", param_hint="--train")
        try:
            verdict = run(
                folder,
                cores=cores,
                batch_size=batch_size,
                seconds=seconds,
                transform=transform,
                train=train,
                out=out,
                console=Console(),
            )
        except OptionError as error:
            raise click.UsageError(str(error)) from error
        if verdict is None:
            sys.exit(1)

    @torchdali.command()
    @of_folder
    @click.option(
        "--output",
        "out",
        metavar="FILE.csv|FILE.json",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=writable(),
        help="Where to write what is wrong, too.",
    )
    @on_device("Where DALI decodes.")
    def check(folder: Path, out: Path | None, device: str) -> None:
        """Decode every image under DIR, and list those with which something is wrong.

        Listed are files that are truncated, corrupt, empty, unreadable, too large for PIL or no images, those whose
        names promise another format than they have, and those that DALI refuses and PIL reads. A bad file does not
        stop it. What is damaged in the middle of a JPEG and decoded all the same is not found.

        Exits with 0 when nothing is wrong, with 1 when something was listed, and with 2 when an option is wrong, there
        are no images, or DALI cannot be used.
        """
        from torchdali.errors import DALIUnavailableError
        from torchdali.tools.commands import check as command

        if out and out.suffix.lower() not in (".csv", ".json"):
            raise click.BadParameter("a name that ends in .csv or .json is expected", param_hint="--output")
        demand(device)
        try:
            checked = command.check(folder, device=device, console=Console())
        except (OptionError, DALIUnavailableError) as error:
            raise click.UsageError(str(error)) from error
        if out:
            command.write(checked, out)
        if checked.problems:
            sys.exit(1)

    @torchdali.command(cls=WithScript)
    @click.argument("target", metavar="DIR|SCRIPT|FILE:NAME")
    @click.argument("arguments", metavar="[-- ARGUMENTS]", nargs=-1)
    @click.option(
        "--transform", metavar="FILE:NAME", help="Your transform, for DIR.  [default: ImageNet's for training]"
    )
    @on_device("For what is no DALILoader already.")
    def explain(target: str, arguments: tuple[str, ...], transform: str | None, device: str) -> None:
        """Say what would run in DALI, in torch, and what not at all.

        DIR: of a loader of the images in this folder.

        FILE:NAME: of what this file has under this name: a DALILoader; a DataLoader, which is taken over with its
        arguments; a dataset; a transform; or a function or class without arguments that makes one of them. The file
        is imported, not run as a script.

        SCRIPT: of the first loader, of either kind, that this script iterates over. The script is run up to there in
        this process, with ARGUMENTS, and ended; what it does before, such as making folders, is done.

        Exits with 0 when something was explained, with 1 when the script ended before it iterated over a loader, or
        raised an exception, and with 2 when an option is wrong.
        """
        from torchdali.tools.commands.explain import explain_folder, explain_named, explain_script

        demand(device)
        path = Path(target)
        if transform and not path.is_dir():
            raise click.UsageError("--transform goes with DIR")
        if arguments and not path.is_file():
            raise click.UsageError(f"{' '.join(arguments)!r}: ARGUMENTS go with SCRIPT")
        try:
            if path.is_dir():
                explain_folder(path, transform, device, sys.stdout)
            elif not path.is_file():
                explain_named(target, device, sys.stdout)
            elif path.suffix == ".ipynb":
                raise click.UsageError(f"{path} is a notebook: call loader.explain() in it, or export it as a script")
            elif b"\0" in path.read_bytes()[:4096]:
                raise click.UsageError(f"{path} is no Python script: SCRIPT, DIR or FILE:NAME is expected")
        except OptionError as error:
            raise click.UsageError(str(error)) from error
        if path.is_file() and not explain_script(path, arguments, device, sys.stdout):
            sys.exit(f"torchdali: {path} ended and did not iterate over a loader")

    @torchdali.command()
    @of_folder
    @with_transform
    @click.option("--samples", type=click.IntRange(min=1), default=8, show_default=True, help="How many images.")
    @click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of which images, and what is drawn."
    )
    @click.option(
        "--output",
        "out",
        metavar="FILE.png|FILE.html",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path("torchdali-preview.png"),
        callback=writable(),
        show_default=True,
        help="Where to write the grid.",
    )
    @on_device("Where DALI runs.")
    def preview(folder: Path, transform: str | None, samples: int, seed: int, out: Path, device: str) -> None:
        """Show images of DIR through torchdali, the same through torchvision, and the difference.

        torchvision decodes with PIL and is given the random numbers that torchdali has drawn. The difference is
        magnified ten times. Of a transform that runs in torch in part, both sides show what comes before that part.

        Exits with 0 when the grid was written, with 1 when a file cannot be read, and with 2 when an option is wrong
        or there are no images.
        """
        from torchdali.tools.commands.preview import preview as command

        if out.suffix.lower() not in (".png", ".html"):
            raise click.BadParameter("a name that ends in .png or .html is expected", param_hint="--output")
        demand(device)
        try:
            said = command(folder, transform=transform, samples=samples, seed=seed, device=device, out=out)
        except OptionError as error:
            raise click.UsageError(str(error)) from error
        Console(soft_wrap=True).print(f"{said}\nWritten to {out}", highlight=False, markup=False)

    return torchdali


def main() -> None:
    """Runs the command line; the console entry point ``torchdali``."""
    missing = [name for name in ("click", "rich", "scipy", "skimage") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"torchdali: the command line needs {', '.join(missing)}: pip install '.[cli]' in a checkout")
    try:
        commands()(prog_name="torchdali")
    except TorchDALIError as error:
        sys.exit(f"torchdali: {error}")


if __name__ == "__main__":
    main()
