"""A plan as a DALI pipeline. Only this module imports ``nvidia.dali``."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from torchdali.errors import DALIUnavailableError
from torchdali.pipeline.plan import Plan
from torchdali.runtime import devices
from torchdali.sources import HEAD
from torchdali.transforms.rules.crop import Window
from torchdali.transforms.spec import Fidelity

__all__ = [
    "HEADER_PATHS",
    "build",
    "build_header_reader",
    "decode_files",
    "leak",
    "release_memory",
    "require_dali",
    "require_device",
    "reserve_pinned",
    "resolve",
    "unavailable_on",
]

_INSTALL = "pip install 'nvidia-dali-cuda120>=2.4,<3'"
HEADER_PATHS = "paths"


def require_dali() -> Any:
    """The module ``nvidia.dali``, with what torchdali uses of it imported.

    Raises:
        DALIUnavailableError: It is not installed, does not load, or is too old.
    """
    if sys.platform != "linux":
        raise DALIUnavailableError(
            f"NVIDIA DALI runs on Linux only, this is {sys.platform}; on Windows use WSL 2 and there {_INSTALL}"
        )
    try:
        dali = importlib.import_module("nvidia.dali")
        for name in ("fn", "types", "math"):
            importlib.import_module(f"nvidia.dali.{name}")
    except ModuleNotFoundError as error:
        raise DALIUnavailableError(f"NVIDIA DALI is not installed ({error}): {_INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise DALIUnavailableError(
            f"NVIDIA DALI is installed but does not load ({error}). The package must fit the driver and Python: "
            f"pip uninstall any nvidia-dali-* and {_INSTALL}"
        ) from error
    version: str = dali.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 4):
        raise DALIUnavailableError(f"torchdali needs NVIDIA DALI 2.4 or newer, this is {version}: {_INSTALL}")
    return dali


def require_device(device: Any) -> None:
    """Checks a device that a user named.

    Raises:
        DALIUnavailableError: DALI is missing, or cannot use it.
        TypeError, ValueError: It is no device, and not "auto".
    """
    require_dali()
    wrong = f"device is 'auto' or a device of torch's such as 'cuda:1', not {device!r}"
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(wrong)
    if device == "auto":
        return
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise ValueError(wrong) from error
    if reason := unavailable_on(named):
        raise DALIUnavailableError(f"device={device!r} cannot be used: {reason}")


def unavailable_on(device: torch.device) -> str | None:
    """Why DALI cannot run on this device, or None where it can."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"DALI runs on CUDA devices and the CPU, not on {device.type!r}"
    if torch.version.cuda is None:
        return "this torch is built without CUDA; with a GPU, install the CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; with a GPU, install or update the NVIDIA driver"
    index = cast("int | None", device.index)
    if index is not None and index >= (count := torch.cuda.device_count()):
        return f"torch sees {count} CUDA devices, {device} is not among them"
    backend: Any = importlib.import_module("nvidia.dali.backend")
    try:
        visible: int = backend.GetCudaVersion() if hasattr(backend, "GetCudaVersion") else 1
    except RuntimeError as error:
        visible = 0
        reason = f" ({error})"
    else:
        reason = ""
    if not visible:
        return (
            f"torch sees a CUDA device but DALI does not{reason}: update the NVIDIA driver to one for CUDA 12 or "
            f"newer, and {_INSTALL}"
        )
    return None


def resolve(device: str | int | torch.device) -> torch.device:
    """The device that is meant now: of "auto", this process's own GPU where DALI can use one, else the CPU."""
    if device == "auto":  # in another loader's worker, after a fork, CUDA cannot be used
        usable = get_worker_info() is None and unavailable_on(torch.device("cuda")) is None
        return devices.own() if usable else torch.device("cpu")
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


