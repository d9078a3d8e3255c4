# SPDX-License-Identifier: Apache-2.0
"""Parse the location of a model or file: a path, a URL, an object store, the Hugging Face Hub."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from headrace.core.errors import InvalidArgument

MAX_URL_CHARACTERS = 8192
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# Labels that a resolver may parse as a number, and so as an address: 2130706433, 0x7f.1, 0177.0.0.1.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SAFE_CHARACTERS = "!#$%&'()*+,/:;=?@[]~"


@dataclass(frozen=True, slots=True)
class WebUrl:
    """A parsed URL. Checks and downloads use the same parsed form."""

    scheme: str
    host: str
    """In lower case; an IPv6 address without brackets."""
    port: int
    target: str
    """Path and query, as sent."""

    @property
    def authority(self) -> str:
        """Host, and port if it is not the default: as in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default_port = 443 if self.scheme == "https" else 80
        return host if self.port == default_port else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        """The whole URL with secrets, to resolve redirects; never shown."""
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_web_url(text: str) -> WebUrl:
    """Parse a URL. Raises InvalidArgument with a hint."""
    if len(text) > MAX_URL_CHARACTERS:
        raise InvalidArgument(f"a URL of {len(text)} characters is too long; {MAX_URL_CHARACTERS} are the most")
    shown = public_text(text)
    if "\\" in text or any(ord(char) < 0x20 or ord(char) == 0x7F for char in text):
        raise InvalidArgument(f"{shown} has a backslash or a control character; write it percent-encoded")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise InvalidArgument(f"{shown} is not a URL: its host or port cannot be read") from None
    if parts.scheme not in WEB_SCHEMES:
        raise InvalidArgument(f"{shown} is not an http:// or https:// URL")
    if "@" in parts.netloc:
        raise InvalidArgument(f"{shown} has a user or password before the host; URLs with them are not fetched")
    if port == 0:
        raise InvalidArgument(f"{shown} has port 0, on which nothing answers")
    # A `%` (an IPv6 zone) or anything else that is not part of a host is also refused.
    host = host.removesuffix(".")
    if not _is_host(host):
        raise InvalidArgument(f"the host of {shown} is not a name or an address (names beyond ASCII: as xn--...)")
    path = quote(parts.path or "/", safe=_SAFE_CHARACTERS)
    query = f"?{quote(parts.query, safe=_SAFE_CHARACTERS)}" if parts.query else ""
    return WebUrl(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path + query)


def _is_host(host: str) -> bool:
    if ":" in host:
        try:
            return ipaddress.IPv6Address(host).scope_id is None
        except ValueError:
            return False
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
        return True
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


Cloud = Literal["aws", "azure", "gcp", "seaweedfs"]
"""Types of object stores, as in a workspace."""

CLOUD_SCHEMES: dict[str, Cloud] = {
    "s3": "aws",
    "aws": "aws",
    "gs": "gcp",
    "az": "azure",
    "azure": "azure",
    "seaweedfs": "seaweedfs",
}
WEB_SCHEMES = ("http", "https")
HUB_SCHEME = "hf_model"
HUB_SCHEMES = (HUB_SCHEME, "hf")

_SHORT_SCHEMES: dict[str, str] = {"aws": "s3", "gcp": "gs", "azure": "az"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")


@dataclass(frozen=True, slots=True)
class LocalLocation:
    """A file or folder of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """An object, or all objects below a prefix, in a bucket (Azure: a container)."""

    cloud: Cloud
    bucket: str
    key: str
    """Without leading and trailing slashes; "" for the whole bucket."""

    def __str__(self) -> str:
        return f"{_SHORT_SCHEMES.get(self.cloud, self.cloud)}://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class HubLocation:
    """A model of the Hugging Face Hub, or of `HF_ENDPOINT`."""

    repository: str
    revision: str = ""
    """A branch, tag or commit; "" for the current main branch."""

    def __str__(self) -> str:
        return f"{HUB_SCHEME}://{self.repository}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class WebLocation:
    """A file behind a URL. Its query may be a signature, so it is not shown."""

    url: str = field(repr=False)

    def __str__(self) -> str:
        return public_text(self.url)


Location = LocalLocation | ObjectLocation | HubLocation | WebLocation


def is_hub_name(text: str) -> bool:
    """Return whether a text without a scheme can name a model of the Hugging Face Hub: organisation/name."""
    return _HUB_NAME.fullmatch(text) is not None


def scheme_of(text: str) -> str:
    """Return the scheme of a URL in lower case; "" for a plain path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def parse_location(text: str) -> Location:
    """Parse a location. Raises InvalidArgument for an unknown scheme or an invalid name."""
    if not text or "\0" in text:
        raise InvalidArgument("a location is empty or holds a NUL: give a path or a URL")
    scheme = scheme_of(text)
    if not scheme:
        return LocalLocation(Path(text))
    if scheme == "file":
        return _file(text)
    if scheme in CLOUD_SCHEMES:
        return _object(CLOUD_SCHEMES[scheme], text)
    if scheme in HUB_SCHEMES:
        return _hub(text)
    if scheme in WEB_SCHEMES:
        return WebLocation(text)
    known = ", ".join(f"{name}://" for name in ("file", *CLOUD_SCHEMES, *HUB_SCHEMES, *WEB_SCHEMES))
    raise InvalidArgument(f"{scheme}:// is not a scheme this server knows; it takes a path or one of {known}")


def public_text(url: str) -> str:
    """Shorten a URL for errors and logs: without user, query and fragment."""
    shown = re.split(r"[?#]", url, maxsplit=1)[0]
    head, slashes, rest = shown.partition("://")
    host, slash, path = rest.partition("/")
    shown = head + slashes + host.rpartition("@")[2] + slash + path
    shown = "".join(char if char.isprintable() else "?" for char in shown)
    return shown if len(shown) <= 200 else shown[:197] + "..."


def _file(text: str) -> LocalLocation:
    try:
        parts = urlsplit(text)
    except ValueError:  # Brackets without an address, or characters that Unicode normalises.
        raise InvalidArgument(f"{public_text(text)} is not a URL that can be read; write file:///path") from None
    if parts.netloc not in {"", "localhost"}:
        raise InvalidArgument(f"file://{parts.netloc}/... names another machine; write file:///path")
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise InvalidArgument("a file:// URL needs an absolute path: file:///path")
    return LocalLocation(Path(path))


def _object(cloud: Cloud, text: str) -> ObjectLocation:
    # Not `urlsplit`: `?` and `#` are ordinary characters in keys.
    bucket, _, key = text.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(f"{public_text(text)} has no bucket that can be: write s3://bucket/key")
    key = key.strip("/")
    parts = key.split("/") if key else []
    if any(part in {"", ".", ".."} for part in parts) or any(ord(char) < 32 for char in key):
        raise InvalidArgument(f"the key of {public_text(text)} has an empty part, `.`, `..` or a control character")
    return ObjectLocation(cloud, bucket, key)


def _hub(text: str) -> HubLocation:
    repository, at, revision = text.partition("://")[2].rstrip("/").partition("@")
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise InvalidArgument(f"{public_text(text)} is not {HUB_SCHEME}://organisation/name or ...name@revision")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InvalidArgument(f"the revision after @ in {public_text(text)} is not a branch, tag or commit")
    return HubLocation(repository, revision)
