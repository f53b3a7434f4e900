"""The command line: ``torchdali demo``, ``torchdali bench`` and ``torchdali parity``.

Only options and exit codes live here; what a command does is in its own package. click, rich, scikit-image
and scipy are imported when a command line is run, so that this module needs nothing but torchdali's own dependencies.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torchdali.errors import TorchDALIError

if TYPE_CHECKING:
    import click

__all__ = ["commands", "main"]


def commands() -> click.Group:
    """Builds the command group; needs the ``cli`` extra."""
    import click
    from rich.console import Console

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
        help="Folder for the pictures and the grid.",
    )
    @click.option("--epochs", type=click.IntRange(min=1), default=8, show_default=True, help="Epochs of each training.")
    @click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="Where the network and DALI run.",
    )
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
        import torch

        from torchdali.demo import run

        if device == "cuda" and not torch.cuda.is_available():
            raise click.BadParameter("torch sees no CUDA device on this machine", param_hint="--device")
        if not run(out, epochs=epochs, device=device, seed=seed, console=Console()).same_order:
            sys.exit(1)

    @torchdali.command()
    @click.option(
        "--out",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path("docs/parity.md"),
        show_default=True,
        help="The document; what was measured goes beside it, as JSON.",
    )
    @click.option(
        "--device",
        type=click.Choice(["all", "cpu", "cuda"]),
        default="all",
        show_default=True,
        help="Where DALI runs; all that there are, or one of them.",
    )
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

        from torchdali.parity.certify import certify

        cuda = torch.cuda.is_available()
        if device == "cuda" and not cuda:
            raise click.BadParameter("torch sees no CUDA device on this machine", param_hint="--device")
        try:
            re.compile(only)
        except re.error as error:
            raise click.BadParameter(f"not a regular expression: {error}", param_hint="--only") from error
        devices = (["cpu", "cuda"] if cuda else ["cpu"]) if device == "all" else [device]
        if certify(out, devices, only, Console()):
            sys.exit(1)

    @torchdali.command()
    @click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
    @click.option("--train", metavar="MODEL", help="Measure beside a training step too: torchvision's name of a model.")
    @click.option("--transform", metavar="FILE:NAME", help="Your transform.  [default: ImageNet's for training]")
    @click.option("--batch-size", type=click.IntRange(min=1), help="Images in a batch.  [default: 256, or fewer]")
    @click.option("--cores", type=click.IntRange(min=1), help="How many to use.  [default: all]")
    @click.option(
        "--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Time of one measurement."
    )
    @click.option(
        "--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Where to write all figures as JSON."
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

        DIR is a folder of class folders, or of images. Says what the limit is, and whether torchdali would help.
        Exits with 0 when that could be said, with 1 when a loader that it takes could not be measured, and with 2
        when an option is wrong.
        """
        from torchvision.models import list_models

        from torchdali.bench.command import bench as measured

        if train and train not in list_models():
            raise click.BadParameter(f"torchvision has no model {train!r}", param_hint="--train")
        try:
            decided = measured(
                folder,
                cores=cores,
                batch_size=batch_size,
                seconds=seconds,
                transform=transform,
                train=train,
                out=out,
                console=Console(),
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        if decided is None:
            sys.exit(1)

    return torchdali


def main() -> None:
    """Runs the command line; the console entry point ``torchdali``."""
    missing = [name for name in ("click", "rich", "scipy", "skimage") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"torchdali: the command line needs {', '.join(missing)}: pip install 'torchdali[cli]'")
    try:
        commands()(prog_name="torchdali")
    except TorchDALIError as error:
        sys.exit(f"torchdali: {error}")


if __name__ == "__main__":
    main()