class _Operators:
    """What rules build with; see :class:`torchdali.transforms.Ops`."""

    def __init__(self, dali: Any, device: str, fidelity: Fidelity) -> None:
        self.fn: Any = dali.fn
        self.types: Any = dali.types
        self.math: Any = dali.math
        self.device = device
        self.fidelity: Fidelity = fidelity

    def when(
        self,
        mask: Any,
        body: Callable[[Any, Mapping[str, Any]], Any],
        image: Any,
        params: Mapping[str, Any],
    ) -> Any:
        # What DALI's own `if` in a pipeline definition becomes; here conditions come from data, not from source code.
        split = self.fn._conditional.split  # noqa: SLF001
        chosen, others = split(image, predicate=mask, _if_stmt=True)
        of_chosen = {
            name: split(node, predicate=mask, _if_stmt=True)[0] for name, node in params.items() if node is not mask
        }
        return self.fn._conditional.merge(body(chosen, of_chosen), others, predicate=mask)  # noqa: SLF001


@functools.cache
def _pipeline_class(dali: Any) -> Any:
    # When the interpreter ends, a module's names are gone before its pipelines.
    own, let_go, failed = os.getpid, leak, devices.failed

    class Pipeline(dali.Pipeline):
        """A pipeline that is shut down only by the process that built it, and only while its device is of use.

        Its threads do not exist in a forked child, which would wait for them for ever: and a child may get to shut a
        pipeline down at any time, when it collects garbage that it inherited. After an error of CUDA's that stays,
        such as an assertion in a kernel of the training step, DALI waits for runs that never end.
        """

        _pipe: Any = None  # until it is made, should that be interrupted
        _process = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._process = own()
            super().__init__(*args, **kwargs)

        def close(self) -> None:
            """Waits for the runs in flight and frees threads and memory, now and not when garbage is collected."""
            self._shutdown()

        def _shutdown(self) -> None:
            if self._pipe and (self._process != own() or failed(self.device_id)):
                let_go(self)
            super()._shutdown()

    return Pipeline


def leak(pipeline: Any) -> None:
    """Leak a pipeline: its threads and memory stay until the process ends."""
    inner, pipeline._pipe = pipeline._pipe, None  # noqa: SLF001
    if inner is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


_reserved = {"pinned": 0}


def reserve_pinned(size: int, device: torch.device) -> None:
    """Has DALI's pool of pinned memory, which is one for the process, take what pipelines for a GPU will need of it.

    Args:
        size: Bytes; nothing is done where as many were asked for before.
        device: Where DALI runs.
    """
    if device.type == "cuda" and size > _reserved["pinned"]:
        _reserved["pinned"] = size
        with suppress(MemoryError, RuntimeError):  # then it grows as it needs to, as it would have anyway
            importlib.import_module("nvidia.dali.backend").PreallocatePinnedMemory(size)


