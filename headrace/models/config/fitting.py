# SPDX-License-Identifier: Apache-2.0
"""A tree held against the schema: which fields do not exist, which values do not fit, what stands in which line.

Called by `drafts`. Finds everything that is wrong, not only the first thing. Also reads two words that the schema does
not have: `tags`, which is what `metric_tags` was called before there was Triton, and `auto` for the queue delay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace.models.config.scalars import Misfit, Syntax, nearest, read_scalar, shown
from headrace.models.config.trees import Block, Entry, Items, Node, Scalar

MAX_PROBLEMS = 50
"""After so many, nobody reads on; each costs a search for the nearest name."""

_OTHER_WORDS = {
    "shape": "dims", "dim": "dims", "type": "data_type", "dtype": "data_type", "datatype": "data_type",
    "inputs": "input", "outputs": "output", "instances": "instance_group", "instance_groups": "instance_group",
    "batch_size": "max_batch_size", "warmup": "model_warmup", "labels": "label_filename", "steps": "step",
    "preferred_batch_sizes": "preferred_batch_size", "version": "version_policy", "model_name": "name",
}  # fmt: skip
"""What people write instead of our names, where letters alone do not show it."""

_DELAY, _AUTO = "max_queue_delay_microseconds", "max_queue_delay_auto"


@dataclass(frozen=True, slots=True)
class Found:
    """A problem, as far as it is known here."""

    line: int
    field: str
    text: str


@dataclass(slots=True)
class Fitted:
    """What came of a tree."""

    problems: list[Found] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    """`input[0].dims` -> line."""
    values: dict[str, Any] = field(default_factory=dict)
    """The whole of it, as protobuf's JSON."""
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    """What to replace in a protobuf text, in its order, so that protobuf can read it."""

    def edited(self, text: str) -> str:
        """The text with the edits made. Every line stays where it is."""
        pieces, position = [], 0
        for start, end, word in self.edits:
            pieces += [text[position:start], word]
            position = end
        return "".join([*pieces, text[position:]])


class _EnoughError(Exception):
    """There are too many problems to go on."""


def fit(tree: Block, root: Descriptor, syntax: Syntax) -> Fitted:
    """Hold the tree against the schema."""
    fitter = _Fitter(root, syntax)
    try:
        fitter.fitted.values = fitter.block(tree, root, "", "")
    except _EnoughError:
        pass
    return fitter.fitted


