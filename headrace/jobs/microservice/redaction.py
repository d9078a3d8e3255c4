# SPDX-License-Identifier: Apache-2.0
"""Redaction of secrets: keep tokens and keys of a service out of logs, statuses and files."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

REDACTED = "***"
_MIN_LENGTH = 6
"""Shorter values would match unrelated text."""
_SECRET_NAME = re.compile(
    r"secret|password|passwd|api_?key|access_?key|account_?key|_key$|token$|credential|authorization", re.I
)


def is_secret_name(name: str) -> bool:
    """Return whether a field or variable of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


class Secrets:
    """Secret values, and how to remove them from text."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values = sorted({value for value in values if len(value) >= _MIN_LENGTH}, key=len, reverse=True)

    @classmethod
    def of(cls, *trees: Any) -> Secrets:
        """Collect every string under a secret name, at any depth."""
        return cls(value for tree in trees for value in _secret_values(tree, ""))

    def redact(self, text: str) -> str:
        """Return the text without the secrets."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return text

    def redact_tree(self, value: Any, name: str = "") -> Any:
        """Return JSON without the secrets and without values of secret names."""
        if isinstance(value, Mapping):
            return {str(key): self.redact_tree(item, str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_tree(item, name) for item in value]
        if isinstance(value, str):
            return REDACTED if value and is_secret_name(name) else self.redact(value)
        return value

    def __repr__(self) -> str:
        """Show the number of secrets only."""
        return f"Secrets({len(self._values)})"


class RedactingFilter(logging.Filter):
    """Removes secrets from log records."""

    def __init__(self, secrets: Secrets) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the message and the traceback of a record."""
        text = record.getMessage()
        redacted = self._secrets.redact(text)
        if redacted != text:
            record.msg, record.args = redacted, None
        if record.exc_info and record.exc_info[0] is not None:
            trace = "".join(traceback.format_exception(*record.exc_info))
            if (redacted_trace := self._secrets.redact(trace)) != trace:
                # The exception cannot be changed, so its redacted text becomes part of the message.
                record.msg, record.args, record.exc_info = f"{redacted}\n{redacted_trace}", None, None
        return True


def _secret_values(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secret_values(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secret_values(item, name)
    elif isinstance(value, str) and is_secret_name(name):
        yield value
