# SPDX-License-Identifier: Apache-2.0
"""Read a model's configuration from its folder, before a backend completes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format, text_format

from headrace.models.config.formats import resolve_backend
from headrace.models.config.messages import new_config, typed_config
from headrace.models.config.problems import ConfigError, Problem
from headrace.models.config.schema_check import CheckResult, Syntax, check_tree
from headrace.models.config.syntax import MAX_BYTES, SyntaxFault, parse_json, parse_text, parse_yaml
from headrace.models.config.types import ModelConfig

CONFIG_FILES: Mapping[str, Syntax] = MappingProxyType(
    {"config.pbtxt": "text", "config.json": "json", "config.yaml": "yaml", "config.yml": "yaml"}
)
"""File names of a configuration, and their syntax."""

_PARSERS = {"text": parse_text, "json": parse_json, "yaml": parse_yaml}
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class Draft:
    """A configuration as written, or an empty message with the folder's name."""

    model_folder: Path
    message: Any
    """A ModelConfig message."""
    backend: str
    """The backend; "" if nothing determines it."""
    path: Path | None = None
    """The file, if it is from one."""
    shown_path: str = ""
    """The name in problems: without the folders above the model."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Lines of written fields: `input[0].dims` -> 9."""

    def has_field(self, place: str) -> bool:
        """Return whether the field was written, even with its default value. `place` is like `input[0].dims`."""
        return place in self.lines

    def line_of(self, place: str) -> int | None:
        """Return the line of a field, or of the nearest enclosing block that was written."""
        while place:
            if place in self.lines:
                return self.lines[place]
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return None

    def problem(self, place: str, text: str) -> Problem:
        """Return a problem of a field."""
        return Problem(self.shown_path, self.line_of(place), _INDEX.sub("", place), text)

    def typed(self) -> ModelConfig:
        """Return the incomplete typed configuration, for `Backend.complete`."""
        return typed_config(self.message, self.backend)


def read_draft(model_folder: Path) -> Draft:
    """Read the configuration in a model's folder; an empty draft if there is none."""
    present = [model_folder / name for name in CONFIG_FILES if (model_folder / name).is_file()]
    shown = f"{model_folder.name}/{present[0].name if present else 'config.pbtxt'}"
    if not present:
        return _draft(model_folder, None, shown, new_config(name=model_folder.name), {})
    if len(present) > 1:
        names = " and ".join(path.name for path in present)
        raise ConfigError([Problem(shown, None, "", f"{names} are both there; keep one of them")])
    path = present[0]
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or "error"
        raise ConfigError([Problem(shown, None, "", f"cannot be read: {reason}; check its permissions")]) from None
    return _parse(model_folder, path, shown, content, CONFIG_FILES[path.name])


def draft_from_json(model_folder: Path, text: str) -> Draft:
    """Parse a configuration that came with a request to load the model."""
    shown = f"{model_folder.name}/config of the request"
    content = text.encode(errors="surrogatepass")
    return _parse(model_folder, None, shown, content, "json")


def _parse(model_folder: Path, path: Path | None, shown: str, content: bytes, syntax: Syntax) -> Draft:
    if len(content) > MAX_BYTES:
        raise ConfigError([Problem(shown, None, "", f"has more than {MAX_BYTES} bytes; no configuration needs that")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(shown, line, "", "is not UTF-8 text here; save the file as UTF-8")]) from None
    try:
        tree = _PARSERS[syntax](text)
    except SyntaxFault as fault:
        raise ConfigError([Problem(shown, fault.line, "", fault.text)]) from None
    message = new_config()
    result = check_tree(tree, message.DESCRIPTOR, syntax)
    if result.problems:
        raise ConfigError([Problem(shown, problem.line, problem.field, problem.text) for problem in result.problems])
    _parse_protobuf(message, result, text, syntax, shown)
    return _draft(model_folder, path, shown, message, result.lines)


def _parse_protobuf(message: Any, result: CheckResult, text: str, syntax: Syntax, shown: str) -> None:
    """Parse with protobuf. After the schema check it only rejects escapes and numbers out of range."""
    try:
        if syntax == "text":
            text_format.Parse(result.edited(text), message)
        else:
            json_format.ParseDict(result.values, message)
    except text_format.ParseError as error:
        advice = "protobuf cannot read this; look for a wrong escape, a wrong number or a missing ':'"
        raise ConfigError([Problem(shown, error.GetLine(), "", advice)]) from None
    except (json_format.Error, ValueError, TypeError, OverflowError):
        problem = Problem(shown, None, "", "protobuf cannot read a value; look for a number out of range")
        raise ConfigError([problem]) from None


def _draft(folder: Path, path: Path | None, shown: str, message: Any, lines: Mapping[str, int]) -> Draft:
    if not message.name:
        message.name = folder.name
    backend = resolve_backend(message, folder)
    return Draft(folder, message, backend, path, shown, lines)
