"""An object store on the loopback: what S3, Azure, Google and plain HTTP need to list and read objects, and faults.

It answers signed requests without a look at the signature.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from email.utils import formatdate
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000
"""Objects in one page of a list."""
MODIFIED = "Tue, 21 Oct 2025 07:28:00 GMT"


class ObjectServer:
    """Serves objects from a thread, until the end of a ``with`` block.

    Args:
        objects: The content of each object by its path, ``bucket/key``. It may change while the server runs.
        latency: Seconds before each answer.

    Attributes:
        requests: The number of requests of each kind, such as ``GET bucket/key``.
        faults: What is wrong with an object, by its path: a status such as 403; ``"hang"``: no answer; or ``"cut"``:
            the connection ends in the middle of the content. A pair of that and a number says for how many requests.
        has_weak_tags: Whether its ETags are weak, so that ``If-Match`` holds for none.
        open_requests: The requests that wait for their answer.
    """

    def __init__(self, objects: Mapping[str, bytes], latency: float = 0.0) -> None:
        self.objects, self.latency = dict(objects), latency
        self.requests: Counter[str] = Counter()
        self.faults: dict[str, Any] = {}
        self.has_weak_tags = False
        self.open_requests = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ObjectServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def total(self) -> int:
        return sum(self.requests.values())

    def environment(self, scheme: str = "s3") -> dict[str, str]:
        """Return the variables with which clients of a scheme use this server."""
        if scheme == "az":
            return {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": self.url}
        if scheme == "gs":
            return {"GOOGLE_BASE_URL": self.url, "GOOGLE_SKIP_SIGNATURE": "true"}
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port: int = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        await asyncio.sleep(0.01)  # a connection that was accepted just now begins
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        closed = (writer.wait_closed() for writer in self._writers)
        await asyncio.wait_for(asyncio.gather(*closed, return_exceptions=True), 5)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while await self._answer(await reader.readuntil(b"\r\n\r\n"), reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
        url = urlsplit(target)
        path = unquote(url.path).lstrip("/")
        if "x-ms-version" in headers:  # Azure's paths begin with the account
            path = path.partition("/")[2]
        self.requests[f"{method} {path}"] += 1
        self.open_requests += 1
        try:
            fault = self._take_fault(path)
            if (self.latency or fault == "hang") and await self._hangs_up(reader, fault):
                return False
            status, content, extra = self._find(method, path, parse_qs(url.query), headers, fault)
        finally:
            self.open_requests -= 1
        length = extra.pop("Content-Length", len(content))
        extra = {"Content-Length": length, "Date": formatdate(usegmt=True), **extra}
        text = "".join(f"{key}: {value}\r\n" for key, value in extra.items())
        body = b"" if method == "HEAD" else content
        if fault == "cut":
            body = body[: len(body) // 2]
        writer.write(f"HTTP/1.1 {status} -\r\n{text}\r\n".encode() + body)
        await writer.drain()
        return fault != "cut"

    async def _hangs_up(self, reader: asyncio.StreamReader, fault: Any) -> bool:
        """Wait as long as an answer takes. Return whether the client ends the connection meanwhile."""
        end = asyncio.ensure_future(reader.read(1))
        done, _ = await asyncio.wait({end}, timeout=None if fault == "hang" else self.latency)
        end.cancel()
        await asyncio.gather(end, return_exceptions=True)  # a stream has one reader
        return bool(done)

    def _take_fault(self, path: str) -> Any:
        fault = self.faults.get(path)
        if not isinstance(fault, tuple):
            return fault
        kind, count = fault
        self.faults[path] = (kind, count - 1) if count > 1 else None
        return kind

    def _find(
        self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], fault: Any
    ) -> tuple[int, bytes, dict[str, Any]]:
        if isinstance(fault, int):
            return fault, b"<Error><Code>Fault</Code><Message>as asked</Message></Error>", {}
        if "list-type" in query or query.get("comp") == ["list"]:
            return 200, self._list(path.strip("/"), query), {"Content-Type": "application/xml"}
        data = self.objects.get(path)
        if data is None:
            return 404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>", {}
        tag = f"W/{_tag(data)}" if self.has_weak_tags else _tag(data)
        known = {
            "ETag": tag,
            "Last-Modified": MODIFIED,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if "if-match" in headers and (self.has_weak_tags or headers["if-match"] != tag):
            return 412, b"", known
        if method == "HEAD":
            return 200, b"", {**known, "Content-Length": len(data)}
        if wanted := headers.get("range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
            if start >= len(data):
                return 416, b"", {}
            return 206, data[start:stop], {**known, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return 200, data, known

    def _list(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        after = next((query[name][0] for name in ("continuation-token", "start-after", "marker") if name in query), "")
        keys = sorted(path.partition("/")[2] for path in self.objects if path.partition("/")[0] == bucket)
        keys = [key for key in keys if key.startswith(prefix) and key > after]
        page = keys[:PAGE]
        if "comp" in query:
            return self._write_azure_list(bucket, page, page[-1] if len(keys) > PAGE else "")
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2025-10-21T07:28:00.000Z</LastModified>"
            f"<ETag>{escape(_tag(self.objects[f'{bucket}/{key}']))}</ETag>"
            f"<Size>{len(self.objects[f'{bucket}/{key}'])}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key in page
        )
        more = len(keys) > PAGE
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}</ListBucketResult>"
        ).encode()

    def _write_azure_list(self, container: str, page: list[str], marker: str) -> bytes:
        items = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified>"
            f"<Etag>{_tag(self.objects[f'{container}/{key}'])}</Etag><Content-Type>application/octet-stream</Content-Type>"
            f"<Content-Length>{len(self.objects[f'{container}/{key}'])}</Content-Length></Properties></Blob>"
            for key in page
        )
        return (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{container}">'
            f"<Blobs>{items}</Blobs><NextMarker>{escape(marker)}</NextMarker></EnumerationResults>"
        ).encode()


@cache
def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


if __name__ == "__main__":  # object_server.py FOLDER LATENCY: serves the files of a folder as bucket/NAME
    folder = Path(sys.argv[1])
    files = {f"bucket/{file.relative_to(folder)}": file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with ObjectServer(files, float(sys.argv[2])) as server:
        print(server.url, flush=True)
        sys.stdin.read()
