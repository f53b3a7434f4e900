"""A sketch in DALI that opens each file once in each epoch, the first included.

One pipeline on the CPU reads the files of a batch. It outputs them, and the first 2 KiB of each as one array. From that
the sizes of the images are parsed, and crops are drawn. The files then go to the pipeline that decodes them, without a
copy. No file is opened in Python, where each call takes the interpreter's lock from the training.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline

from torchdali.pipeline.dlpack import get_stream, to_torch
from torchdali.sources import HEADER_BYTES
from torchdali.sources.headers.batch import parse
from torchdali.sources.paths import Paths, build_table

_WINDOW = 6
_THREADS = 4
_SIZE = 224
_RATIOS = np.log([3 / 4, 4 / 3])

Batch = tuple[torch.Tensor, torch.Tensor]


class ReadOnce:
    """Batches of random resized crops, flipped and normalized.

    Args:
        samples: Paths and labels.
        batch_size: Images in a batch.
        device: Where to decode.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], batch_size: int, device: torch.device) -> None:
        self._paths = Paths([build_table([path for path, _ in samples])])
        self._labels = np.array([label for _, label in samples])
        self._batch_size, self._device = batch_size, device
        self._random = np.random.default_rng(0)
        self._reader, self._decoder = self._build_reader(), self._build_decoder()

    def _make_pipeline(self, device: int | None) -> Any:
        return Pipeline(self._batch_size, _THREADS, device, prefetch_queue_depth=1, exec_dynamic=True)

    def _build_reader(self) -> Any:
        pipeline = self._make_pipeline(None)
        with pipeline:
            paths = fn.external_source(name="paths", ndim=1, dtype=types.UINT8, no_copy=True)
            files = fn.io.file.read(paths, dont_use_mmap=True)
            heads = fn.slice(files, start=[0], shape=[HEADER_BYTES], axes=[0], out_of_bounds_policy="pad")
            pipeline.set_outputs(files, heads)
        pipeline.build()
        return pipeline

    def _build_decoder(self) -> Any:
        gpu = self._device.type == "cuda"
        pipeline = self._make_pipeline(torch.cuda.current_device() if gpu else None)
        engine: dict[str, Any] = {"hw_decoder_load": 1.0, "affine": False} if gpu else {}
        with pipeline:
            files = fn.external_source(name="files", ndim=1, dtype=types.UINT8, no_copy=True)
            start, shape, flip = (
                fn.external_source(name=name, ndim=n) for name, n in (("start", 1), ("shape", 1), ("flip", 0))
            )
            crops = fn.decoders.image_slice(
                files, start=start, shape=shape, axes=[0, 1], device="mixed" if gpu else "cpu", **engine
            )
            crops = fn.resize(crops, size=[_SIZE, _SIZE], antialias=True)
            pipeline.set_outputs(
                fn.crop_mirror_normalize(crops, mirror=flip, mean=[127.5] * 3, std=[63.75] * 3, output_layout="CHW")
            )
        pipeline.build()
        return pipeline

    def __iter__(self) -> Iterator[Batch]:
        order = self._random.permutation(len(self._labels))
        count = len(order) // self._batch_size
        batches = order[: count * self._batch_size].reshape(count, -1)
        reads: deque[tuple[npt.NDArray[Any], Future[Any]]] = deque()
        runs: deque[tuple[npt.NDArray[Any], Any]] = deque()
        with ThreadPoolExecutor(1) as thread:
            for rows in [*batches, *[None] * _WINDOW * 2]:
                if rows is not None:
                    reads.append((rows, thread.submit(self._read, self._paths.gather(rows))))
                if reads and (rows is None or len(reads) > _WINDOW):
                    runs.append(self._decode(*reads.popleft()))
                if runs and (not reads or len(runs) > _WINDOW):
                    yield self._take(*runs.popleft())

    def _read(self, paths: npt.NDArray[np.uint8]) -> tuple[Any, npt.NDArray[np.int64]]:
        """Return the files of a batch, and ``(N, 2)`` heights and widths."""
        self._reader.feed_input("paths", paths)
        self._reader.schedule_run()
        files, heads = self._reader.share_outputs()
        self._reader.release_outputs()  # dynamic execution: outputs own their memory
        return files, parse(np.asarray(heads.as_tensor()), False).sizes.astype(np.int64)

    def _decode(self, rows: npt.NDArray[Any], read: "Future[Any]") -> tuple[npt.NDArray[Any], Any]:
        files, sizes = read.result()
        area = sizes.prod(1) * self._random.uniform(0.08, 1, len(sizes))
        ratio = np.exp(self._random.uniform(*_RATIOS, len(sizes)))
        shape = np.minimum(np.rint(np.sqrt(np.stack((area / ratio, area * ratio), 1))), sizes).clip(1)
        start = np.floor(self._random.uniform(size=sizes.shape) * (sizes - shape + 1))
        self._decoder.feed_input("files", files)
        self._decoder.feed_input("start", start.astype(np.int32))
        self._decoder.feed_input("shape", shape.astype(np.int32))
        self._decoder.feed_input("flip", self._random.integers(0, 2, len(sizes), np.int32))
        self._decoder.schedule_run()
        return rows, files

    def _take(self, rows: npt.NDArray[Any], _files: Any) -> Batch:
        stream = get_stream(self._device)
        (images,) = self._decoder.share_outputs(stream)
        self._decoder.release_outputs()
        batch = to_torch(images, stream)
        assert isinstance(batch, torch.Tensor)
        return batch, torch.from_numpy(self._labels[rows])

    def close(self) -> None:
        """Free the pipelines."""
        self._reader = self._decoder = None
