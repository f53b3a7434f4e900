"""Build DALI pipelines of plans. Only this module imports ``nvidia.dali``."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from threading import Lock
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from torchdali.errors import DALIUnavailableError
from torchdali.pipeline.host_calls import HostCalls
from torchdali.pipeline.operators import Operators
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.words import WordTensors
from torchdali.runtime import devices, lifecycle
from torchdali.sources.places import Places
from torchdali.transforms.rules.crop import Window
from torchdali.transforms.spec import InputKind

__all__ = [
    "HEADERS",
    "build",
    "build_header_validator",
    "explain_unavailability",
    "leak",
    "release_memory",
    "require_dali",
    "require_device",
    "reserve_pinned",
    "resolve",
]

_INSTALL = "pip install 'nvidia-dali-cuda120>=2.4,<3' (or nvidia-dali-cuda130, if the driver supports CUDA 13)"
HEADERS = "headers"
GPU_DECODER: dict[str, Any] = {"hw_decoder_load": 1.0, "affine": False}
"""Options of decoders beside a GPU.

By default DALI decodes a third of the images with CUDA kernels, although the engine alone is faster. An image's row
decides, and the pixels differ. DALI also ties the threads of all processes to the same cores.
"""

_CUT = ("begin", "count")


def require_dali() -> Any:
    """Import ``nvidia.dali`` and the submodules that torchdali uses.

    Raises:
        DALIUnavailableError: DALI is not installed, does not load, or is too old.
    """
    if sys.platform != "linux":
        raise DALIUnavailableError(
            f"NVIDIA DALI runs on Linux only, this is {sys.platform}; on Windows use WSL 2 and there {_INSTALL}"
        )
    try:
        dali = importlib.import_module("nvidia.dali")
        for name in ("fn", "types", "math", "tensors"):
            importlib.import_module(f"nvidia.dali.{name}")
    except ModuleNotFoundError as error:
        raise DALIUnavailableError(f"NVIDIA DALI is not installed ({error}): {_INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:
        raise DALIUnavailableError(
            f"NVIDIA DALI is installed but does not load ({error}). Its package must fit the driver, Python and the "
            f"processor, and only one build of DALI may be installed: {_INSTALL}"
        ) from error
    version: str = dali.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 4):
        raise DALIUnavailableError(f"torchdali needs NVIDIA DALI 2.4 or newer, this is {version}: {_INSTALL}")
    return dali


def require_device(device: Any) -> None:
    """Check the loader's argument ``device``.

    Raises:
        DALIUnavailableError: DALI is missing, or cannot use the device.
        TypeError, ValueError: It is neither a device nor "auto".
    """
    require_dali()
    message = f"device must be 'auto' or a torch device such as 'cuda:1', got {device!r}"
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(message)
    if device == "auto":
        return
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(message) from error
    if reason := explain_unavailability(parsed):
        raise DALIUnavailableError(f"device={device!r} cannot be used: {reason}")


def explain_unavailability(device: torch.device) -> str | None:
    """Return why DALI cannot run on this device, or None if it can."""
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
    reason = ""
    try:
        visible: int = backend.GetCudaVersion() if hasattr(backend, "GetCudaVersion") else 1
    except RuntimeError as error:
        visible, reason = 0, f" ({error})"
    if not visible:
        return (
            f"torch sees a CUDA device but DALI does not{reason}: update the NVIDIA driver to one for CUDA 12 or "
            f"newer, and {_INSTALL}"
        )
    return None


def resolve(device: str | int | torch.device) -> torch.device:
    """Return the device to use. "auto" is this process's own GPU if DALI can use it, else the CPU."""
    if device == "auto":  # another loader's worker may be forked, and then cannot use CUDA
        usable = get_worker_info() is None and explain_unavailability(torch.device("cuda")) is None
        return devices.find_own() if usable else torch.device("cpu")
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


