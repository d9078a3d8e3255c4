# SPDX-License-Identifier: Apache-2.0
"""What must not be read in a log, a status or a file: tokens and keys that a service was started with.

Made by `launching`, asked by whoever tells or writes a text that is not wholly ours. Knows values, not where they are used.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HIDDEN = "***"
_SHORTEST = 6
"""Shorter values would be found in texts that have nothing to do with them."""
_SECRET_NAME = re.compile(
    r"secret|password|passwd|api_?key|access_?key|account_?key|_key$|token$|credential|authorization", re.I
)


def is_secret_name(name: str) -> bool:
    """Whether a field or variable of this name holds what nobody should see."""
    return _SECRET_NAME.search(name) is not None


class Secrets:
    """The values that were given."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values = sorted({value for value in values if len(value) >= _SHORTEST}, key=len, reverse=True)

    @classmethod
    def of(cls, *trees: Any) -> Secrets:
        """Every text under a secret name, however deep."""
        return cls(value for tree in trees for value in _found(tree, ""))

    def hide(self, text: str) -> str:
        """The text without them."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def hide_tree(self, value: Any, name: str = "") -> Any:
        """JSON without them, and without whatever has a secret name."""
        if isinstance(value, Mapping):
            return {str(key): self.hide_tree(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide_tree(each, name) for each in value]
        if isinstance(value, str):
            return HIDDEN if value and is_secret_name(name) else self.hide(value)
        return value

    def __repr__(self) -> str:
        """How many; never which."""
        return f"Secrets({len(self._values)})"


class HidingFilter(logging.Filter):
    """Takes secrets out of what is logged."""

    def __init__(self, secrets: Secrets) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter.filter`."""
        text = record.getMessage()
        hidden = self._secrets.hide(text)
        if hidden != text:
            record.msg, record.args = hidden, None
        if record.exc_info and record.exc_info[0] is not None:
            trace = "".join(traceback.format_exception(*record.exc_info))
            if (told := self._secrets.hide(trace)) != trace:
                # The exception itself cannot be changed, so its text goes where ours is.
                record.msg, record.args, record.exc_info = f"{hidden}\n{told}", None, None
        return True


def _found(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _found(each, str(key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _found(each, name)
    elif isinstance(value, str) and is_secret_name(name):
        yield value
