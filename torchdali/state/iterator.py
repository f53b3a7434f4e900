"""The base of all iterators: torch's, which counts batches so that an epoch can be resumed."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from threading import RLock
from typing import Any, cast

from torch.utils.data.dataloader import _BaseDataLoaderIter  # pyright: ignore[reportPrivateUsage]

from torchdali.runtime import lifecycle
from torchdali.runtime.exceptions import (
    CLOSED,
    FORKED,
    INTERRUPTED,
    DeferredError,
    EpochEndedError,
    defer,
    skip_own_frames,
    to_text,
)
from torchdali.runtime.lifecycle import disable_compile
from torchdali.state.context import EpochContext, LoaderView
from torchdali.state.fast_forward import fast_forward, restart_if_empty
from torchdali.state.lookahead import SamplerLookahead
from torchdali.state.progress import Checkpoint, EpochProgress
from torchdali.state.remainder import skip_consumed
from torchdali.state.stream import Stream, StreamProgress, is_stateful

__all__ = ["ResumableIterator", "StreamStep"]

_ITERATOR = "iterator"
_STATES = ("state_at_begin", "state")

StreamStep = tuple[int, int, dict[str, Any]]
"""The worker whose stream made a batch, the number of samples, and the stream's state after the batch."""


class ResumableIterator(_BaseDataLoaderIter, lifecycle.Resource):
    """An iterator of an epoch that can be saved and resumed.

    It comes after torch's classes in the order of inheritance, so that their workers get the indices that it returns.
    A subclass sets ``_context`` before it calls this constructor, because torch's classes in between pass on the view
    alone.

    Args:
        view: What torch's classes see of the loader.

    Attributes:
        progress: Where the epoch is.
    """

    _context: EpochContext
    _needs_own_process = True
    """Whether a forked process cannot use it, because DALI or worker processes stand behind it."""
    _ended = ""
    """Why the epoch gives no further batch before it is over; empty while it runs."""
    _stream_step: StreamStep | None = None
    """What a stream did for the batch that is yielded next."""

    def __init__(self, view: LoaderView) -> None:
        self._lock = RLock()
        lifecycle.Resource.__init__(self)
        self.progress: EpochProgress = self._context.progress
        super().__init__(cast("Any", view))
        self._start_counts(view)
        if self.progress.checkpoint and self.progress.checkpoint.base_seed is not None:
            self._base_seed = self.progress.checkpoint.base_seed
        self.progress.base_seed = int(self._base_seed)

    def renew(self) -> None:
        """See :class:`torchdali.runtime.lifecycle.Resource`."""
        self._lock = RLock()
        if self._needs_own_process:
            self._ended = FORKED

    @disable_compile
    @lifecycle.native_call()
    def __next__(self) -> Any:
        """Return the next batch, or raise its error.

        An exception of user code, of a sample or of a run of DALI comes as a :class:`DeferredError`. The epoch
        continues after it. Any other exception ends the epoch here: an interrupt, a worker's death, a timeout or an
        exception of a signal handler. It can come at any point, so the work in flight can no longer be matched to
        batches.
        """
        with self._lock:  # several threads may share the iterator
            return self._next_or_end()

    def _next_or_end(self) -> Any:
        if self._ended:
            raise RuntimeError(self._ended)
        self._ended = INTERRUPTED
        error: Exception
        try:
            data = super().__next__()
            self._count_yielded()
        except StopIteration:
            self.progress.finished = True
            self._ended = ""
            raise
        except DeferredError as deferred:
            error = deferred.error
            self._count_yielded()
        except BaseException as fatal:
            is_ours = isinstance(fatal, EpochEndedError)
            is_torchs = to_text(fatal).startswith("DataLoader ")  # it timed out, or a worker died
            self._ended = str(fatal) if is_ours or is_torchs else INTERRUPTED
            self._drop()
            if not is_ours:
                raise
            cause = fatal.__cause__
            if cause and self._ended == INTERRUPTED:
                raise cause from None
            raise RuntimeError(self._ended) from cause
        else:
            self._ended = ""
            return data
        self._ended = ""
        try:
            # torch's ExceptionWrapper.reraise() holds what it raises, in a cycle with its frame and this iterator. The
            # garbage collector would end the queues of such an iterator before its workers, which then wait.
            raise error.with_traceback(skip_own_frames(error.__traceback__))
        finally:
            del error  # its traceback would hold this iterator in a cycle

    def _count_yielded(self) -> None:
        """Count a batch, or the error that was raised in its place."""
        self.progress.num_yielded += 1
        if self._stream_step:
            worker, samples, state = self._stream_step
            self.progress.advance_stream(worker, self._num_workers, samples, state)
        self._stream_step = None

    def _take_stream_step(self) -> None:
        """Note what the stream has done in this process since the batch before."""
        if self._stream:
            self._stream_step = 0, *self._stream.take_progress()

    def restart(self, context: EpochContext) -> None:
        """Begin another epoch, with the worker processes that persist."""
        self._context = context
        self._reset(context.view)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self.progress = self._context.progress
            self.progress.rng_at_start = self.progress.generators.states()  # after the rewind of the epoch before
        super()._reset(loader, first_iter)
        self._start_counts(loader)
        self.progress.num_iterators, self.progress.drew_base_seed = (2, True) if first_iter else (1, False)
        self.progress.base_seed = int(self._base_seed)

    def _start_counts(self, view: LoaderView) -> None:
        """Start the counts of an epoch."""
        self._backlog: deque[Any] = deque()
        self._num_requested = 0
        self._stateful = dict(self._context.stateful)
        self._note_iterator()
        if self._context.is_resumed:
            self._sampler_iter = self._restart_if_over(self._sampler_iter, self._index_sampler)
        self._stream = self._dataset if isinstance(self._dataset, Stream) else None
        self._lookahead = SamplerLookahead(view, self.progress, self._stateful)

    def _note_iterator(self) -> None:
        self._stateful.pop(_ITERATOR, None)
        if is_stateful(self._sampler_iter):
            self._stateful[_ITERATOR] = self._sampler_iter

    def _restart_if_over(self, iterator: Any, sampler: Any) -> Any:
        """Return the iterator of a sampler, made again if the sampler loaded the state of an ended epoch."""

        def restart_if_over() -> Iterator[Any]:  # runs when the sampler is first asked
            first, self._sampler_iter = restart_if_empty(iterator, sampler)
            if self._sampler_iter is not iterator:
                self._note_iterator()
            yield from chain(first, self._sampler_iter)  # chain does not close the iterator when it ends

        return restart_if_over() if self._stateful else iterator

    def _next_index(self) -> Any:
        self.resume()
        self._num_requested += 1
        if not self._backlog:
            return self._lookahead.request(super()._next_index)
        index = self._backlog.popleft()
        try:
            if isinstance(index, Exception):
                raise index
            return index
        finally:
            del index  # raised, its traceback would hold this iterator in a cycle

    def _index_counter(self) -> Callable[[Iterable[Any]], None] | None:
        """Return the function that counts indices of samples that are skipped; None if they need no count."""
        return None

    def close(self) -> None:
        """End the epoch early, and its workers."""
        if self._ended == FORKED:
            return  # the workers are the parent's
        if not self.progress.finished:
            self._ended = CLOSED
        self._end_workers()

    def _drop(self) -> None:
        """Drop what is in flight, as the epoch has ended early."""

    def _end_workers(self) -> None:
        """End the worker processes, if there are any."""

    def rewind(self) -> None:
        """Rewind the generators to where ``DataLoader`` would have left them, because the epoch ends here."""
        self._lookahead.rewind()

    def resume(self) -> None:
        """Fast-forward the sampler to the loaded checkpoint, if there is one. Loads no sample.

        The constructor's draws do not matter: all that the order depends on is restored first. Then the sampler is
        asked for what it had been asked for.
        """
        saved, progress = self.progress.checkpoint, self.progress
        if saved is None:
            if self._stream and not self._num_workers and not progress.num_yielded and (state := self._stream.state()):
                progress.streams[0] = StreamProgress(state=state)
            return
        progress.checkpoint = None
        state = saved.state
        progress.num_iterators, progress.drew_base_seed = state["iterators"], state["base_seed_drawn"]
        batches = saved.num_yielded
        if self._stream:
            self._resume_stream(saved)
            return
        if self._stateful and batches:
            if self._index_counter():
                self._skip_yielded(self._remake_iterator(saved, "state_at_begin"), saved, is_loaded=True)
            self._sampler_iter = self._remake_iterator(saved, "state")
        else:
            self._sampler_iter = self._skip_yielded(self._remake_iterator(saved, "state"), saved)
        progress.num_requested = progress.num_yielded = self._num_requested = batches
        progress.rng_at_first_request = saved.rng_at_first_request
        first, current = ({path: saved.sampler_state(path).get(key) for path in self._stateful} for key in _STATES)
        self._lookahead.restart(first, current)
        while progress.num_requested < state["asked"]:
            try:
                self._backlog.append(self._lookahead.request(super()._next_index))
            except Exception as error:  # noqa: BLE001
                self._backlog.append(defer(error))  # raised when its batch is due
        if saved.in_progress:
            progress.generators.set(saved.rng_now)

    def _resume_stream(self, saved: Checkpoint) -> None:
        """Restore the counts. The dataset itself is resumed by ``Stream``, in the workers."""
        progress = self.progress
        self._sampler_iter = self._remake_iterator(saved, "state")
        progress.num_yielded = self._num_requested = saved.num_yielded
        progress.streams, progress.worker = dict(saved.streams), saved.state["worker"]
        if saved.in_progress:
            progress.generators.set(saved.rng_now)

    def _skip_yielded(self, iterator: Any, saved: Checkpoint, is_loaded: bool = False) -> Any:
        """Return a sampler's iterator after the batches that were yielded."""
        return fast_forward(
            skip_consumed(self._index_sampler, self.progress.start),
            iterator,
            saved.num_yielded,
            is_batched=self._auto_collation,
            count_skipped=self._index_counter(),
            is_loaded=is_loaded,
        )

    def _remake_iterator(self, saved: Checkpoint, at: str) -> Any:
        """Return the sampler's iterator, made and seeded in the order in which ``DataLoader`` does both.

        The generators are then as they were at its first request.
        """
        seeded, sampler = saved.state["base_seed_drawn"], skip_consumed(self._index_sampler, self.progress.start)
        self.progress.generators.set(saved.rng_at_start)
        if saved.state["iterators"] > 1:
            iter(sampler)
            if seeded:
                self.progress.generators.draw_seed()
        for path, stateful in self._stateful.items():
            if path != _ITERATOR and at in (kept := saved.sampler_state(path)):
                stateful.load_state_dict(copy.deepcopy(kept[at]))
        self._sampler_iter = iterator = cast("Any", iter(sampler))
        if saved.state["iterators"] == 1 and seeded:
            self.progress.generators.draw_seed()
        self._note_iterator()
        if _ITERATOR in self._stateful and at in (kept := saved.sampler_state(_ITERATOR)):
            iterator.load_state_dict(copy.deepcopy(kept[at]))
        self.progress.generators.set(saved.rng_at_first_request)
        begins = at == "state_at_begin" or not saved.num_yielded
        return self._restart_if_over(iterator, sampler) if begins else iterator
