# SPDX-License-Identifier: Apache-2.0
"""A picture or video as a URL that a service can read: files of this machine become data: URIs. Called by `chat_bodies`."""

from __future__ import annotations

import base64
import os
import re
import stat
from typing import Literal
from urllib.parse import unquote, urlsplit

from headrace.core.errors import InvalidArgument, NotFound, TooLarge
from headrace.platforms.catalogue import Architecture

Kind = Literal["image", "video"]
MOST_FILE = 512 * 1024 * 1024
"""Bytes: what services take."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")
_DATA = re.compile(r"data:([^;,]{0,100})(;[^,]{0,100})?,", re.IGNORECASE)


def media_url(place: str, kind: Kind, arch: Architecture, most_bytes: int = MOST_FILE) -> str:
    """The URL as it is, or the file as a data: URI.

    Raises InvalidArgument for what the architecture does not take, NotFound and TooLarge for files.
    """
    if place[:5].lower() == "data:":
        return _checked_data(place, kind, arch, most_bytes)
    scheme = _SCHEME.match(place)
    if scheme is None:
        return _file_url(place, kind, arch, most_bytes)
    name = scheme[1].lower()
    if name in ("http", "https"):
        return place
    if name == "file":
        try:
            path = unquote(urlsplit(place).path)
        except ValueError:
            raise InvalidArgument(
                "a file:// URL cannot be read: write it like file:///path, or give the path"
            ) from None
        return _file_url(path, kind, arch, most_bytes)
    raise InvalidArgument(
        f"{name}:// URLs are not read by services: give an http(s) URL, or the path of a file of this machine"
    )


def _checked_data(url: str, kind: Kind, arch: Architecture, most_bytes: int) -> str:
    head = _DATA.match(url)
    if head is None or not (head[2] or "").lower().endswith(";base64"):
        raise InvalidArgument("a data: URI must read data:<MIME type>;base64,<content>")
    mime = head[1].lower()
    if mime not in arch.media.mimes or not mime.startswith(kind):
        taken = ", ".join(sorted(each for each in arch.media.mimes if each.startswith(kind)))
        raise InvalidArgument(f"{arch.name} takes no {kind} of the type {mime[:60]!a}; it takes {taken or 'none'}")
    # Before anything decodes it: four characters are three bytes.
    if (len(url) - head.end()) // 4 * 3 - 2 > most_bytes:
        raise TooLarge(f"a data: URI has more than {most_bytes} bytes, which services do not take")
    return url


def _file_url(path: str, kind: Kind, arch: Architecture, most_bytes: int) -> str:
    known = arch.media.images if kind == "image" else arch.media.videos
    extension = os.path.splitext(path)[1].lower().lstrip(".")
    mime = known.get(extension)
    if mime is None:
        raise InvalidArgument(
            f"{arch.name} takes no {kind} with the extension {extension[:16]!a} ({path[:200]!a}); "
            f"it takes {', '.join(known) or 'none'}"
        )
    return f"data:{mime};base64,{base64.b64encode(_content(path, most_bytes)).decode()}"


def _content(path: str, most_bytes: int) -> bytes:
    try:
        # Not to wait for whoever writes into a pipe.
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise NotFound(f"{path[:200]!a} cannot be read: {reason}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"{path[:200]!a} is not a file")
        if found.st_size == 0:
            raise InvalidArgument(f"{path[:200]!a} is empty")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1) if found.st_size <= most_bytes else b""
    finally:
        os.close(descriptor)
    if not content or len(content) > most_bytes:
        raise TooLarge(f"{path[:200]!a} has more than {most_bytes} bytes, which services do not take: make it smaller")
    return content
