# SPDX-License-Identifier: Apache-2.0
"""A chat request before it is sent: messages from a prompt and files, sampling fields, and whether it fits the service.

Called by the command line. What a user says goes out as it was said: nothing is clamped or made up. Files of this machine
are read here and become data: URIs, since a service elsewhere cannot see them. Nothing is sent from here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.core.errors import InvalidArgument
from headrace.platforms.catalogue import Architecture, Field
from headrace.platforms.media_files import MOST_FILE, Kind, media_url
from headrace.platforms.variables import SECRETS

__all__ = [
    "MOST_FILE",
    "Prepared",
    "check_no_secret",
    "fields_to_ask",
    "kind_of",
    "media_url",
    "messages_of",
    "mismatches",
    "prepare",
    "read_value",
]

_SHORTEST_SECRET = 8
_ITEMS: Mapping[str, Kind] = {"image_url": "image", "video_url": "video"}
_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
Value = int | float | str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be sent."""

    body: dict[str, Any]
    remarks: tuple[str, ...] = ()
    """What people should know about it: fields that were left out, messages that nobody will read."""


def prepare(
    body: Mapping[str, Any], arch: Architecture, sampling: Mapping[str, Value | None] | None = None
) -> Prepared:
    """The request with every sampling field: as `sampling` says, else as the body has it, else by its default.

    A field that `sampling` does not name, or has as None, was skipped. Fields that the architecture does not support are
    left out; files of this machine become data: URIs. Raises InvalidArgument for what no service could answer.
    """
    remarks = _check_messages(body)
    made = {name: value for name, value in body.items() if name not in arch.unsupported}
    remarks += [f"{name} is left out: {arch.name} does not support it" for name in body if name in arch.unsupported]
    given = sampling or {}
    for name, value in given.items():
        if name in arch.unsupported and value is not None:
            remarks.append(f"{name} is left out: {arch.name} does not support it")
        elif value is not None:
            same = next((field.also for field in arch.fields if field.name == name), ())
            made = {**{each: kept for each, kept in made.items() if each not in same}, name: value}
    for field in arch.fields:
        if not _has(made, field) and field.default is not None:
            made[field.name] = field.default
    made["messages"] = [_with_files(message, arch) for message in body["messages"]]
    return Prepared(made, tuple(remarks))


def mismatches(body: Mapping[str, Any], arch: Architecture, catalogue: Mapping[str, Architecture]) -> list[str]:
    """Why the request seems to be meant for another service; none where it fits. Somebody must decide what to do then."""
    own = arch.marks | {name for field in arch.fields for name in (field.name, *field.also)}
    found: list[str] = []
    for other in catalogue.values():
        fields = sorted(name for name in body if name in other.marks - own)
        if other.name != arch.name and fields:
            found.append(f"{', '.join(fields)}: fields of {other.name}, and this service runs {arch.name}")
    if arch.media.required and not _has_media(body):
        found.append(f"{arch.name} answers only requests with an image or a video, and there is none in this one")
    return found


def fields_to_ask(body: Mapping[str, Any], arch: Architecture) -> tuple[Field, ...]:
    """The sampling fields that the request does not have yet."""
    return tuple(field for field in arch.fields if not _has(body, field))


def kind_of(field: Field) -> str:
    """A field's type and range, in words."""
    kind = {"int": "whole number", "float": "number", "str": "text"}[field.type]
    if field.least is not None and field.most is not None:
        return f"{kind} from {field.least:g} to {field.most:g}"
    if field.least is not None:
        return f"{kind}, at least {field.least:g}"
    return f"{kind}, at most {field.most:g}" if field.most is not None else kind


def read_value(field: Field, text: str) -> Value:
    """What somebody typed. Raises InvalidArgument if it is not of the field's type, or out of its range."""
    if field.type == "str":
        return text
    trimmed = text.strip()
    try:
        value: int | float = int(trimmed) if _WHOLE.fullmatch(trimmed) else float(trimmed)
    except ValueError:
        value = math.nan
    wrong = not math.isfinite(value) or "_" in trimmed or (field.type == "int" and isinstance(value, float))
    below = field.least is not None and value < field.least
    if wrong or below or (field.most is not None and value > field.most):
        raise InvalidArgument(f"{field.name} is a {kind_of(field)}: {text[:40]!a} is not")
    return value


def messages_of(
    prompt: str, arch: Architecture, *, system: str = "", images: Iterable[str] = (), videos: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """A system message, if there is one, and one of the user with its media: URLs, data: URIs, files of this machine."""
    items: list[dict[str, Any]] = [_item("image", media_url(each, "image", arch)) for each in images]
    items += [_item("video", media_url(each, "video", arch)) for each in videos]
    content: Any = [*items, {"type": "text", "text": prompt}] if items else prompt
    asked = [{"role": "system", "content": system}] if system else []
    return [*asked, {"role": "user", "content": content}]


def check_no_secret(body: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raises InvalidArgument if the value of a secret variable is in the request. Ask before media are put into it."""
    texts = list(_texts(body))
    for name in SECRETS:
        value = environ.get(name, "")
        if len(value) >= _SHORTEST_SECRET and any(value in text for text in texts):
            raise InvalidArgument(
                f"the request holds the value of {name}: take it out, since services keep what they get"
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _has(body: Mapping[str, Any], field: Field) -> bool:
    return any(name in body for name in (field.name, *field.also))


def _check_messages(body: Mapping[str, Any]) -> list[str]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise InvalidArgument(
            'the request has no list of messages: write {"messages": [{"role": "user", "content": "..."}]}, or give a prompt'
        )
    roles = [each.get("role") for each in messages]
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
            # Later ones are not read.
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
    given = item.get(name)
    place = given.get("url") if isinstance(given, dict) else given
    if not isinstance(place, str) or not place:
        raise InvalidArgument(
            f'an item of the type {name} has no URL: write {{"type": "{name}", "{name}": {{"url": "..."}}}}'
        )
    more = given if isinstance(given, dict) else {}
    return {**item, name: {**more, "url": media_url(place, kind, arch)}}


def _items(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _kind(item: Any) -> Kind | None:
    return _ITEMS.get(str(item.get("type"))) if isinstance(item, dict) else None


def _item(kind: Literal["image", "video"], url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
