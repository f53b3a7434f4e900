"""What iterators with worker processes have in common."""

from __future__ import annotations

from typing import Any, cast

from torchdali.resume import Resumable
from torchdali.workers import Starting, Uninterrupted, WorkerStart

__all__ = ["Parallel"]


class Parallel(Resumable):
    """Its workers are started and asked for batches without interruption; it comes before torch's class.

    A KeyboardInterrupt can come anywhere else, in the user's sampler too. In the midst of ``Queue.put`` it could leave
    a lock locked for which the end of the workers would wait for ever, or a queue that sends nothing any more.

    Args:
        loader: The loader.
    """

    _workers_status: list[bool]

    def __init__(self, loader: Any) -> None:
        self._starting = Starting()
        if not isinstance(loader.worker_init_fn, WorkerStart):
            super().__init__(loader)
            return
        with self._starting:
            super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            self._workers_status = [True] * self._num_workers  # by which torch ends them, should the next line raise
            self._starting.end()
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        self._rotate()
        try:
            self._asked = super()._next_index()
        except StopIteration:
            return
        with Uninterrupted():
            cast("Any", super())._try_put_index()  # noqa: SLF001 - its own

    def _next_index(self) -> Any:
        """What the sampler gave to ``_try_put_index``."""
        return self._asked