@functools.cache
def _pipeline_class(dali: Any) -> Any:
    # CPython clears a module's globals at exit, before it finalises the pipelines. So keep these functions here.
    getpid, leak_pipeline, has_failed, hand_over = os.getpid, leak, devices.has_failed, lifecycle.hand_over
    tensor, tensor_list, unchecked = dali.tensors.TensorCPU, dali.tensors.TensorListCPU, nullcontext()
    array_type, has_only_arrays = np.ndarray, _has_only_arrays

    class Pipeline(dali.Pipeline):
        """A pipeline that is shut down only by the process that built it, and only while its device works.

        Otherwise it is leaked. A forked child lacks the pipeline's threads, and DALI would wait for them for ever. That
        can happen at any time, because the child's garbage collector finds inherited pipelines. After a sticky CUDA
        error, such as an assertion in a kernel of the training step, DALI would wait for runs that never end.
        """

        _pipe: Any = None  # the base class sets it, and an interrupt may come before
        _process = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._process = getpid()
            self._lock = Lock()
            self.host_calls: list[HostCalls] = []
            self._words = WordTensors(lambda words: tensor(words, ""))
            super().__init__(*args, **kwargs)

        def feed_images(self, name: str, images: Any) -> Any:
            """Feed a batch without a copy: places, arrays, an array of all samples, or what ``feed_input`` takes.

            Returns:
                What must live until the run is done. If DALI's thread dropped the last reference to an array, it would
                wait for the interpreter's lock: once for each array, and beside a busy training up to 5 ms each time.
            """
            if isinstance(images, Places):
                kept, *cut = self._words.cut(images)
                self._pipe.SetExternalTensorInput(name, kept, None, False)
                for part, numbers in zip(_CUT, cut, strict=True):
                    self.feed_array(f"{name} {part}", numbers)
            elif isinstance(images, array_type):
                kept = tensor_list(images, "")
                self._pipe.SetExternalTLInput(name, kept, None, False)
            elif has_only_arrays(images):  # feed_input takes three times as long for 256 arrays
                kept = [tensor(image, "") for image in images]
                self._pipe.SetExternalTensorInput(name, kept, None, False)
            else:
                kept = None
                self.feed_input(name, images)
            return kept

        def feed_array(self, name: str, array: npt.NDArray[Any]) -> None:
            """Feed a copy of an array. ``feed_input`` does the same, and looks at all operators before it."""
            self._pipe.SetExternalTLInput(name, tensor_list(array, ""), None, False)

        def _check_api_type_scope(self, *_: Any) -> Any:
            """Check nothing. DALI defines a class here, three times for a batch, which becomes garbage in cycles."""
            return unchecked

        def close(self) -> None:
            """Wait for the runs in flight and free threads and memory now, not when garbage is collected."""
            self._shutdown()

        def _shutdown(self) -> None:
            if self._pipe and (self._process != getpid() or has_failed(self.device_id)):
                leak_pipeline(self)
            if not self._pipe:
                super()._shutdown()  # DALI forgets it
            elif not hand_over(self._shutdown_here):
                self._shutdown_here()

        def _shutdown_here(self) -> None:
            with self._lock:
                super()._shutdown()
                for calls in self.host_calls:
                    calls.close()

    return Pipeline


def _has_only_arrays(images: Any) -> bool:
    return isinstance(images, list) and all(type(image) is np.ndarray for image in cast("list[Any]", images))


def leak(pipeline: Any) -> None:
    """Leak a pipeline: its threads and memory stay until the process ends."""
    inner, pipeline._pipe = pipeline._pipe, None  # noqa: SLF001
    if inner is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


_reserved = {"pinned": 0}


def reserve_pinned(size: int, device: torch.device) -> None:
    """Let DALI's pool of pinned memory, of which a process has one, allocate what pipelines for a GPU will need.

    Args:
        size: Bytes. The call does nothing if as many were reserved before.
        device: The device that DALI uses.
    """
    if device.type == "cuda" and size > _reserved["pinned"]:
        _reserved["pinned"] = size
        with suppress(MemoryError, RuntimeError):  # the pool then grows when needed
            importlib.import_module("nvidia.dali.backend").PreallocatePinnedMemory(size)


