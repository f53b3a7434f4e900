"""What asks an object store, in an event loop. It imports obstore and nothing of torchdali.

obstore's threads do not survive a fork, and its calls then wait for good. So a forked process runs this file as a
program of its own (:class:`torchdali.sources.remote.client.Client`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["FetchError", "Fetcher", "Stat", "Wanted"]

_REFUSED = ("PermissionDeniedError", "UnauthenticatedError")
_CHANGED = "PreconditionError"
_LONGEST = 300
_TIME = "time "
_NOT_COMPARED = (_TIME, "W/")
"""How tags begin that no request names: times, and weak ETags, which equal none by RFC 9110, "If-Match"."""
_MAX_REQUESTS = 128
"""Requests in flight. With 30 ms for each, 128 make 4,000 a second."""


class Wanted(NamedTuple):
    """Bytes of an object.

    Attributes:
        root: Where it is: ``s3://bucket``.
        key: Its name there.
        start: The first byte.
        stop: The byte after the last; None for all bytes.
        tag: The tag of its :class:`Stat`; "" if it may have any. A store compares it if it is a strong ETag.
    """

    root: str
    key: str
    start: int = 0
    stop: int | None = None
    tag: str = ""


class Stat(NamedTuple):
    """What a store tells of an object: its length and its ETag, or its time of modification if it has no ETag."""

    size: int
    tag: str


class FetchError(Exception):
    """A request failed.

    Attributes:
        position: Its number among the requests of the call.
        error: The reason: an ``OSError`` or ``ValueError`` that names the object.
    """

    def __init__(self, position: int, error: Exception) -> None:
        super().__init__(position, error)
        self.position, self.error = position, error


class Fetcher:
    """Reads objects, many at a time.

    Args:
        store: A store of obstore's for all objects; None for stores that the environment describes.
    """

    def __init__(self, store: Any = None) -> None:
        self._given = store
        self._stores: dict[str, Any] = {}
        self._obstore = import_module("obstore")
        self._places = asyncio.Semaphore(_MAX_REQUESTS)

    def _open(self, root: str) -> Any:
        store = self._stores.get(root)
        if store is None:
            if self._given is not None and self._stores:
                raise ValueError(f"remote= is a store of {next(iter(self._stores))}, got an object of {root}")
            self._stores[root] = store = self._given or _open_store(root)
        return store

    async def read(self, wanted: Sequence[Wanted]) -> list[Any]:
        """Return the bytes of several objects or parts of them.

        Raises:
            FetchError: One of them could not be read.
        """
        return await _gather([self._attempt(i, self._read, one) for i, one in enumerate(wanted)])

    async def stat(self, wanted: Sequence[Wanted]) -> list[Stat]:
        """Return the lengths and tags of several objects.

        Raises:
            FetchError: One of them could not be asked for.
        """
        return await _gather([self._attempt(i, self._stat, one) for i, one in enumerate(wanted)])

    async def list(self, wanted: Sequence[Wanted]) -> list[list[str]]:
        """Return the names of all objects in several folders.

        Raises:
            FetchError: One of them could not be listed.
        """
        return await _gather([self._attempt(i, self._list, one) for i, one in enumerate(wanted)])

    async def _attempt(self, position: int, function: Callable[[Wanted], Awaitable[Any]], wanted: Wanted) -> Any:
        try:
            async with self._places:
                return await function(wanted)
        except Exception as error:
            raise FetchError(position, _translate(error, f"{wanted.root}/{wanted.key}")) from error

    async def _read(self, wanted: Wanted) -> Any:
        is_compared = wanted.tag and not wanted.tag.startswith(_NOT_COMPARED)
        options: dict[str, Any] = {"if_match": wanted.tag} if is_compared else {}
        if wanted.stop is not None:
            if wanted.stop <= wanted.start:
                return b""
            options["range"] = (wanted.start, wanted.stop)
        result = await self._obstore.get_async(self._open(wanted.root), wanted.key, options=options or None)
        data = await result.bytes_async()
        if wanted.stop is not None and len(data) != wanted.stop - wanted.start:
            count = wanted.stop - wanted.start
            raise ValueError(f"it has {len(data):,} bytes from byte {wanted.start:,} on, and {count:,} are wanted")
        return data

    async def _stat(self, wanted: Wanted) -> Stat:
        meta = await self._obstore.head_async(self._open(wanted.root), wanted.key)
        return Stat(meta["size"], meta["e_tag"] or f"{_TIME}{meta['last_modified']}")

    async def _list(self, wanted: Wanted) -> list[str]:
        keys: list[str] = []
        async for page in self._obstore.list(self._open(wanted.root), prefix=wanted.key or None, chunk_size=1000):
            keys += [meta["path"] for meta in page]
        return keys


def _open_store(root: str) -> Any:
    stores: Any = import_module("obstore.store")
    if root.startswith(("http://", "https://")):
        return stores.HTTPStore.from_url(root, client_options={"allow_http": root.startswith("http://")})
    return stores.from_url(root)


async def _gather(calls: Sequence[Any]) -> list[Any]:
    """Return all results. If one fails or this call is cancelled, cancel the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _translate(error: Exception, uri: str) -> Exception:
    """Return the built-in exception for one of obstore's."""
    text, kind = _describe_fault(error), type(error).__name__
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, text, uri)
    if kind in _REFUSED:
        return PermissionError(errno.EACCES, text, uri)
    if kind == _CHANGED or isinstance(error, ValueError):
        return ValueError(f"{uri}: {text}")
    return TimeoutError(errno.ETIMEDOUT, text, uri) if _is_late(error) else OSError(errno.EREMOTEIO, text, uri)


def _describe_fault(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such object"
    if type(error).__name__ == _CHANGED:
        return "it has changed since its index was made; delete the index, and it is made again"
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())[:_LONGEST]  # Rust's text fills a page
    if type(error).__name__ in _REFUSED:
        return f"the store refuses access ({text})"
    return f"the store did not answer in time ({text})" if _is_late(error) else f"it cannot be fetched ({text})"


def _is_late(error: Exception) -> bool:
    return any(word in str(error) for word in ("timed out", "kind: Timeout", "TimedOut"))


def _serve() -> None:
    """Answer calls that come through standard input, one after another, until it is closed."""
    stream, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between
    sys.path[:], store = pickle.load(stream)
    runner = asyncio.new_event_loop()
    fetcher = Fetcher(pickle.loads(store))
    # The other process knows neither obstore's classes nor those of this module, which is __main__ here.
    convert: dict[str, Callable[[Any], Any]] = {"read": bytes, "stat": tuple, "list": list}
    while True:
        try:
            name, calls = pickle.load(stream)
        except EOFError:
            return
        wanted = [Wanted(*call) for call in calls]
        try:
            results = runner.run_until_complete(getattr(fetcher, name)(wanted))
            answer: Any = None, [convert[name](one) for one in results]
        except FetchError as error:
            answer = (error.position, error.error), []
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    _serve()
