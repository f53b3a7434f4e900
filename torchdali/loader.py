"""``DALILoader``: torch's DataLoader, with DALI in the place of its worker processes."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from torchdali import graph, machine
from torchdali.engine import EnginePool
from torchdali.epoch import Compiled, Epoch, default_collate
from torchdali.errors import DALIUnavailableError, TransformError
from torchdali.plan import Plan, compile_plan, fuse
from torchdali.rng import epoch_key
from torchdali.sources import dataset_state, lift
from torchdali.spec import Fidelity, Spec
from torchdali.transforms import flatten

__all__ = ["DALILoader"]

_DATALOADER = inspect.signature(cast("Any", DataLoader).__init__)
_WINDOW = 6
_WINDOW_BYTES = 2**30


class DALILoader(DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` whose images are decoded and transformed by NVIDIA DALI.

    It takes the arguments of ``DataLoader`` and yields the batches that ``DataLoader`` would: in the same order, of
    the same structure, with tensors on ``device``. The dataset is not asked for samples: its files, targets and
    transforms are read. ``num_workers`` above 0 is the number of DALI's threads, 0 lets it be chosen;
    ``prefetch_factor`` is the number of batches in flight; ``timeout`` bounds the wait for a batch, in seconds;
    ``collate_fn`` gets the list of samples, each image on the device. As there are no workers,
    ``worker_init_fn``, ``multiprocessing_context`` and ``in_order`` have no effect, and ``persistent_workers`` only
    keeps the base seed. With CUDA batches come out on the device and ``pin_memory`` has no effect either.

    Args:
        dataset: torchvision's ``ImageFolder`` or ``DatasetFolder`` with the default image loader, also under
            ``Subset``, ``random_split`` and ``ConcatDataset``; or the path of a folder of class folders.
        *args: As for ``DataLoader``.
        transform: Transforms that follow the dataset's own.
        batch_transform: Called with the parts of each collated batch, ``batch_transform(images, labels)``, on the
            device; what it returns is the batch. For ``v2.MixUp`` and ``v2.CutMix``. The random numbers that it draws
            from torch's global generators follow from the batch's first sample.
        device: Where batches are made: "auto" is torch's current CUDA device where torch and DALI see one, else
            the CPU.
        seed: Key of the random parameters, together with the epoch's number (the sampler's, where it has
            ``set_epoch``; else counted from 0). With None they follow ``torch.manual_seed`` or ``generator``, as in
            ``DataLoader``.
        fidelity: "exact" stays within the documented bounds of torchvision's tensor kernels; "fast" resizes both
            ways in one pass, which rounds once less and takes less time on the CPU, and lets the GPU do what
            ``v2.JPEG`` does, with another coder than torchvision's.
        **kwargs: As for ``DataLoader``.

    Raises:
        UnsupportedDatasetError: The dataset is none of those.
        DALIUnavailableError: DALI is missing or cannot use the device; the text says what to install.
        ValueError: An argument is none that exists.
    """

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        transform: Any = None,
        batch_transform: Callable[..., Any] | None = None,
        device: str | int | torch.device = "auto",
        seed: int | None = None,
        fidelity: Fidelity = "exact",
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, (str, os.PathLike)):
            dataset = ImageFolder(Path(cast("str | os.PathLike[str]", dataset)))
        if fidelity not in ("exact", "fast"):
            raise ValueError(f"fidelity is 'exact' or 'fast', not {fidelity!r}")
        self.transform = transform
        self.batch_transform = batch_transform
        self.device = device
        self.seed = seed
        self.fidelity: Fidelity = fidelity
        self._epochs = 0
        self._base_seed: int | None = None
        self._compiled: Compiled | None = None
        super().__init__(dataset, *args, **kwargs)
        # With workers DataLoader turns None into 2, which here would be a choice of the user's.
        given = _DATALOADER.bind(self, dataset, *args, **kwargs).arguments
        self._window: int | None = given.get("prefetch_factor")
        graph.require_dali()
        if device != "auto" and (reason := graph.unavailable_on(torch.device(device))):
            raise DALIUnavailableError(f"device={device!r} cannot be used: {reason}")
        self._source_state = dataset_state(dataset)
        self._source = lift(dataset)

    def check_worker_number_rationality(self) -> None:
        """Nothing: there are no worker processes, whose number ``DataLoader`` warns of here."""

    def __iter__(self) -> Epoch:
        """A fresh epoch, whatever became of the ones before."""
        compiled = self._compile()
        if self.persistent_workers and self._base_seed is not None:
            # Persistent workers keep the first epoch's base seed, and no other is drawn from the loader's generator.
            twin = copy.copy(self)
            twin.generator = torch.Generator()
            epoch = Epoch(twin, compiled, again=True)
        else:
            epoch = Epoch(self, compiled)
            self._base_seed = epoch.base_seed
        return epoch.start(epoch_key(*self._next_key(self._base_seed)))

    def explain(self, file: TextIO | None = None) -> None:
        """Prints what the loader will do: source, transforms and what runs them, random numbers, output, settings.

        Args:
            file: Where to; standard output by default.
        """
        compiled = self._compile()
        plan, source = compiled.plan, compiled.source
        collate = cast("Any", self.collate_fn)
        no_effect = ["worker_init_fn, multiprocessing_context, in_order: there are no worker processes"]
        if self.persistent_workers:
            no_effect.append("persistent_workers, but that the base seed stays, as in DataLoader")
        if plan.device.type == "cuda":
            no_effect.append("pin_memory: batches are on the device")
        rows = {
            "device": f"{plan.device}{self._why_cpu(plan.device)}, fidelity {plan.fidelity}",
            "source": f"{source.description}; its targets do not pass through DALI",
            "": str(plan),
            "output": _output(plan),
            "collate": f"{getattr(collate, '__name__', repr(collate))}, in this process",
            **({"batch": f"{self.batch_transform!r}, torch, after collate"} if self.batch_transform else {}),
            "random": "Philox4x32-10 keyed by "
            + (f"seed {self.seed}, epoch" if self.seed is not None else "DataLoader's base seed of the epoch")
            + ", index, occurrence, transform",
            "threads": f"{compiled.threads} ("
            + ("num_workers)" if self.num_workers else "chosen: the cores that this process may use)"),
            "window": f"{compiled.window} batches in flight ("
            + ("prefetch_factor)" if self._window else f"chosen: {_WINDOW}, or what fits 1 GiB)"),
            "timeout": f"{self.timeout} s a batch" if self.timeout else "none",
            "no effect": "; ".join(no_effect),
        }
        if plan.device.type == "cuda":
            rows["driver"] = machine.connections()
        text = "\n".join(f"{label:<11}{row}" if label else row for label, row in rows.items())
        (file or sys.stdout).write(f"{type(self).__name__}\n{text}\n")

    def _next_key(self, base_seed: int) -> tuple[int, int]:
        """Seed and number of the next epoch."""
        number, self._epochs = self._epochs, self._epochs + 1
        if self.seed is None:
            return base_seed, number if self.persistent_workers else 0
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch") and hasattr(sampler, "epoch"):
                return self.seed, int(sampler.epoch)
        return self.seed, number

    def _samplers(self) -> list[Any]:
        batch_sampler = cast("Any", self.batch_sampler)
        return [self.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]

    def _why_cpu(self, device: torch.device) -> str:
        reason = graph.unavailable_on(torch.device("cuda")) if device.type == "cpu" and self.device == "auto" else None
        return f" ({reason})" if reason else ""

    def _compile(self) -> Compiled:
        """The source, plan and engines; anew where the dataset, a transform or the device is another one now."""
        if (state := dataset_state(self.dataset)) != self._source_state:
            self._source, self._source_state = lift(self.dataset), state
        device = graph.resolve(self.device)  # torch's current one may be set after the loader is made
        key = (self._source, device, id(self.transform), repr(self.transform), self.num_workers, self.fidelity)
        if self._compiled and self._compiled.state == key:
            return self._compiled
        chain = tuple(flatten(self._source.transform) + flatten(self.transform))
        plan = fuse(compile_plan(list(chain), device, self.fidelity))
        if self.collate_fn is default_collate and not plan.suffix and plan.spec.kind == "pil":
            raise TransformError(
                "the transforms end in PIL images, which default_collate does not take; add v2.ToImage() or "
                "v2.PILToTensor() to them"
            )
        if device.type == "cuda":
            machine.warn_of_few_connections()
        size: int = self.batch_size or getattr(cast("Any", self.batch_sampler), "batch_size", None) or 1
        fitting = _WINDOW_BYTES // (size * sum(_bytes(view.spec) for view in plan.views))
        self._compiled = Compiled(
            key,
            self._source,
            EnginePool(plan, size, threads := self.num_workers or machine.available_cores()),
            chain,
            threads,
            self._window or max(2, min(_WINDOW, fitting)),
        )
        return self._compiled


def _output(plan: Plan) -> str:
    if plan.suffix:
        return "images as torch leaves them"
    images = f"images {plan.spec}" if plan.container is None else f"{len(plan.views)} views, each as above"
    return f"{images}, batch in front, contiguous"


def _bytes(spec: Spec) -> int:
    """The memory of an image; of one whose size is not known, that of a large one."""
    height, width = spec.size or (512, 512)
    return spec.channels * height * width * spec.dtype.itemsize


def _signature() -> inspect.Signature:
    """The installed DataLoader's parameters, then torchdali's own."""
    own = inspect.signature(DALILoader.__init__).parameters
    theirs = _DATALOADER.parameters
    added = [own[name] for name in ("transform", "batch_transform", "device", "seed", "fidelity")]
    return inspect.Signature([*(p for name, p in theirs.items() if name != "self"), *added])


DALILoader.__signature__ = _signature()  # pyright: ignore[reportAttributeAccessIssue]
