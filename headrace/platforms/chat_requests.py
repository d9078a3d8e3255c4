# SPDX-License-Identifier: Apache-2.0
"""Build and check a chat request: messages from a prompt and files, sampling fields, and whether it fits the service.

A user's values are sent unchanged: nothing is clamped or invented. Local files are read here and become data: URIs, since a
remote service cannot read them. Nothing is sent from here.
"""

from __future__ import annotations

import base64
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from headrace.core.errors import InvalidArgument, NotFound, TooLarge
from headrace.platforms.catalogue import Architecture, Field
from headrace.platforms.payloads import SECRETS

_MIN_SECRET = 8
_ITEMS: Mapping[str, Kind] = {"image_url": "image", "video_url": "video"}
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
Value = int | float | str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be sent."""

    body: dict[str, Any]
    remarks: tuple[str, ...] = ()
    """Notes for the user: fields that were removed, messages that the service ignores."""


def prepare(
    body: Mapping[str, Any], arch: Architecture, sampling: Mapping[str, Value | None] | None = None
) -> Prepared:
    """Return the request with every sampling field: from `sampling`, else from the body, else the default.

    A field that is missing or None in `sampling` was skipped. Fields that the architecture does not support are removed;
    local files become data: URIs. Raises InvalidArgument for a request that no service could answer.
    """
    remarks = _check_messages(body)
    request = {name: value for name, value in body.items() if name not in arch.unsupported}
    remarks += [f"{name} is left out: {arch.name} does not support it" for name in body if name in arch.unsupported]
    values = sampling or {}
    for name, value in values.items():
        if name in arch.unsupported and value is not None:
            remarks.append(f"{name} is left out: {arch.name} does not support it")
        elif value is not None:
            aliases = next((field.also for field in arch.fields if field.name == name), ())
            request = {**{key: kept for key, kept in request.items() if key not in aliases}, name: value}
    for field in arch.fields:
        if not _has(request, field) and field.default is not None:
            request[field.name] = field.default
    request["messages"] = [_with_files(message, arch) for message in body["messages"]]
    return Prepared(request, tuple(remarks))


def mismatches(body: Mapping[str, Any], arch: Architecture, catalogue: Mapping[str, Architecture]) -> list[str]:
    """Return why the request seems to be for another architecture; empty if it fits."""
    known_fields = arch.marks | {name for field in arch.fields for name in (field.name, *field.also)}
    reasons: list[str] = []
    for other in catalogue.values():
        fields = sorted(name for name in body if name in other.marks - known_fields)
        if other.name != arch.name and fields:
            reasons.append(f"{', '.join(fields)}: fields of {other.name}, and this service runs {arch.name}")
    if arch.media.required and not _has_media(body):
        reasons.append(f"{arch.name} answers only requests with an image or a video, and there is none in this one")
    return reasons


def fields_to_ask(body: Mapping[str, Any], arch: Architecture) -> tuple[Field, ...]:
    """Return the sampling fields that the request does not have."""
    return tuple(field for field in arch.fields if not _has(body, field))


def field_type(field: Field) -> str:
    """Return a field's type and range as text."""
    kind = {"int": "whole number", "float": "number", "str": "text"}[field.type]
    if field.least is not None and field.most is not None:
        return f"{kind} from {field.least:g} to {field.most:g}"
    if field.least is not None:
        return f"{kind}, at least {field.least:g}"
    return f"{kind}, at most {field.most:g}" if field.most is not None else kind


def parse_value(field: Field, text: str) -> Value:
    """Parse a typed value. Raises InvalidArgument if it has the wrong type, or is out of range."""
    if field.type == "str":
        return text
    trimmed = text.strip()
    try:
        value: int | float = int(trimmed) if _INTEGER.fullmatch(trimmed) else float(trimmed)
    except ValueError:
        value = math.nan
    wrong = not math.isfinite(value) or "_" in trimmed or (field.type == "int" and isinstance(value, float))
    below = field.least is not None and value < field.least
    if wrong or below or (field.most is not None and value > field.most):
        raise InvalidArgument(f"{field.name} is a {field_type(field)}: {text[:40]!a} is not")
    return value


