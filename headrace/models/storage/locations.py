# SPDX-License-Identifier: Apache-2.0
"""Where something lies, from the text a person wrote: one class for each way to reach it.

Called by `bringing`, by `media`, and by whoever takes a model's path. Reads text only: it looks at no disk and no network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from headrace.core.errors import InvalidArgument

Cloud = Literal["aws", "azure", "gcp", "seaweedfs"]
"""The kinds of object stores, as a workspace calls them."""

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
_HUB_SCHEMES = (HUB_SCHEME, "hf")

_SHORT: dict[str, str] = {"aws": "s3", "gcp": "gs", "azure": "az"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A file or folder of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """An object, or all objects below a prefix, in a bucket (Azure: a container)."""

    cloud: Cloud
    bucket: str
    key: str
    """Without a slash in front or at the end; "" for the whole bucket."""

    def __str__(self) -> str:
        return f"{_SHORT.get(self.cloud, self.cloud)}://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A model of the Hugging Face Hub, or of what `HF_ENDPOINT` names."""

    repository: str
    revision: str = ""
    """A branch, tag or commit; "" for the main branch as it is today."""

    def __str__(self) -> str:
        return f"{HUB_SCHEME}://{self.repository}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class WebPlace:
    """A file behind a URL. Its query may be a signature, so it is not shown."""

    url: str = field(repr=False)

    def __str__(self) -> str:
        return public_text(self.url)


Place = LocalPlace | ObjectPlace | HubPlace | WebPlace


def scheme_of(text: str) -> str:
    """The scheme of a URL in lower case; "" for a plain path."""
    found = _SCHEME.match(text)
    return found[1].lower() if found else ""


def parse_location(text: str) -> Place:
    """The place that a text names. Raises InvalidArgument for a scheme we do not know or a name that cannot be."""
    if not text or "\0" in text:
        raise InvalidArgument("a location is empty or holds a NUL: give a path or a URL")
    scheme = scheme_of(text)
    if not scheme:
        return LocalPlace(Path(text))
    if scheme == "file":
        return _file(text)
    if scheme in CLOUD_SCHEMES:
        return _object(CLOUD_SCHEMES[scheme], text)
    if scheme in _HUB_SCHEMES:
        return _hub(text)
    if scheme in WEB_SCHEMES:
        return WebPlace(text)
    known = ", ".join(f"{name}://" for name in ("file", *CLOUD_SCHEMES, *_HUB_SCHEMES, *WEB_SCHEMES))
    raise InvalidArgument(f"{scheme}:// is not a scheme this server knows; it takes a path or one of {known}")


def public_text(url: str) -> str:
    """A URL for an error or a log: without user, query and fragment, and not too long."""
    shown = re.split(r"[?#]", url, maxsplit=1)[0]
    head, slashes, rest = shown.partition("://")
    host, slash, path = rest.partition("/")
    shown = head + slashes + host.rpartition("@")[2] + slash + path
    shown = "".join(char if char.isprintable() else "?" for char in shown)
    return shown if len(shown) <= 200 else shown[:197] + "..."


def _file(text: str) -> LocalPlace:
    try:
        parts = urlsplit(text)
    except ValueError:  # brackets that are no address, or characters that Unicode takes for others
        raise InvalidArgument(f"{public_text(text)} is not a URL that can be read; write file:///path") from None
    if parts.netloc not in {"", "localhost"}:
        raise InvalidArgument(f"file://{parts.netloc}/... names another machine; write file:///path")
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise InvalidArgument("a file:// URL needs an absolute path: file:///path")
    return LocalPlace(Path(path))


def _object(cloud: Cloud, text: str) -> ObjectPlace:
    # By hand: `?` and `#` are ordinary characters in keys.
    bucket, _, key = text.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidArgument(f"{public_text(text)} has no bucket that can be: write s3://bucket/key")
    key = key.strip("/")
    parts = key.split("/") if key else []
    if any(part in {"", ".", ".."} for part in parts) or any(ord(char) < 32 for char in key):
        raise InvalidArgument(f"the key of {public_text(text)} has an empty part, `.`, `..` or a control character")
    return ObjectPlace(cloud, bucket, key)


def _hub(text: str) -> HubPlace:
    repository, at, revision = text.partition("://")[2].rstrip("/").partition("@")
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise InvalidArgument(f"{public_text(text)} is not {HUB_SCHEME}://organisation/name or ...name@revision")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise InvalidArgument(f"the revision after @ in {public_text(text)} is not a branch, tag or commit")
    return HubPlace(repository, revision)
