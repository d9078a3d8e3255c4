# SPDX-License-Identifier: Apache-2.0
"""Backends in a file: a list of addresses, or of `{url, weight, grpc, revision, role}`. Followed by `discoverer`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import yaml

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.discovery.watching import FILE_SECONDS, changes, mark_of
from headrace.fleet.router.settings import BackendAddress

_MOST_BYTES = 1 << 20
_MEMBERS = {"url", "weight", "grpc", "revision", "role"}
_FORM = "write a list such as '- {url: http://10.0.0.7:8000, weight: 2}'"


class FileSource:
    """See the module."""

    def __init__(self, path: str, interval_seconds: float) -> None:
        self._path = path
        self._seconds = min(interval_seconds, FILE_SECONDS)
        self._hurry = asyncio.Event()

    def __str__(self) -> str:
        return self._path

    def hurry(self) -> None:
        """Somebody knows that it has changed."""
        self._hurry.set()

    async def follow(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
        """See `discoverer.Source`."""
        if mark_of(self._path) is None:
            yield InvalidArgument("it is not there yet")
        async for _ in changes(self._path, self._seconds, hurry=self._hurry):
            try:
                yield read_backends(self._path)
            except InvalidArgument as error:
                yield error


def read_backends(path: str) -> list[BackendAddress]:
    """What the file says. Raises InvalidArgument."""
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise InvalidArgument(f"{path} has over {_MOST_BYTES} characters; {_FORM}")
        document = _document(text)
    except (OSError, UnicodeDecodeError):
        raise InvalidArgument(f"{path} cannot be read as text") from None
    except (yaml.YAMLError, RecursionError):
        raise InvalidArgument(f"{path} is neither JSON nor YAML; {_FORM}") from None
    if isinstance(document, dict) and set(document) == {"backends"}:
        document = document["backends"]
    if not isinstance(document, list):
        # An empty file is most likely one that is being written: nobody is to be lost for that. `[]` is none.
        raise InvalidArgument(f"{path} has no list; {_FORM}")
    return [_address(each, path) for each in document]


def _document(text: str) -> Any:
    try:
        # Far quicker than the YAML that it is as well, and the loop waits.
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return yaml.safe_load(text)


def _address(each: Any, path: str) -> BackendAddress:
    if isinstance(each, str):
        return BackendAddress.parse(each)
    if not isinstance(each, dict) or not isinstance(each.get("url"), str) or set(each) - _MEMBERS:
        raise InvalidArgument(f"{path}: {each!r} is no backend; {_FORM}")
    text = each["url"]
    for name in ("weight", "grpc", "revision", "role"):
        if name in each:
            text += f",{name}={each[name]}"
    return BackendAddress.parse(text)
