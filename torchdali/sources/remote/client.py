"""Reads objects of object stores, in a thread of its own, or in a program of its own if the process was forked."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from torchdali.runtime import lifecycle
from torchdali.runtime.threads import wait_for
from torchdali.sources.remote import fetch
from torchdali.sources.remote.fetch import Fetcher, FetchError, Stat, Wanted
from torchdali.sources.remote.uris import check_schemes, identify_store, is_uri, split_uri
from torchdali.sources.source import ReadError

__all__ = ["Client", "Range", "make_client"]

Bytes = npt.NDArray[np.uint8]

_GAP = 2**17
"""Bytes between two parts of an object that are read with them, to save a request."""
_LARGEST = 2**23
"""Most bytes of a request that merges several parts."""
_PATIENCE = 2.0


class Range(NamedTuple):
    """A part of an object.

    Attributes:
        uri: The object.
        start: The first byte.
        stop: The byte after the last; None for all bytes.
        tag: As for :class:`Wanted`.
    """

    uri: str
    start: int = 0
    stop: int | None = None
    tag: str = ""


class _EventLoop(lifecycle.Resource):
    """A thread with an event loop, for all clients of a process. It starts with the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._has_ended = False
        super().__init__()

    def renew(self) -> None:
        """See :class:`torchdali.runtime.lifecycle.Resource`."""
        _inherited.append((self._loop, self._thread))
        self._lock, self._loop, self._thread = threading.Lock(), None, None

    def submit(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin a call. The future cancels its requests."""
        with self._lock:
            if self._has_ended:
                call.close()
                raise CancelledError
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="torchdali-remote", daemon=True)
                self._thread.start()
                lifecycle.install_exit_hook()
            return asyncio.run_coroutine_threadsafe(call, self._loop)

    def abandon(self) -> None:
        """Cancel all calls as the process ends. obstore's threads must not call Python after it."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            self._has_ended = True
        if loop and thread:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_PATIENCE)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


_inherited: list[Any] = []
"""What a forked process must not destroy: it has none of the threads of these objects."""
_event_loop = _EventLoop()
_is_forked = False


def _note_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or "obstore" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class Client(lifecycle.Resource):
    """Reads objects, many at a time. Several threads may call it, and it may be pickled or forked.

    obstore's threads do not survive a fork: its calls would wait for good. A process that was forked after obstore was
    imported therefore starts a program for its requests.

    Args:
        store: A store of obstore's for all objects; None for stores that the environment describes.

    Raises:
        ModuleNotFoundError: The package obstore is not installed.
    """

    def __init__(self, store: Any = None) -> None:
        if not find_spec("obstore"):
            raise ModuleNotFoundError(
                "object stores need the package obstore, got none; install it with Python 3.11 or newer: "
                "pip install 'torchdali[remote]'"
            )
        self._store = store
        self._place = "" if store is None else identify_store(store)
        self._lock = threading.Lock()
        self._fetcher: Fetcher | None = None
        self._program: _Program | None = None
        super().__init__()

    def renew(self) -> None:
        """See :class:`torchdali.runtime.lifecycle.Resource`."""
        _inherited.append((self._fetcher, self._program))
        self._lock, self._fetcher, self._program = threading.Lock(), None, None

    def __reduce__(self) -> Any:
        return Client, (self._store,)

    @property
    def place(self) -> str:
        """What tells the objects of this client from those of another that have the same URIs."""
        return self._place or identify_store(None)

    def read(self, ranges: Sequence[Range]) -> list[Bytes]:
        """Return the bytes of objects, or of parts of them. Parts that lie close together come with one request.

        Raises:
            ReadError: One cannot be read. Its error names the object.
        """
        merged, places = merge(ranges)
        try:
            results = self._call("read", [_find_wanted(one) for one in merged])
        except FetchError as error:
            position = next(i for i, (number, _) in enumerate(places) if number == error.position)
            raise ReadError(position, error.error) from None
        blocks: list[Bytes] = [np.frombuffer(result, np.uint8) for result in results]
        data: list[Bytes] = []
        for one, (number, offset) in zip(ranges, places, strict=True):
            block = blocks[number]
            data.append(block if one.stop is None else block[offset : offset + one.stop - one.start])
        return data

    def read_one(self, part: Range) -> Bytes:
        """Return the bytes of one object, or of a part of it.

        Raises:
            OSError, ValueError: It cannot be read. The error names the object.
        """
        try:
            return self.read([part])[0]
        except ReadError as error:
            raise error.error from None

    def stat(self, uris: Sequence[str]) -> list[Stat]:
        """Return the lengths and ETags of objects.

        Raises:
            OSError, ValueError: One cannot be asked for. The error names the object.
        """
        try:
            return [Stat(*one) for one in self._call("stat", [_find_wanted(Range(uri)) for uri in uris])]
        except FetchError as error:
            raise error.error from None

    def list(self, folder: str) -> list[str]:
        """Return the objects in a folder and the folders in it, sorted: ``s3://bucket/folder/`` or ``s3://bucket/``.

        Raises:
            OSError, ValueError: It cannot be listed.
        """
        root, key = split_uri(folder + "x")  # so that the root of a bucket has a key
        try:
            keys: list[str] = self._call("list", [Wanted(root, key[:-1])])[0]
        except FetchError as error:
            raise error.error from None
        return [f"{root}/{key}" for key in sorted(keys)]

    def _call(self, name: str, wanted: Sequence[Wanted]) -> list[Any]:
        self._place = self.place  # the environment may change later, and the stores stay
        if not _is_forked:
            with self._lock:
                self._fetcher = fetcher = self._fetcher or Fetcher(self._store)
            return wait_for(_event_loop.submit(getattr(fetcher, name)(wanted)))
        with self._lock:
            self._program = self._program or _Program(self._store)
            try:
                return self._program.call(name, wanted)
            except FetchError:
                raise
            except BaseException:  # its next answer would be of this call
                self._program.close()
                self._program = None
                raise


