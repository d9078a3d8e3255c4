# SPDX-License-Identifier: Apache-2.0
"""Validate what users write into records: ids, names, texts, JSON and environment variables.

Reject what a database or a later reader cannot handle; the error names the field.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidArgument, TooLarge
from headrace.platforms.payloads import ALLOWED, MAX_VALUE

MAX_TEXT = 4096
MAX_NAME = 255
MAX_JSON = 256 * 1024
_ORG = re.compile(r"[a-zA-Z0-9_-]{1,255}")
_ARCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_VERSION = re.compile(r"\d{1,9}\.\d{1,9}\.\d{1,9}", re.ASCII)


def check_id(value: object, noun: str) -> str:
    """Return a UUID in its canonical form; `noun` is "Job", "Experiment" or "Workspace"."""
    if isinstance(value, str):
        try:
            canonical = str(uuid.UUID(value))
        except ValueError:
            canonical = ""
        # UUID() also accepts braces, urn: and bare digits; an id has one spelling.
        if canonical and canonical == value.lower():
            return canonical
    raise InvalidArgument(f"{noun} ID passed is not a valid UUID")


def check_org(value: str) -> str:
    """Return a valid organisation name."""
    if not _ORG.fullmatch(value):
        raise InvalidArgument("an organisation name has 1 to 255 letters, digits, '_' and '-'")
    return value


def check_text(value: object, name: str, max_length: int = MAX_TEXT) -> str:
    """Return a string that every database accepts; None becomes ""."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string")
    if len(value) > max_length:
        raise InvalidArgument(f"{name} has more than {max_length} characters")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidArgument(f"{name} contains a NUL or a lone surrogate")
    return value


def check_arch(value: object) -> str:
    """Return a network architecture; any name is valid."""
    if not isinstance(value, str) or not _ARCH.fullmatch(value):
        raise InvalidArgument("Invalid network arch")
    return value


def check_version(value: str) -> str:
    """Return a version written x.y.z."""
    if not _VERSION.fullmatch(value):
        raise InvalidArgument("version must be written x.y.z, such as 1.0.0")
    return value


def check_json(value: object, name: str) -> str:
    """Return an object as JSON text. JSON escapes lone surrogates and NULs."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} must be an object")
    try:
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise InvalidArgument(f"{name} is nested too deeply, or contains NaN or infinity") from None
    if len(text) > MAX_JSON:
        raise TooLarge(f"{name} has more than {MAX_JSON} characters as JSON")
    return text


def strings_in(value: Any) -> list[str]:
    """Return every string value at any depth, without keys."""
    strings: list[str] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
    return strings


def keys_in(value: Any) -> set[str]:
    """Return every key of every object at any depth."""
    keys: set[str] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            keys |= {str(key) for key in item}
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
    return keys


def check_variables(given: object) -> dict[str, str]:
    """Return environment variables as strings. An error names the variable, never its value."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument("docker_env_vars must be an object with string values")
    variables: dict[str, str] = {}
    for name, value in given.items():
        if name not in ALLOWED:
            raise InvalidArgument(f"docker_env_vars: {str(name)[:64]!a} is not an allowed variable")
        if value is None:
            continue
        if not isinstance(value, str | int | float):
            raise InvalidArgument(f"docker_env_vars: {name} must be a string")
        variables[name] = check_text(str(value), f"docker_env_vars: {name}", MAX_VALUE)
    return variables
