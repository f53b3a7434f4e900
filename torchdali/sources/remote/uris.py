"""Names of objects in object stores."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

__all__ = ["check_schemes", "identify_store", "is_uri", "split_uri"]

_URI = re.compile(r"(?:s3|gs|az|https?)://[^/]+/.")
_SCHEME = re.compile(r"(?:s3|gs|az|https?)://")
_ANY_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_VARIABLES = (
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_STORAGE_USE_EMULATOR",
    "AZURE_USE_EMULATOR",
    "AZURITE_BLOB_STORAGE_URL",
    "GOOGLE_BASE_URL",
)
"""Variables of the environment that say where obstore's stores are."""
_SECRET = re.compile("key|secret|token|password|sas|credential")
"""Parts of the names of settings that are credentials."""
_USER_OR_QUERY = re.compile(r"(?<=://)[^/@\s]*@|\?.*")


def is_uri(text: object) -> bool:
    """Return whether a text begins with the scheme of an object store: ``s3://``, ``gs://``, ``az://``, ``https://``.

    A path object is always a file.
    """
    return isinstance(text, str) and bool(_SCHEME.match(text))


def check_schemes(names: Iterable[object]) -> None:
    """Raise if a name begins with a scheme that is none of an object store: it would be taken for that of a file.

    Raises:
        ValueError: One does.
    """
    for name in names:
        if isinstance(name, str) and "://" in name and not is_uri(name) and _ANY_SCHEME.match(name):
            raise ValueError(
                f"an object must begin with s3://, gs://, az:// or https://, got {name!r}; a file has a plain path"
            )


def split_uri(uri: str) -> tuple[str, str]:
    """Return the store of an object, such as ``s3://bucket``, and its key there.

    Raises:
        ValueError: It has no bucket or no key, or an ``https://`` URI has a query.
    """
    if not _URI.match(uri):
        raise ValueError(f"an object must have a name like s3://bucket/key, got {uri!r}")
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme.startswith("http"):
        if "?" in key or "#" in key:
            raise ValueError(
                f"an https:// name must have no query, got {uri!r}; give a store as remote= for signed access"
            )
        key = unquote(key)
    return f"{scheme}://{bucket}", key


def identify_store(store: Any) -> str:
    """Return a hash of what tells a store's objects from those of another that have the same URIs.

    That is where the store is, such as its endpoint, its account and its prefix. Credentials are no part of it.

    Args:
        store: A store of obstore's; None for the stores that the environment describes.
    """
    facts: dict[str, Any] = {name: os.environ.get(name, "") for name in _VARIABLES}  # a given store uses them, too
    if store is not None:
        config: dict[str, Any] = getattr(store, "config", {})
        facts |= {"url": getattr(store, "url", ""), "prefix": getattr(store, "prefix", None) or "", **config}
        if not any((facts["url"], facts["prefix"], config)):
            facts["only"] = uuid.uuid4().hex  # such as a store in memory
        facts["class"] = type(store).__name__
    told = [(name, _USER_OR_QUERY.sub("", str(facts[name]))) for name in sorted(facts) if not _SECRET.search(name)]
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()
