"""The command line: ``torchdali demo``.

Only options and exit codes live here; what a command does is in its own package. click, rich and scikit-image
are imported when a command line is run, so that this module needs nothing but torchdali's own dependencies.
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

    return torchdali


def main() -> None:
    """Runs the command line; the console entry point ``torchdali``."""
    missing = [name for name in ("click", "rich", "skimage") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"torchdali: the command line needs {', '.join(missing)}: pip install 'torchdali[cli]'")
    try:
        commands()(prog_name="torchdali")
    except TorchDALIError as error:
        sys.exit(f"torchdali: {error}")


if __name__ == "__main__":
    main()
