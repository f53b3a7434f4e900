"""Shards in object stores. Their images are ranges, which are fetched a batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from torchdali.datasets.shards import Bytes, Column, ShardFile, Shards
from torchdali.sources.remote import Client, Range
from torchdali.sources.source import ReadError
from torchdali.transforms.spec import IntArray

__all__ = ["RemoteShardFile", "RemoteShards", "Stamps"]

_PIECE = 2**23
_WINDOW = 8 * _PIECE
"""Bytes that are read at once of a shard whose index is made, by eight requests."""


class Stamps:
    """The lengths and ETags of objects.

    Args:
        client: Reads them.

    Attributes:
        tags: The ETag of each object that was asked for; of a store without ETags the time of modification.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sizes: dict[str, int] = {}
        self.tags: dict[str, str] = {}

    def __call__(self, uris: Sequence[str]) -> list[tuple[int, int]]:
        """Return the lengths of objects, and for each a number that is another for another ETag."""
        stats = self._client.stat(uris)
        for uri, stat in zip(uris, stats, strict=True):
            self._sizes[uri], self.tags[uri] = stat
        return [(stat.size, _number(stat.tag)) for stat in stats]

    def open(self, uri: str) -> RemoteShardFile:
        """Open an object that was asked for, to read it from its begin to its end."""
        return RemoteShardFile(uri, self._client, self._sizes[uri], self.tags[uri])


def _number(tag: str) -> int:
    return int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=7).digest(), "big")


class RemoteShards(Shards):
    """The shards of a dataset, as objects.

    Args:
        uris: The objects.
        stamps: ``(S, 2)`` int64 their lengths, and numbers of their ETags, when their index was made.
        index: The index, for messages.
        client: Reads them.
        tags: As for :class:`Stamps`.
    """

    def __init__(self, uris: Sequence[str], stamps: IntArray, index: str, client: Client, tags: dict[str, str]) -> None:
        super().__init__(uris, stamps, index, is_mapped=False)
        self._client, self._tags = client, tags

    def check_shard(self, shard: int) -> None:
        """Raise if there is no such shard. Each request names the ETag, so that a store refuses a changed object."""
        if not 0 <= shard < len(self.paths):
            raise ValueError(f"{self._index} is damaged: it names shard {shard} of {len(self.paths)}")

    def locate(self, shards: Column, offsets: Column, lengths: Column) -> list[Range]:
        """Return the requests for bytes of shards.

        Raises:
            ValueError: As for :meth:`check`.
        """
        shards, offsets, lengths = (column.astype(np.int64) for column in (shards, offsets, lengths))
        self.check(shards, offsets, lengths)
        return self._locate(zip(shards.tolist(), offsets.tolist(), lengths.tolist(), strict=True))

    def _locate(self, places: Iterable[tuple[int, int, int]]) -> list[Range]:
        uris = ((self.paths[shard], offset, length) for shard, offset, length in places)
        return [Range(uri, offset, offset + length, self._tags.get(uri, "")) for uri, offset, length in uris]

    def _copy(self, places: Sequence[tuple[int, int, int]]) -> list[Bytes]:
        try:
            return self._client.read(self._locate(places))
        except ReadError as error:
            raise error.error from None


class RemoteShardFile(ShardFile):
    """An object that is read from its begin to its end, in large pieces."""

    def __init__(self, uri: str, client: Client, size: int, tag: str) -> None:  # it opens no file
        self.size, self.status = size, None
        self._uri, self._client, self._tag = uri, client, tag
        self._pieces: list[Bytes] = []
        self._begin = 0

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes; fewer where the object ends."""
        end = min(offset + length, self.size)
        parts: list[bytes] = []
        while offset < end:
            window = offset // _WINDOW * _WINDOW
            if not self._pieces or window != self._begin:
                self._fetch(window)
            number, start = divmod(offset - window, _PIECE)
            parts.append(self._pieces[number][start : start + end - offset].tobytes())
            offset += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fetch(self, begin: int) -> None:
        self._begin = begin
        starts = range(begin, min(begin + _WINDOW, self.size), _PIECE)
        parts = [Range(self._uri, at, min(at + _PIECE, self.size), self._tag) for at in starts]
        try:
            self._pieces = self._client.read(parts)
        except ReadError as error:
            raise error.error from None

    def close(self) -> None:
        """Forget what was read."""
        self._pieces = []
