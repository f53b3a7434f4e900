"""The names of shards from the JSON file that ``widsindex`` of the package wids writes.

Its list ``shardlist`` has for each shard ``url``, ``nsamples``, and often ``md5sum`` and ``filesize``. The format:
https://github.com/webdataset/webdataset/blob/main/wids/wids_specs.py.
"""

from __future__ import annotations

import json
import os
import posixpath
from pathlib import Path
from typing import Any

from torchdali.sources.remote import Client, Range, check_schemes, is_uri

__all__ = ["read_shard_list"]


def read_shard_list(file: str | os.PathLike[str], remote: Any) -> list[str]:
    """Return the shards that a JSON of wids lists. As for wids, names without a folder are in that of the JSON.

    Args:
        file: The JSON, a file or an object.
        remote: The store of an object; None for the one that the environment describes.

    Raises:
        ValueError: It is no such JSON.
        OSError: It cannot be read.
    """
    check_schemes([file])
    is_object = is_uri(file)
    data = Client(remote).read_one(Range(str(file))).tobytes() if is_object else Path(file).expanduser().read_bytes()
    try:
        content = json.loads(data)
        urls = [entry["url"] for entry in content["shardlist"]]
        names = [_resolve(str(file), url) for url in urls]
        others = content.get("datasets")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} must be a JSON with a list 'shardlist' of entries with a 'url', as wids has"
        ) from error
    check_schemes(urls)
    if others or not names:
        raise ValueError(f"{file} lists no shards, or names other lists as 'datasets'; give the shards themselves")
    return names


def _resolve(file: str, url: str) -> str:
    if is_uri(url):
        return url
    if not is_uri(file):
        return str(Path(file).expanduser().parent / url)
    scheme, slashes, path = file.partition("://")
    return scheme + slashes + posixpath.normpath(posixpath.join(posixpath.dirname(path), url))
