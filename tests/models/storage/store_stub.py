# SPDX-License-Identifier: Apache-2.0
"""A small object store on loopback that speaks S3's listing and downloads (and Google's, which are the same XML).

A stand-in: it checks every signature as S3 does, and misbehaves when told. `test_real_stores.py` has real programs.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from web_stub import Handler, WebStub, reply

ACCESS, SECRET = "AKTEST", "s3cr3t-of-the-test"


class StoreStub(WebStub):
    """Buckets of keys of bytes. `signed=False` for requests that carry no AWS signature (Google)."""

    def __init__(self, buckets: dict[str, dict[str, bytes]], signed: bool = True) -> None:
        super().__init__(default=self._answer)
        self.buckets = buckets
        self.signed = signed
        self.cut_off: set[str] = set()
        """Keys of which only half is sent."""
        self.etags: dict[str, str] = {}
        """ETags that are not the MD5 of the content."""
        self.headers: dict[str, dict[str, str]] = {}
        """More headers of a key's answers."""
        self.before: Callable[[str], None] = lambda key: None
        """Called with the key before an object is sent."""
        self.down = False
        """Every request fails."""

    def metadata(self, bucket: str) -> dict[str, dict[str, dict[str, str]]]:
        """A job's cloud_metadata for this store."""
        details = {
            "cloud_region": "us-west-1",
            "access_key": ACCESS,
            "secret_key": SECRET,
            "endpoint_url": self.url(""),
        }
        return {"aws": {bucket: details}}

    def _answer(self, handler: Handler) -> None:
        if self.signed and not _is_signed(handler):
            reply(handler, b"<Error><Code>SignatureDoesNotMatch</Code></Error>", status=403)
            return
        if self.down:
            reply(handler, b"<Error><Code>Forbidden</Code></Error>", status=403)
            return
        parts = urlsplit(handler.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        objects = self.buckets.get(bucket)
        if objects is None:
            reply(handler, b"<Error><Code>NoSuchBucket</Code></Error>", status=404)
        elif not key:
            reply(handler, _listing(objects, dict(parse_qsl(parts.query)), self.etags), content_type="application/xml")
        elif key not in objects:
            reply(handler, b"<Error><Code>NoSuchKey</Code></Error>", status=404)
        else:
            self._send(handler, key, objects[key])

    def _send(self, handler: Handler, key: str, body: bytes) -> None:
        etag = self.etags.get(key) or _etag(body)
        if handler.command == "GET":
            self.before(key)
        if handler.headers.get("If-Match", etag) != etag:
            reply(handler, b"<Error><Code>PreconditionFailed</Code></Error>", status=412)
            return
        more = {**self.headers.get(key, {}), "etag": etag, "last_modified": "Sun, 15 Nov 2026 00:00:00 GMT"}
        status, total = 200, len(body)
        if wanted := handler.headers.get("Range"):
            start, end = map(int, wanted.removeprefix("bytes=").split("-"))
            status, body = 206, body[start : end + 1]
            more["content_range"] = f"bytes {start}-{start + len(body) - 1}/{total}"
        sent = body[: len(body) // 2] if key in self.cut_off else body
        reply(handler, sent, status=status, content_length=str(len(body)), **more)


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _listing(objects: dict[str, bytes], query: dict[str, str], etags: dict[str, str]) -> bytes:
    """Two objects a page, so that there are pages."""
    keys = sorted(key for key in objects if key.startswith(query.get("prefix", "")))
    start = int(query.get("continuation-token", "0"))
    page, more = keys[start : start + 2], start + 2 < len(keys)
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[key])}</Size>"
        f"<ETag>{escape(etags.get(key) or _etag(objects[key]))}</ETag>"
        "<LastModified>2026-11-15T00:00:00.000Z</LastModified></Contents>"
        for key in page
    )
    token = f"<NextContinuationToken>{start + 2}</NextContinuationToken>" if more else ""
    return (
        f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{entries}{token}</ListBucketResult>"
    ).encode()


def _is_signed(handler: Handler) -> bool:
    """AWS Signature Version 4, as far as reading goes."""
    method, _, rest = handler.headers.get("Authorization", "").partition(" ")
    if method != "AWS4-HMAC-SHA256":
        return False
    outputs = dict(part.strip().split("=", 1) for part in rest.split(","))
    access, date, region, service, end = outputs["Credential"].split("/")
    parts = urlsplit(handler.path)
    query = "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in sorted(parse_qsl(parts.query, keep_blank_values=True))
    )
    names = outputs["SignedHeaders"].split(";")
    headers = "".join(f"{name}:{handler.headers[name].strip()}\n" for name in names)
    request = "\n".join(
        (handler.command, parts.path, query, headers, ";".join(names), handler.headers["x-amz-content-sha256"])
    )
    scope = f"{date}/{region}/{service}/{end}"
    stamp = handler.headers["x-amz-date"]
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{SECRET}".encode()
    for word in (date, region, service, end):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    right = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return access == ACCESS and region == "us-west-1" and hmac.compare_digest(right, outputs["Signature"])
