# SPDX-License-Identifier: Apache-2.0
"""A model's configuration as its folder has it, before a backend has completed it.

Read by the engine's repository and by `headrace models check`. Turns `config.pbtxt`, `config.json` or `config.yaml`
into a ModelConfig message, and remembers the line of everything, so that later checks can name it too. Must not know
what a complete configuration is; `finishing` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format, text_format

from headrace.models.config.fitting import Fitted, fit
from headrace.models.config.formats import resolve_backend
from headrace.models.config.json_syntax import parse_json
from headrace.models.config.problems import ConfigError, Problem
from headrace.models.config.scalars import Syntax
from headrace.models.config.schema import new_config
from headrace.models.config.text_syntax import parse_text
from headrace.models.config.trees import MAX_BYTES, SyntaxFault
from headrace.models.config.typed import typed_config
from headrace.models.config.types import ModelConfig
from headrace.models.config.yaml_syntax import parse_yaml

CONFIG_FILES: Mapping[str, Syntax] = MappingProxyType(
    {"config.pbtxt": "text", "config.json": "json", "config.yaml": "yaml", "config.yml": "yaml"}
)
"""The names a configuration may have, and how each is written."""

_PARSERS = {"text": parse_text, "json": parse_json, "yaml": parse_yaml}
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class Draft:
    """What somebody wrote, or an empty message with the folder's name."""

    model_folder: Path
    message: Any
    """A ModelConfig message."""
    backend: str
    """The backend it means; "" when nothing tells."""
    path: Path | None = None
    """The file it is from, if it is from one."""
    shown_path: str = ""
    """What problems call it: without the folders above the model."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line of each field that was written: `input[0].dims` -> 9."""

    def wrote(self, place: str) -> bool:
        """Whether the field was written, even if with its default. `place` is like `input[0].dims`."""
        return place in self.lines

    def line_of(self, place: str) -> int | None:
        """The line of a field, or of the nearest block around it that was written."""
        while place:
            if place in self.lines:
                return self.lines[place]
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return None

    def problem(self, place: str, text: str) -> Problem:
        """A problem with a field, or with its absence."""
        return Problem(self.shown_path, self.line_of(place), _INDEX.sub("", place), text)

    def typed(self) -> ModelConfig:
        """As far as it goes: for `Backend.complete`, which is asked before anything is checked or filled in."""
        return typed_config(self.message, self.backend)


def read_draft(model_folder: Path) -> Draft:
    """Read the configuration in a model's folder. An empty draft when there is none."""
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
    return _parsed(model_folder, path, shown, content, CONFIG_FILES[path.name])


def draft_from_json(model_folder: Path, text: str) -> Draft:
    """Read a configuration that came with the request to load the model."""
    shown = f"{model_folder.name}/config of the request"
    content = text.encode(errors="surrogatepass")
    return _parsed(model_folder, None, shown, content, "json")


def _parsed(model_folder: Path, path: Path | None, shown: str, content: bytes, syntax: Syntax) -> Draft:
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
    fitted = fit(tree, message.DESCRIPTOR, syntax)
    if fitted.problems:
        raise ConfigError([Problem(shown, found.line, found.field, found.text) for found in fitted.problems])
    _fill(message, fitted, text, syntax, shown)
    return _draft(model_folder, path, shown, message, fitted.lines)


def _fill(message: Any, fitted: Fitted, text: str, syntax: Syntax, shown: str) -> None:
    """Have protobuf read it. What it refuses after our own look is rare: escapes and numbers out of range."""
    try:
        if syntax == "text":
            text_format.Parse(fitted.edited(text), message)
        else:
            json_format.ParseDict(fitted.values, message)
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