def release_memory(device: torch.device | None) -> None:
    """Gives the memory that DALI's pools and malloc keep for later, on the host and on GPUs, back to the system.

    Args:
        device: The one that was used; None if none was.
    """
    require_dali()
    with devices.on(device or torch.device("cpu")):
        importlib.import_module("nvidia.dali.backend").ReleaseUnusedMemory()
    _reserved["pinned"] = 0
    # What DALI's threads freed stays in a heap for each thread, up to 50 MiB after some pipelines.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def build(plan: Plan, batch_size: int, threads: int, resident: bool = False) -> Any:
    """Builds the pipeline of a plan.

    Its inputs are one that is called as the plan's ``entry``, which takes the batch, and ``plan.inputs``. What the
    first of them is fed from the host's memory is not copied. Its outputs are the images of each view, CHW, then of
    files the last two bytes of each, and its length.

    Args:
        plan: What to run.
        batch_size: The most samples that one run may have.
        threads: Number of DALI's CPU threads.
        resident: Whether pixels are fed from the device's own memory.

    Returns:
        A built ``nvidia.dali.Pipeline``.
    """
    dali = require_dali()
    fn, types = dali.fn, dali.types
    gpu = plan.device.type == "cuda"
    pipeline = _pipeline_class(dali)(
        batch_size=batch_size,
        num_threads=threads,
        device_id=plan.device.index if gpu else None,
        # The window of runs in flight is kept by feed.py: a queue in the pipeline would hold batches that are
        # finished, and with dynamic execution a run that is scheduled needs no place in it.
        prefetch_queue_depth=1,
        # Outputs that own their memory, which is what hands them out without a copy (see bridge.py).
        exec_dynamic=True,
    )
    with pipeline:
        nodes = {
            name: fn.external_source(name=name, ndim=x.ndim, dtype=types.to_dali_type(x.dtype.__name__.rstrip("_")))
            for name, x in plan.inputs.items()
        }
        ops = _Operators(dali, "gpu" if gpu else "cpu", plan.fidelity)
        image, *about = _enter(ops, plan, nodes, resident)
        trunk, views = plan.numbered()
        for i, rule in trunk:
            params = plan.params_of(i, nodes)
            if i == 0 and plan.decode_window and isinstance(rule, Window):
                image = rule.lower_window(ops, image, params)
            else:
                image = rule.lower(ops, image, params)
        outputs: list[Any] = []
        for view, rules in zip(plan.views, views, strict=True):
            output = image
            for i, rule in rules:
                output = rule.lower(ops, output, plan.params_of(i, nodes))
            outputs.append(output if view.channels_first else fn.transpose(output, perm=[2, 0, 1]))
        pipeline.set_outputs(*outputs, *about)
    pipeline.build()
    return pipeline


def _enter(ops: _Operators, plan: Plan, nodes: dict[str, Any], resident: bool) -> tuple[Any, ...]:
    """The images, and of files their last two bytes and their lengths."""
    fn, types = ops.fn, ops.types
    if plan.entry in ("pixels", "packed"):
        shaped: dict[str, Any] = {"ndim": 3, "layout": "HWC"} if plan.entry == "pixels" else {"ndim": 1}
        # From the device's memory a copy it is: without one DALI does not wait for the stream that writes it.
        image = fn.external_source(name=plan.entry, device="gpu" if resident else "cpu", no_copy=not resident, **shaped)
        return (image.gpu() if ops.device == "gpu" and not resident else image,)
    given = fn.external_source(name=plan.entry, ndim=1, dtype=types.UINT8, no_copy=True)
    if plan.entry == "encoded":
        return (_decode(ops, plan, given, nodes),)
    # Mapping files into memory opens them as if one at a time.
    encoded = fn.io.file.read(given, dont_use_mmap=True)
    length = encoded.shape(dtype=types.INT32)
    ending = fn.slice(encoded, start=length - 2, shape=[2], axes=[0], out_of_bounds_policy="pad")
    return _decode(ops, plan, encoded, nodes), ending, length


def _with_header(ops: _Operators, encoded: Any, window: Mapping[str, Any]) -> Any:
    """The same files, after operators that fail where DALI cannot read one's header, or its window is not within it.

    DALI 2.4's decoders read the headers of batches of 32 and more in several threads, and where one of them fails, they
    return while others still write to what is gone then: the process dies, on the CPU and beside a GPU.

    Args:
        ops: The operators.
        encoded: The files.
        window: Where the windows to decode begin, and how large they are, where the files may have become smaller since
            they were drawn; else nothing.
    """
    sides = ops.fn.peek_image_shape(encoded, dtype=ops.types.INT32, adjust_orientation=False)
    # The file's length, which is never below 3, the number of sides: only that it has to wait for them matters. Of
    # operators there should be few, since each that needs a thread waits for the decoder's.
    length = ops.math.max(encoded.shape(dtype=ops.types.INT32), sides.shape(dtype=ops.types.INT32))
    if window:
        room = ops.fn.slice(sides, start=[0], shape=[2], axes=[0]) - window["start"] - window["shape"]
        # A length that is not the file's is what fails.
        length += ops.fn.reductions.sum(ops.fn.cast(room < 0, dtype=ops.types.INT32), keep_dims=True)
    return ops.fn.reshape(encoded, shape=length)


