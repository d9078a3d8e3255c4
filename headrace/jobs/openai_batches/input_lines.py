# SPDX-License-Identifier: Apache-2.0
"""The input of a batch, one request per line: `check_input` validates all of them, `InputLines` reads them to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import check_depth
from headrace.core.limits import MIB, BatchLimits
from headrace.jobs.batch.sources import Item

_BOM = b"\xef\xbb\xbf"
_MOST_ERRORS = 100
"""Maximum number of reported errors."""
_ID_CHARACTERS = 512
_EXTRA_BYTES = 6
"""Bytes of the longest line besides its content: a byte order mark, the line's end, and one to detect a longer line."""


@dataclass(slots=True)
class CheckedInput:
    """The result of validating an input."""

    total: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Errors in OpenAI's form: code, message, param, line."""
    models: set[str] = field(default_factory=set)

    def add_error(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        """Add an error."""
        self.errors.append({"code": code, "message": message, "param": param, "line": line})


def check_input(path: Path, endpoint: str, limits: BatchLimits) -> CheckedInput:
    """Validate an input."""
    checked = CheckedInput()
    ids: set[str] = set()
    with path.open("rb") as file:
        for number, line in _lines(file, limits.line_bytes):
            checked.total += 1
            if checked.total > limits.lines:
                message = f"the file has more than {limits.lines} requests: split it into several batches"
                checked.add_error("too_many_tasks", message)
                break
            _check_line(checked, number, line, endpoint, ids, limits.line_bytes)
            if len(checked.errors) >= _MOST_ERRORS:
                break
    if not checked.total:
        checked.add_error("empty_file", "the file has no requests: write one JSON object per line")
    return checked


def _check_line(checked: CheckedInput, number: int, line: bytes, endpoint: str, ids: set[str], most_bytes: int) -> None:
    if len(line) > most_bytes:
        checked.add_error("invalid_request", f"the line has more than {most_bytes} bytes: send less", number)
        return
    try:
        request = orjson.loads(line)
    except orjson.JSONDecodeError:
        request = None
    if not isinstance(request, dict):
        checked.add_error("invalid_json_line", "the line is not a JSON object", number)
        return
    for name in ("custom_id", "method", "url", "body"):
        if request.get(name) in (None, ""):
            checked.add_error("missing_required_parameter", f"'{name}' is missing", number, name)
            return
    custom_id, body = request["custom_id"], request["body"]
    if not isinstance(custom_id, str) or len(custom_id) > _ID_CHARACTERS:
        message = f"must be a string of at most {_ID_CHARACTERS} characters"
        checked.add_error("invalid_request", message, number, "custom_id")
    elif custom_id in ids:
        message = "another line before this one has the same custom_id: each needs its own"
        checked.add_error("duplicate_custom_id", message, number, "custom_id")
    elif request["method"] != "POST":
        checked.add_error("invalid_method", "must be 'POST'", number, "method")
    elif request["url"] != endpoint:
        checked.add_error("url_mismatch", f"must be {endpoint}, the endpoint of the batch", number, "url")
    elif not isinstance(body, dict):
        checked.add_error("invalid_request", "must be an object", number, "body")
    elif body.get("stream") or body.get("background"):
        param = "body.stream" if body.get("stream") else "body.background"
        checked.add_error("invalid_request", "must be false in a batch", number, param)
    else:
        try:
            check_depth("body", body)
        except BadRequest as error:
            checked.add_error("invalid_request", error.message, number, "body")
        ids.add(custom_id)
        if isinstance(model := body.get("model"), str):
            checked.models.add(model)


class InputLines:
    """The requests of a validated input; implements `jobs.batch.sources.Source`."""

    skipped = 0

    def __init__(self, path: Path, total: int, limits: BatchLimits) -> None:
        self._path = path
        self._line_bytes = limits.line_bytes
        self.total = total
        self.fingerprint = ""
        """The input of a batch never changes."""

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Yield index and text of every line."""
        with self._path.open("rb") as file:
            for index, (_, line) in enumerate(_lines(file, self._line_bytes)):
                yield index, line

    def id_of(self, entry: bytes) -> str | None:
        """Return the custom_id of a line."""
        custom_id = orjson.loads(entry)["custom_id"]
        return str(custom_id)

    def item(self, index: int, entry: bytes) -> Item:
        """Read a line."""
        request = orjson.loads(entry)
        return Item(index, request["custom_id"], request["body"])


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each line that is not empty; a longer line is cut behind `most_bytes`."""
    number = 0
    while line := file.readline(most_bytes + _EXTRA_BYTES):
        number += 1
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MIB)
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            yield number, line
