"""Names of objects in object stores."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import unquote

__all__ = ["describe_store", "is_uri", "split_uri"]

_URI = re.compile(r"(?:s3|gs|az|https?)://[^/]+/.")
_SCHEME = re.compile(r"(?:s3|gs|az|https?)://")
_VARIABLE = re.compile(r"(?:AWS|AZURE|AZURITE|GOOGLE)_.*(?:ACCOUNT_NAME|ENDPOINT|URL)")
_SETTINGS = ("account_name", "endpoint", "base_url")


def is_uri(text: object) -> bool:
    """Return whether a text begins with the scheme of an object store: ``s3://``, ``gs://``, ``az://``, ``https://``.

    A path object is always a file.
    """
    return isinstance(text, str) and bool(_SCHEME.match(text))


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


def describe_store(store: Any) -> str:
    """Return what tells stores apart that have objects of one URI: account, endpoint and prefix, no credentials.

    Args:
        store: A store of obstore's; None for the stores that the environment describes.
    """
    if store is None:
        return "\n".join(sorted(f"{name}={value}" for name, value in os.environ.items() if _VARIABLE.match(name)))
    settings = getattr(store, "config", {})
    found = [getattr(store, "url", None), getattr(store, "prefix", None), *map(settings.get, _SETTINGS)]
    # obstore adds to a store what the environment says, and does not tell what.
    return f"{describe_store(None)}\n{type(store).__name__}{found}"