def _decode(ops: _Operators, plan: Plan, encoded: Any, nodes: dict[str, Any]) -> Any:
    how: dict[str, Any] = {
        "device": "mixed" if ops.device == "gpu" else "cpu",
        "output_type": ops.types.RGB,
        "adjust_orientation": False,  # ImageFolder does not look at EXIF
    }
    if ops.device == "gpu":
        # The default leaves a third of the images to CUDA kernels although the JPEG engine alone is faster, and says
        # which by their place in the batch, although their pixels differ.
        how["hw_decoder_load"] = 1.0
        # Each process of a host would tie its threads to the same cores.
        how["affine"] = False
    window = plan.params_of(0, nodes) if plan.decode_window else {}
    if not plan.headers_validated:  # on 16 cores beside a GPU the operators cost up to a tenth of the images/s
        encoded = _with_header(ops, encoded, window if plan.entry == "files" else {})
    if window:
        return ops.fn.decoders.image_slice(encoded, start=window["start"], shape=window["shape"], axes=[0, 1], **how)
    return ops.fn.decoders.image(encoded, **how)


def build_header_reader(batch_size: int, threads: int, validate_headers: bool) -> Any:
    """Builds a pipeline on the CPU that puts out the first bytes of files, and their lengths.

    Its input is called :data:`HEADER_PATHS`, and takes ``(N, L)`` bytes: paths, padded with NUL.

    Args:
        batch_size: The most files that one run may have.
        threads: Number of DALI's threads.
        validate_headers: Whether a run fails where DALI's decoder would not read a header; a third output comes
            of that.
    """
    dali = require_dali()
    fn, types = dali.fn, dali.types
    pipeline = _pipeline_class(dali)(batch_size, threads, None, prefetch_queue_depth=1, exec_dynamic=True)
    with pipeline:
        paths = fn.external_source(name=HEADER_PATHS, ndim=1, dtype=types.UINT8, no_copy=True)
        files = fn.io.file.read(paths, dont_use_mmap=True)
        heads = fn.slice(files, start=[0], shape=[HEAD], axes=[0], out_of_bounds_policy="pad")
        looked_at = [fn.peek_image_shape(files, dtype=types.INT32)] if validate_headers else []
        pipeline.set_outputs(heads, files.shape(dtype=types.INT32), *looked_at)
    pipeline.build()
    return pipeline


def decode_files(paths: Sequence[str], device: torch.device, **options: Any) -> list[npt.NDArray[np.uint8]]:
    """Decodes files with DALI's decoder alone, which is what the parity certificate compares.

    Args:
        paths: The files.
        device: The CPU or a CUDA device.
        **options: Of ``fn.decoders.image``.

    Returns:
        The images, HWC.

    Raises:
        RuntimeError: DALI does not decode one of them.
    """
    dali = require_dali()
    gpu = device.type == "cuda"
    pipeline = _pipeline_class(dali)(len(paths), 1, device.index if gpu else None, exec_dynamic=True)
    with pipeline:
        encoded = dali.fn.external_source(name="files", ndim=1, dtype=dali.types.UINT8)
        pipeline.set_outputs(
            dali.fn.decoders.image(
                encoded,
                device="mixed" if gpu else "cpu",
                output_type=dali.types.RGB,
                adjust_orientation=False,
                **options,
            )
        )
    pipeline.build()
    pipeline.feed_input("files", [np.fromfile(path, np.uint8) for path in paths])
    (images,) = pipeline.run()
    images = images.as_cpu()
    decoded = [np.array(images.at(i)) for i in range(len(paths))]
    pipeline.close()
    return decoded