class _Fitter:
    """`place` is where a field is (`input[0].dims`), `name` what a message calls it (`input.dims`)."""

    def __init__(self, root: Descriptor, syntax: Syntax) -> None:
        self.fitted = Fitted()
        self._root = root
        self._syntax = syntax

    def block(self, block: Block, message: Descriptor, place: str, name: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for entry in block.entries:
            known = self._field(entry, message, name)
            if known is None or (self._syntax == "json" and _is_null(entry.value)):
                continue
            inner = f"{place}.{known.name}" if place else known.name
            self.fitted.lines.setdefault(inner, entry.line)
            if self._clashes(entry, known, seen, name):
                continue
            self._value(entry, known, inner, f"{name}.{known.name}" if name else known.name, values)
        return values

    def _problem(self, line: int, name: str, text: str) -> None:
        self.fitted.problems.append(Found(line, name, text))
        if len(self.fitted.problems) >= MAX_PROBLEMS:
            raise _EnoughError

    def _field(self, entry: Entry, message: Descriptor, name: str) -> FieldDescriptor | None:
        known = message.fields_by_name.get(entry.name)
        if known is None and self._syntax != "text":
            known = message.fields_by_camelcase_name.get(entry.name)
        if known is None and entry.name == "tags" and message is self._root:
            self.fitted.edits.append((entry.start, entry.end, "metric_tags"))
            return message.fields_by_name["metric_tags"]
        if known is None:
            self._problem(
                entry.line, name, f"'{shown(entry.name)}' is not a field here; {self._advice(entry, message)}"
            )
        elif known.name == _DELAY and _AUTO in message.fields_by_name and self._is_auto(entry.value):
            self.fitted.edits.append((entry.start, entry.end, _AUTO))
            return message.fields_by_name[_AUTO]
        return known

    def _is_auto(self, value: Node) -> bool:
        kind = "word" if self._syntax == "text" else "text"
        return isinstance(value, Scalar) and value.kind == kind and value.text == "auto"

    def _advice(self, entry: Entry, message: Descriptor) -> str:
        if message is not self._root and entry.name in self._root.fields_by_name and entry.name != "name":
            return "it belongs at the top, outside of this block"
        if _OTHER_WORDS.get(entry.name) in message.fields_by_name:
            return f"did you mean '{_OTHER_WORDS[entry.name]}'?"
        for outer in message.fields:
            kind = outer.message_type
            if kind is not None and entry.name in kind.fields_by_name and not kind.GetOptions().map_entry:
                return f"it belongs into '{outer.name}'"
        known = list(message.fields_by_name)
        meant = nearest(entry.name, known)
        return f"did you mean '{meant}'?" if meant else f"fields here are {', '.join(known)}"

    def _clashes(self, entry: Entry, known: FieldDescriptor, seen: dict[str, int], name: str) -> bool:
        """Whether it was written before, or instead of it something that excludes it."""
        once = not known.is_repeated or self._syntax != "text"
        if once and known.name in seen:
            self._problem(
                entry.line, name, f"'{entry.name}' is written twice, first in line {seen[known.name]}; remove one"
            )
            return True
        choice = known.containing_oneof
        rival = next((f.name for f in choice.fields if f.name in seen), None) if choice is not None else None
        seen.setdefault(known.name, entry.line)
        if rival is not None and rival != known.name:
            self._problem(
                entry.line, name, f"'{known.name}' excludes '{rival}' of line {seen[rival]}; keep one of them"
            )
            return True
        return False

    def _value(self, entry: Entry, known: FieldDescriptor, place: str, name: str, values: dict[str, Any]) -> None:
        value = entry.value
        is_map = known.message_type is not None and known.message_type.GetOptions().map_entry
        if is_map and self._syntax != "text":
            values[known.name] = self._map(value, known, place, name)
        elif not known.is_repeated:
            values[known.name] = self._one(value, known, place, name)
        elif isinstance(value, Items):
            found = values.setdefault(known.name, [])
            for item in value.items:
                found.append(self._one(item, known, f"{place}[{len(found)}]", name))
        elif self._syntax == "text":
            found = values.setdefault(known.name, [])
            found.append(self._one(value, known, f"{place}[{len(found)}]", name))
        else:
            self._problem(value.line, name, f"takes a list: write {self._example(known)}")

    def _example(self, known: FieldDescriptor) -> str:
        inside = "{ ... }" if known.message_type is not None else "..."
        return f'"{known.name}": [ {inside} ]' if self._syntax == "json" else f"{known.name}: [ {inside} ]"

    def _map(self, value: Node, known: FieldDescriptor, place: str, name: str) -> dict[str, Any]:
        if not isinstance(value, Block):
            self._problem(value.line, name, "takes names with values, not a list or a single value")
            return {}
        entries: Any = known.message_type
        key, inner = entries.fields_by_name["key"], entries.fields_by_name["value"]
        values: dict[str, Any] = {}
        for entry in value.entries:
            try:
                read_scalar(key, Scalar(entry.line, "text", entry.name), self._syntax)
            except Misfit as misfit:
                self._problem(entry.line, name, f"'{shown(entry.name)}' cannot stand here: a name here {misfit.text}")
            if entry.name in values:
                self._problem(entry.line, name, f"'{shown(entry.name)}' is written twice; remove one")
            at = f"{place}.{entry.name}"
            self.fitted.lines.setdefault(at, entry.line)
            values[entry.name] = self._one(entry.value, inner, at, f"{name}.{shown(entry.name)}")
        return values

    def _one(self, value: Node, known: FieldDescriptor, place: str, name: str) -> Any:
        self.fitted.lines.setdefault(place, value.line)
        if isinstance(value, Items):
            self._problem(value.line, name, "takes one value, not a list")
        elif known.message_type is not None:
            return self._message(value, known, known.message_type, place, name)
        elif isinstance(value, Block):
            self._problem(value.line, name, "takes a single value, not a block in { }")
        elif value.kind == "null":
            self._problem(value.line, name, "has no value; write one, or remove the line")
        elif known.name == _AUTO and value.text == "auto":
            self.fitted.edits.append((value.start, value.end, "true"))
            return True
        else:
            try:
                return read_scalar(known, value, self._syntax)
            except Misfit as misfit:
                self._problem(value.line, name, misfit.text)
        return None

    def _message(self, value: Node, known: FieldDescriptor, message: Descriptor, place: str, name: str) -> Any:
        if isinstance(value, Block):
            if message.GetOptions().map_entry:
                place = f"{place.rpartition('[')[0]}.{_key(value)}"
                self.fitted.lines.setdefault(place, value.line)
            return self.block(value, message, place, name)
        if _is_null(value):
            self._problem(value.line, name, f"has no value; write {known.name}: {{}} for all defaults, or remove it")
            return None
        last = place.rpartition(".")[2]
        start = {"text": known.name, "yaml": f"{last}:"}.get(self._syntax, f'"{last}":')
        written = "{ ... }"
        if message.name == "ModelParameter" and isinstance(value, Scalar):
            member = '"string_value"' if self._syntax == "json" else "string_value"
            written = f'{{ {member}: "{shown(value.text)}" }}'
        self._problem(value.line, name, f"takes a block: write {start} {written}")
        return None


def _key(block: Block) -> str:
    for entry in block.entries:
        if entry.name == "key" and isinstance(entry.value, Scalar):
            return entry.value.text
    return ""


def _is_null(value: Node) -> bool:
    return isinstance(value, Scalar) and value.kind == "null"