def release_memory(device: torch.device | None) -> None:
    """Return unused memory of DALI's pools and of malloc to the system, on the host and on GPUs.

    Args:
        device: The device that was used, or None.
    """
    require_dali()
    with devices.use(device or torch.device("cpu")):
        importlib.import_module("nvidia.dali.backend").ReleaseUnusedMemory()
    _reserved["pinned"] = 0
    # malloc keeps a heap per thread, with up to 50 MiB that DALI's threads freed. The end of each stays (decisions.md).
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)


def build(plan: Plan, batch_size: int, threads: int, resident: bool = False) -> Any:
    """Build the pipeline of a plan, a ``nvidia.dali.Pipeline``.

    Its inputs are the batch, under the name of the plan's ``input_kind``, and ``plan.inputs``. DALI does not copy a
    batch in host memory. The outputs are the images of each view, CHW. For files, two more outputs follow: the last two
    bytes of each file, and its length.

    Args:
        plan: The plan.
        batch_size: Maximum number of samples in a run.
        threads: Number of DALI's CPU threads.
        resident: Whether pixels are fed from the device's own memory.
    """
    dali = require_dali()
    fn, types, gpu = dali.fn, dali.types, plan.device.type == "cuda"
    pipeline = _pipeline_class(dali)(
        batch_size=batch_size,
        num_threads=threads,
        device_id=plan.device.index if gpu else None,
        # feed.py limits the runs in flight. A queue in the pipeline would hold finished batches, and with dynamic
        # execution a scheduled run needs no place in it.
        prefetch_queue_depth=1,
        # Outputs then own their memory, so that they can be used without a copy (see dlpack.py).
        exec_dynamic=True,
    )
    with pipeline:
        nodes = {
            name: fn.external_source(name=name, ndim=x.ndim, dtype=types.to_dali_type(x.dtype.__name__.rstrip("_")))
            for name, x in plan.inputs.items()
        }
        ops = Operators(dali, "gpu" if gpu else "cpu", plan.fidelity, threads)
        pipeline.host_calls = ops.host_calls
        image, *file_info = _build_input(ops, plan, nodes, resident)
        trunk, views = plan.enumerate_rules()
        for i, rule in trunk:
            params = plan.select_params(i, nodes)
            if i == 0 and plan.decode_window and isinstance(rule, Window):
                image = rule.lower_window(ops, image, params)
            else:
                image = rule.lower(ops, image, params)
        outputs: list[Any] = []
        for view, rules in zip(plan.views, views, strict=True):
            output = image
            for i, rule in rules:
                output = rule.lower(ops, output, plan.select_params(i, nodes))
            outputs.append(output if view.channels_first else fn.transpose(output, perm=plan.channels_first))
        pipeline.set_outputs(*outputs, *file_info)
    pipeline.build()
    return pipeline


def _build_input(ops: Operators, plan: Plan, nodes: dict[str, Any], resident: bool) -> tuple[Any, ...]:
    """Return the node of the images. For files, return the nodes of their last two bytes and lengths, too."""
    fn, types = ops.fn, ops.types
    if not plan.input_kind.is_encoded:
        is_raw, axes = plan.input_kind is InputKind.PIXELS, plan.layout
        shape: dict[str, Any] = {"ndim": len(axes), "layout": axes} if is_raw else {"ndim": 1}
        # Pixels in device memory are copied. Without a copy DALI does not wait for the stream that writes them.
        device = "gpu" if resident else "cpu"
        image = fn.external_source(name=plan.input_kind.value, device=device, no_copy=not resident, **shape)
        return (image.gpu() if ops.device == "gpu" and not resident else image,)
    if plan.input_kind is InputKind.PLACES:
        return (_decode(ops, plan, _cut(ops, plan.input_kind.value), nodes),)
    source = fn.external_source(name=plan.input_kind.value, ndim=1, dtype=types.UINT8, no_copy=True)
    if plan.input_kind is InputKind.ENCODED:
        return (_decode(ops, plan, source, nodes),)
    # DALI opens memory-mapped files one at a time.
    encoded = fn.io.file.read(source, dont_use_mmap=True)
    length = encoded.shape(dtype=types.INT32)
    ending = fn.slice(encoded, start=length - 2, shape=[2], axes=[0], out_of_bounds_policy="pad")
    return _decode(ops, plan, encoded, nodes), ending, length


