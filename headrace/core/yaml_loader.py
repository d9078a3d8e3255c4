# SPDX-License-Identifier: Apache-2.0
"""Load small YAML files safely: plain values only, with limits on nesting and on what aliases expand to."""

from __future__ import annotations

from typing import Any

import yaml

MAX_DEPTH = 64
MAX_VALUES = 200_000
"""Values in a text; an alias counts as much as what it repeats."""


class YamlLimitExceeded(yaml.MarkedYAMLError):
    """The text is YAML, but nested too deeply or too large."""


class _Loader(yaml.SafeLoader):
    """A safe loader that stops at the limits before anything is built."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._values = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        is_alias = isinstance(event, yaml.AliasEvent)
        before = self._values
        self._values += self._sizes.get(event.anchor, 1) if is_alias else 1
        self._depth += 1
        if self._values > MAX_VALUES:
            raise YamlLimitExceeded(None, None, f"more than {MAX_VALUES} values, aliases included", event.start_mark)
        if self._depth > MAX_DEPTH:
            raise YamlLimitExceeded(None, None, f"more than {MAX_DEPTH} levels of nesting", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None and not is_alias:
            self._sizes[event.anchor] = self._values - before
        return node


def load_yaml(text: str) -> Any:
    """Return the value of the only document; None if there is none. Raises yaml.YAMLError or ValueError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the nodes of the only document, which know their lines. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def yaml_error_line(error: Exception) -> int | None:
    """Return the line of an error of YAML or JSON, if it has one."""
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark is not None else getattr(error, "lineno", None)


def yaml_error_reason(error: Exception, otherwise: str) -> str:
    """Return which limit a text exceeds; `otherwise` for any other error, whose own text would quote the file."""
    return str(error.problem) if isinstance(error, YamlLimitExceeded) else otherwise
