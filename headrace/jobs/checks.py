# SPDX-License-Identifier: Apache-2.0
"""What callers may write into a record: ids, names, texts, JSON. Called by the rest of `jobs` before anything is kept.

Refuses what one of the databases or a later reader would choke on, in words that name the field.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidArgument, TooLarge

MOST_TEXT = 4096
MOST_NAME = 255
MOST_JSON = 256 * 1024
_ORG = re.compile(r"[a-zA-Z0-9_-]{1,255}")
_ARCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_VERSION = re.compile(r"\d{1,9}\.\d{1,9}\.\d{1,9}", re.ASCII)


def check_id(value: object, what: str) -> str:
    """A UUID in its usual form; `what` is "Job", "Experiment" or "Workspace"."""
    if isinstance(value, str):
        try:
            found = str(uuid.UUID(value))
        except ValueError:
            found = ""
        # UUID() also reads braces, urn: and bare digits; an id has one spelling.
        if found and found == value.lower():
            return found
    raise InvalidArgument(f"{what} ID passed is not a valid UUID")


def check_org(value: str) -> str:
    """An organisation's name."""
    if not _ORG.fullmatch(value):
        raise InvalidArgument("an organisation's name has 1 to 255 letters, digits, '_' and '-'")
    return value


def check_text(value: object, what: str, most: int = MOST_TEXT) -> str:
    """A text that every database takes; None is no text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} must be a string")
    if len(value) > most:
        raise InvalidArgument(f"{what} has more than {most} characters")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidArgument(f"{what} holds a NUL or half a character")
    return value


def check_arch(value: object) -> str:
    """A network's architecture; any, since models of every kind are served."""
    if not isinstance(value, str) or not _ARCH.fullmatch(value):
        raise InvalidArgument("Invalid network arch")
    return value


def check_version(value: str) -> str:
    """As x.y.z."""
    if not _VERSION.fullmatch(value):
        raise InvalidArgument("version must be written x.y.z, such as 1.0.0")
    return value


def check_json(value: object, what: str) -> str:
    """An object as the text that is kept. Half characters and NULs are escaped in there, and harmless."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{what} must be an object")
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise InvalidArgument(f"{what} is nested too deeply, or holds what JSON cannot: NaN, infinity") from None
    if len(text) > MOST_JSON:
        raise TooLarge(f"{what} has more than {MOST_JSON} characters as JSON")
    return text


def strings_in(value: Any) -> list[str]:
    """Every string, however deep; keys are none."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return found


def keys_in(value: Any) -> set[str]:
    """Every key of every object, however deep."""
    found: set[str] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            found |= {str(key) for key in each}
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    return found