def _cut(ops: Operators, name: str) -> Any:
    """Return files, cut out of larger arrays: see :class:`WordTensors`."""
    fn, int64 = ops.fn, ops.types.INT64
    words = fn.external_source(name=name, ndim=1, dtype=int64, no_copy=True)
    begin, count = (fn.external_source(name=f"{name} {part}", ndim=1, dtype=int64) for part in _CUT)
    cut = fn.slice(words, begin, count, axes=[0], normalized_anchor=False, normalized_shape=False)
    return fn.reinterpret(cut, dtype=ops.types.UINT8)


def _check_headers(ops: Operators, plan: Plan, encoded: Any, window: Mapping[str, Any]) -> Any:
    """Return the files, after operators that fail if DALI cannot read a header, or a window is outside its image.

    DALI 2.4's decoders read the headers of 32 files and more in several threads. If one thread fails, the decoder
    returns while others still write to freed memory, and the process dies. This happens on the CPU and with a GPU. We
    know no issue about it, and no version that mends it.

    Args:
        ops: The operators.
        plan: The plan.
        encoded: The files.
        window: Start and shape of the windows to decode, if files may have changed since the windows were drawn.
    """
    sides = ops.fn.peek_image_shape(encoded, dtype=ops.types.INT32, adjust_orientation=plan.adjust_orientation)
    # The maximum is always the file's length, because that is never below 3, the number of sides. It makes the length
    # depend on the sides. Use few operators: each one that needs a thread waits for the decoder's threads.
    length = ops.math.max(encoded.shape(dtype=ops.types.INT32), sides.shape(dtype=ops.types.INT32))
    if window:
        room = ops.fn.slice(sides, start=[0], shape=[2], axes=[0]) - window["start"] - window["shape"]
        # A window outside its image changes the length, and reshaping to another length fails.
        length += ops.fn.reductions.sum(ops.fn.cast(room < 0, dtype=ops.types.INT32), keep_dims=True)
    return ops.fn.reshape(encoded, shape=length)


def _decode(ops: Operators, plan: Plan, encoded: Any, nodes: dict[str, Any]) -> Any:
    options: dict[str, Any] = {
        "device": "mixed" if ops.device == "gpu" else "cpu",
        "output_type": ops.types.RGB,
        "adjust_orientation": plan.adjust_orientation,
    }
    if plan.grey:
        options |= {"output_type": ops.types.GRAY, "dtype": getattr(ops.types, plan.spec.dtype_name.upper())}
    if ops.device == "gpu":
        options |= GPU_DECODER
    window = plan.select_params(0, nodes) if plan.decode_window else {}
    if not plan.headers_validated:  # with a GPU and 16 cores the operators cost up to a tenth of the images/s
        encoded = _check_headers(ops, plan, encoded, window if plan.input_kind is InputKind.FILES else {})
    if window:
        return ops.fn.decoders.image_slice(
            encoded, start=window["start"], shape=window["shape"], axes=[0, 1], **options
        )
    return ops.fn.decoders.image(encoded, **options)


def build_header_validator(batch_size: int) -> Any:
    """Build a pipeline on the CPU whose run fails if DALI's decoder would not read the header of a file.

    DALI 2.4 may end the process for such a file, see :func:`_check_headers`. The input :data:`HEADERS` takes the bytes
    of files, at least those of their headers.

    Args:
        batch_size: Maximum number of files in a run.
    """
    dali = require_dali()
    pipeline = _pipeline_class(dali)(batch_size, 1, None, prefetch_queue_depth=1, exec_dynamic=True)
    with pipeline:
        files = dali.fn.external_source(name=HEADERS, ndim=1, dtype=dali.types.UINT8, no_copy=True)
        pipeline.set_outputs(dali.fn.peek_image_shape(files))
    pipeline.build()
    return pipeline