def build_messages(
    prompt: str, arch: Architecture, *, system: str = "", images: Iterable[str] = (), videos: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return an optional system message, and a user message with its media: URLs, data: URIs, local files."""
    items: list[dict[str, Any]] = [_item("image", media_url(location, "image", arch)) for location in images]
    items += [_item("video", media_url(location, "video", arch)) for location in videos]
    content: Any = [*items, {"type": "text", "text": prompt}] if items else prompt
    requested = [{"role": "system", "content": system}] if system else []
    return [*requested, {"role": "user", "content": content}]


def check_no_secret(body: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise InvalidArgument if the request contains the value of a secret variable. Call it before media are added."""
    texts = list(_texts(body))
    for name in SECRETS:
        value = environ.get(name, "")
        if len(value) >= _MIN_SECRET and any(value in text for text in texts):
            raise InvalidArgument(
                f"the request contains the value of {name}: remove it, since services may store requests"
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _has(body: Mapping[str, Any], field: Field) -> bool:
    return any(name in body for name in (field.name, *field.also))


def _check_messages(body: Mapping[str, Any]) -> list[str]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidArgument(
            'the request has no list of messages: write {"messages": [{"role": "user", "content": "..."}]}, or give a prompt'
        )
    roles = [message.get("role") for message in messages]
    if "user" not in roles:
        raise InvalidArgument("the request has no message of the role user: a service answers the first one")
    remarks: list[str] = []
    if roles.count("user") > 1:
        remarks.append("only the first message of the role user is answered; the others are not read")
    if others := sorted({str(role)[:32] for role in roles if role not in ("user", "system")}):
        remarks.append(f"messages of the role {', '.join(others)} are not read")
    return remarks


def _has_media(body: Mapping[str, Any]) -> bool:
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and message.get("role") == "user":
            # Services read the first user message only.
            return any(_kind(item) is not None for item in _items(message))
    return False


def _with_files(message: Mapping[str, Any], arch: Architecture) -> dict[str, Any]:
    if not isinstance(message.get("content"), list):
        return dict(message)
    return {**message, "content": [_with_file(item, arch) for item in message["content"]]}


def _with_file(item: Any, arch: Architecture) -> Any:
    kind = _kind(item)
    if kind is None:
        return item
    name = f"{kind}_url"
    source = item.get(name)
    url = source.get("url") if isinstance(source, dict) else source
    if not isinstance(url, str) or not url:
        raise InvalidArgument(
            f'an item of the type {name} has no URL: write {{"type": "{name}", "{name}": {{"url": "..."}}}}'
        )
    more = source if isinstance(source, dict) else {}
    return {**item, name: {**more, "url": media_url(url, kind, arch)}}


def _items(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _kind(item: Any) -> Kind | None:
    return _ITEMS.get(str(item.get("type"))) if isinstance(item, dict) else None


def _item(kind: Literal["image", "video"], url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


Kind = Literal["image", "video"]
MAX_FILE = 512 * 1024 * 1024
"""Maximum bytes of a file that services accept."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")
_DATA = re.compile(r"data:([^;,]{0,100})(;[^,]{0,100})?,", re.IGNORECASE)


def media_url(source: str, kind: Kind, arch: Architecture, max_bytes: int = MAX_FILE) -> str:
    """Return a URL unchanged, or a file as a data: URI.

    Raises InvalidArgument for media that the architecture does not support, NotFound and TooLarge for files.
    """
    if source[:5].lower() == "data:":
        return _checked_data(source, kind, arch, max_bytes)
    scheme = _SCHEME.match(source)
    if scheme is None:
        return _file_url(source, kind, arch, max_bytes)
    name = scheme[1].lower()
    if name in ("http", "https"):
        return source
    if name == "file":
        try:
            path = unquote(urlsplit(source).path)
        except ValueError:
            raise InvalidArgument(
                "a file:// URL cannot be read: write it like file:///path, or give the path"
            ) from None
        return _file_url(path, kind, arch, max_bytes)
    raise InvalidArgument(
        f"{name}:// URLs are not supported by services: give an http(s) URL, or the path of a local file"
    )


def _checked_data(url: str, kind: Kind, arch: Architecture, max_bytes: int) -> str:
    head = _DATA.match(url)
    if head is None or not (head[2] or "").lower().endswith(";base64"):
        raise InvalidArgument("a data: URI must read data:<MIME type>;base64,<content>")
    mime = head[1].lower()
    if mime not in arch.media.mimes or not mime.startswith(kind):
        types = ", ".join(sorted(supported for supported in arch.media.mimes if supported.startswith(kind)))
        raise InvalidArgument(f"{arch.name} takes no {kind} of the type {mime[:60]!a}; it takes {types or 'none'}")
    # Checked before it is decoded: four characters are three bytes.
    if (len(url) - head.end()) // 4 * 3 - 2 > max_bytes:
        raise TooLarge(f"a data: URI has more than {max_bytes} bytes, which services do not accept")
    return url


def _file_url(path: str, kind: Kind, arch: Architecture, max_bytes: int) -> str:
    known = arch.media.images if kind == "image" else arch.media.videos
    extension = os.path.splitext(path)[1].lower().lstrip(".")
    mime = known.get(extension)
    if mime is None:
        raise InvalidArgument(
            f"{arch.name} takes no {kind} with the extension {extension[:16]!a} ({path[:200]!a}); "
            f"it takes {', '.join(known) or 'none'}"
        )
    return f"data:{mime};base64,{base64.b64encode(_content(path, max_bytes)).decode()}"


def _content(path: str, max_bytes: int) -> bytes:
    try:
        # Non-blocking: a pipe without a writer would block.
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a path"
        raise NotFound(f"{path[:200]!a} cannot be read: {reason}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"{path[:200]!a} is not a file")
        if status.st_size == 0:
            raise InvalidArgument(f"{path[:200]!a} is empty")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1) if status.st_size <= max_bytes else b""
    finally:
        os.close(descriptor)
    if not content or len(content) > max_bytes:
        raise TooLarge(f"{path[:200]!a} has more than {max_bytes} bytes, which services do not accept: make it smaller")
    return content
