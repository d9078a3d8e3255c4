# SPDX-License-Identifier: Apache-2.0
"""The headers of one object, which obstore does not show: checksums and how it is encrypted. Asked by `objects`.

The request goes where obstore's own go, with the same keys. Whoever cannot be asked, for whatever reason, has said nothing:
a checksum is a further check, and its absence no error.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import logging
import os
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit

from headrace.models.storage.credentials import BucketKeys
from headrace.models.storage.locations import ObjectPlace

log = logging.getLogger("headrace.storage")

_SECONDS = 10.0
_EMPTY = hashlib.sha256(b"").hexdigest()
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def headers_of(store: Any, place: ObjectPlace, keys: BucketKeys | None, key: str) -> Mapping[str, str] | None:
    """The headers of the object, names in lower case; None if they cannot be had."""
    try:
        if place.cloud == "azure":
            return _azure(store, key)
        if place.cloud == "gcp":
            return None  # signing may mean to ask yet another service
        return _amazon(place, keys or _of_environment(place), key)
    except Exception as error:  # obstore's, of which there are many, and those of the network
        log.info("%s: no checksum could be asked for: %s", place, type(error).__name__)
        return None


def _azure(store: Any, key: str) -> Mapping[str, str] | None:
    import obstore

    # For GET, which allows to read; for HEAD obstore would sign for no permission at all.
    return _head(obstore.sign(store, "GET", key, timedelta(minutes=5)), {})


def _amazon(place: ObjectPlace, keys: BucketKeys, key: str) -> Mapping[str, str] | None:
    region = keys.region or "us-east-1"
    endpoint = keys.endpoint_url or f"https://s3.{region}.amazonaws.com"
    url = f"{endpoint}{quote(f'/{place.bucket}/{key}', safe='/-_.~')}"
    headers = {"x-amz-checksum-mode": "ENABLED"}
    if keys.access_key:
        token = "" if keys.bucket else os.environ.get("AWS_SESSION_TOKEN", "")
        headers |= {"x-amz-security-token": token} if token else {}
        headers = _signed(url, headers, region, keys)
    return _head(url, headers)


def _of_environment(place: ObjectPlace) -> BucketKeys:
    """What obstore finds there too; keys of a machine's own role are left to it, and those objects unsigned for."""
    said = os.environ
    return BucketKeys(
        place.cloud,
        "",
        said.get("AWS_REGION") or said.get("AWS_DEFAULT_REGION") or "",
        said.get("AWS_ACCESS_KEY_ID", ""),
        said.get("AWS_SECRET_ACCESS_KEY", ""),
        endpoint_url=next((said[name] for name in _ENDPOINTS if said.get(name)), "").rstrip("/"),
    )


def _signed(url: str, headers: Mapping[str, str], region: str, keys: BucketKeys) -> dict[str, str]:
    """AWS Signature Version 4 of a HEAD without a body."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    parts = urlsplit(url)
    all_of_them = {**headers, "host": parts.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp}
    names = sorted(all_of_them)
    lines = "".join(f"{name}:{all_of_them[name]}\n" for name in names)
    request = "\n".join(("HEAD", parts.path, "", lines, ";".join(names), _EMPTY))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    secret = f"AWS4{keys.secret_key}".encode()
    for word in (stamp[:8], region, "s3", "aws4_request"):
        secret = hmac.new(secret, word.encode(), hashlib.sha256).digest()
    signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
    said = f"Credential={keys.access_key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    return {**all_of_them, "authorization": f"AWS4-HMAC-SHA256 {said}"}


def _head(url: str, headers: Mapping[str, str]) -> Mapping[str, str] | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            host, parts.port, timeout=_SECONDS, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=_SECONDS)
    try:
        connection.request("HEAD", parts.path + (f"?{parts.query}" if parts.query else ""), headers=dict(headers))
        answer = connection.getresponse()
        return {name.lower(): value for name, value in answer.getheaders()} if answer.status == 200 else None
    finally:
        connection.close()