def make_client(names: Iterable[object], store: Any, what: str) -> Client | None:
    """Return a client if names are those of objects; None if they are those of files.

    Args:
        names: The names. All are of the same kind.
        store: The argument ``remote``.
        what: What they are, for messages.

    Raises:
        ValueError: Some are objects and some are files, all are files and there is a store, or one is neither.
        ModuleNotFoundError: The package obstore is not installed.
    """
    names = list(names)
    check_schemes(names)
    kinds = {is_uri(name) for name in names}
    if len(kinds) > 1:
        raise ValueError(f"{what} must be all files or all objects, got both; make two datasets and a ConcatDataset")
    if kinds == {True}:
        return Client(store)
    if store is not None:
        raise ValueError(f"remote= goes with {what} such as s3://bucket/name, got files")
    return None


class _Program:
    """A program that reads objects for this process, and ends with it."""

    def __init__(self, store: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, fetch.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._send((sys.path, pickle.dumps(store)))

    def _send(self, message: object) -> None:
        stream = cast("Any", self._process.stdin)
        pickle.dump(message, stream)
        stream.flush()

    def call(self, name: str, wanted: Sequence[Wanted]) -> list[Any]:
        """See :class:`Fetcher`.

        Raises:
            FetchError: A request failed.
            OSError: The program has ended.
        """
        self._send((name, [tuple(one) for one in wanted]))
        try:
            failure, results = pickle.load(cast("Any", self._process.stdout))
        except EOFError as error:
            raise OSError(f"the program that reads {wanted[0].root} has ended; its messages are above") from error
        if failure:
            raise FetchError(*failure)
        return results

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.communicate()


def _find_wanted(part: Range) -> Wanted:
    return Wanted(*split_uri(part.uri), part.start, part.stop, part.tag)


def merge(ranges: Sequence[Range]) -> tuple[list[Range], list[tuple[int, int]]]:
    """Merge parts of objects that lie close together.

    Returns:
        The parts to read; and for each part that is wanted, the number of the part that it is in, and its offset there.
    """
    merged: list[Range] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(ranges)
    whole: dict[str, int] = {}
    for i in sorted(range(len(ranges)), key=lambda i: (ranges[i].uri, ranges[i].start)):
        part, last = ranges[i], merged[-1] if merged else None
        if part.stop is None:
            if part.uri not in whole:
                whole[part.uri] = len(merged)
                merged.append(part)
            places[i] = whole[part.uri], 0
        elif (
            last is not None
            and last.stop is not None
            and last.uri == part.uri
            and part.start - last.stop <= _GAP
            and max(part.stop, last.stop) - last.start <= _LARGEST
        ):
            merged[-1] = last._replace(stop=max(part.stop, last.stop))
            places[i] = len(merged) - 1, part.start - last.start
        else:
            places[i] = len(merged), 0
            merged.append(part)
    return merged, places
