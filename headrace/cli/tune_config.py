# SPDX-License-Identifier: Apache-2.0
"""A setting that `headrace tune` found, into the model's configuration: whole or not at all, comments kept.

A file is edited where its values stand, then read again and held against what was meant; if that is not the same, the file
is left alone and the whole configuration is written beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.models.config.drafts import Draft, read_draft
from headrace.models.config.problems import ConfigError
from headrace.models.config.showing import to_text
from headrace.models.config.text_syntax import parse_text
from headrace.models.config.trees import Block, Entry, Items, Scalar
from headrace.programs.loadtest.settings import Setting

BESIDE = "config.tuned.pbtxt"
_OPENING = re.compile(r"(?:\s|#[^\n]*(?:\n|$)|:|\[)*[{<]")
_BATCH, _BATCHING, _DELAY, _GROUPS = (
    "max_batch_size",
    "dynamic_batching",
    "max_queue_delay_microseconds",
    "instance_group",
)


@dataclass(frozen=True, slots=True)
class Change:
    """What to write; None where it stays as it is."""

    max_batch_size: int | None
    delay_microseconds: int | None
    instances: int | None

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return (self.max_batch_size, self.delay_microseconds, self.instances) != (None, None, None)

    def text(self) -> str:
        """As a `config.pbtxt` has it."""
        lines = []
        if self.max_batch_size is not None:
            lines.append(f"{_BATCH}: {self.max_batch_size}")
        if self.delay_microseconds is not None:
            lines.append(f"{_BATCHING} {{ {_DELAY}: {self.delay_microseconds} }}")
        if self.instances is not None:
            lines.append(f"{_GROUPS} [ {{ count: {self.instances} }} ]")
        return "".join(f"{line}\n" for line in lines)


def change_of(before: Setting, after: Setting, *, was_auto: bool = False) -> Change:
    """The difference of two settings. A delay that was `auto` is written even if it is the same number."""
    delay = after.delay_microseconds
    return Change(
        after.max_batch_size if after.max_batch_size != before.max_batch_size else None,
        delay if delay != before.delay_microseconds or was_auto else None,
        after.instances if after.instances != before.instances else None,
    )


@dataclass(frozen=True, slots=True)
class Written:
    """Where it went."""

    path: Path
    beside: bool
    """The configuration itself could not be edited safely: this is a whole one, to be put in its place by hand."""


def write_change(folder: Path, change: Change) -> Written:
    """Write a change into the configuration of a model's folder."""
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is no folder of a model: give --repository the folder that it is in")
    draft = read_draft(folder)
    meant = _meant(draft, change)
    path = draft.path or folder / "config.pbtxt"
    try:
        text = path.read_bytes().decode("utf-8-sig") if draft.path is not None else ""
        edit = _EDITORS.get(path.name)
        edited = edit(text, change) if edit is not None else None
        if edited is not None and _says(folder, path.name, edited, meant):
            _replace(path, edited)
            return Written(path, beside=False)
        _replace(folder / BESIDE, to_text(meant))
    except OSError as error:
        raise InvalidArgument(f"{error.filename or folder}: {error.strerror}; nothing was changed") from None
    return Written(folder / BESIDE, beside=True)


def _meant(draft: Draft, change: Change) -> Any:
    message = type(draft.message)()
    message.CopyFrom(draft.message)
    if change.max_batch_size is not None:
        message.max_batch_size = change.max_batch_size
        sizes = [size for size in message.dynamic_batching.preferred_batch_size if size <= change.max_batch_size]
        if list(message.dynamic_batching.preferred_batch_size) != sizes:
            message.dynamic_batching.preferred_batch_size[:] = sizes
    if change.delay_microseconds is not None:
        message.dynamic_batching.SetInParent()
        message.dynamic_batching.max_queue_delay_microseconds = change.delay_microseconds
        message.dynamic_batching.ClearField("max_queue_delay_auto")
    if change.instances is not None:
        group = message.instance_group[0] if message.instance_group else message.instance_group.add()
        group.count = change.instances
    return message


def _says(folder: Path, name: str, text: str, meant: Any) -> bool:
    """Whether a text would be read as what is meant."""
    with tempfile.TemporaryDirectory() as place:
        trial = Path(place) / folder.name
        trial.mkdir()
        (trial / name).write_bytes(text.encode())
        try:
            return bool(read_draft(trial).message == meant)
        except ConfigError:
            return False


def _edited_text(text: str, change: Change) -> str:
    """Protobuf text: values are replaced where they stand, what is missing is added."""
    tree = parse_text(text)
    edits: list[tuple[int, int, str]] = []
    missing = Change(None, None, None)
    if change.max_batch_size is not None:
        entry = _find(tree, _BATCH)
        if entry is not None and isinstance(entry.value, Scalar):
            edits.append((entry.value.start, entry.value.end, str(change.max_batch_size)))
        else:
            missing = Change(change.max_batch_size, missing.delay_microseconds, missing.instances)
    for name, field, value in (
        (_BATCHING, _DELAY, change.delay_microseconds),
        (_GROUPS, "count", change.instances),
    ):
        if value is None:
            continue
        entry = _find(tree, name)
        if entry is not None and (edit := _inner_edit(text, entry, field, value)) is not None:
            edits.append(edit)
        elif name == _BATCHING:
            missing = Change(missing.max_batch_size, value, missing.instances)
        else:
            missing = Change(missing.max_batch_size, missing.delay_microseconds, value)
    for start, end, word in sorted(edits, reverse=True):
        text = text[:start] + word + text[end:]
    if missing and text and not text.endswith("\n"):
        text += "\n"
    return text + missing.text()


def _inner_edit(text: str, entry: Entry, field: str, value: int) -> tuple[int, int, str] | None:
    """How to set a number in a block, or in the one block of a list."""
    block = entry.value
    if isinstance(block, Items):
        block = block.items[0] if len(block.items) == 1 else Items(block.line)
    if not isinstance(block, Block):
        return None
    inner = _find(block, field)
    if inner is not None:
        return (inner.value.start, inner.value.end, str(value)) if isinstance(inner.value, Scalar) else None
    opening = _OPENING.match(text, entry.end)
    return None if opening is None else (opening.end(), opening.end(), f" {field}: {value} ")


def _find(block: Block, name: str) -> Entry | None:
    return next((entry for entry in block.entries if entry.name == name), None)


def _edited_json(text: str, change: Change) -> str:
    document = json.loads(text)
    if change.max_batch_size is not None:
        document[_BATCH] = change.max_batch_size
    if change.delay_microseconds is not None:
        document.setdefault(_BATCHING, {})[_DELAY] = change.delay_microseconds
    if change.instances is not None:
        groups = document.setdefault(_GROUPS, [{}])
        groups[0]["count"] = change.instances
    indented = re.search(r"\n([ \t]+)\"", text)
    return json.dumps(document, indent=indented[1] if indented else 2, ensure_ascii=False) + "\n"


_EDITORS: Mapping[str, Callable[[str, Change], str]] = {"config.pbtxt": _edited_text, "config.json": _edited_json}
"""YAML is not among them: no reader of ours keeps its comments."""


def _replace(path: Path, text: str) -> None:
    """The old file or the new one, and never a part."""
    handle, name = tempfile.mkstemp(prefix=".headrace-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, name)
        else:
            os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
