# SPDX-License-Identifier: Apache-2.0
"""Logs: the standard library's, as JSON lines for machines or as text for people.

`configure_logging` is called once by a composition root; every room just uses `logging.getLogger(__name__)`. Each line
carries the fields of `context` and those given with `extra=`. One record is one line, whatever a client put into it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import orjson

from headrace.core.telemetry import context

LogFormat = Literal["auto", "json", "text"]

_OURS = "headrace"
_CHATTY = ("httpx", "httpx2")
"""Loggers of others that tell every request at the level info: heard from warnings on."""
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_JSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
# JSON may carry these as they are, but some readers of lines take them for the end of one.
_UNICODE_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_PLAIN_VALUE = re.compile(r"[\w.:/+@-]+")

_RESET, _DIM = "\x1b[0m", "\x1b[2m"
_LEVEL_COLOURS = ((logging.ERROR, "\x1b[31m"), (logging.WARNING, "\x1b[33m"), (logging.INFO, "\x1b[32m"))


def configure_logging(level: str | int = "info", format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send every logger to `stream` (standard error); "auto" is text on a terminal and JSON elsewhere.

    May be called again: the handler of the last call is replaced, those of others stay.
    """
    number = _level_number(level)
    target = sys.stderr if stream is None else stream
    terminal = target.isatty()
    if format not in ("auto", "json", "text"):
        raise ValueError(f"log format {format!r} is not known: use auto, json or text")
    formatter: logging.Formatter
    if format == "json" or (format == "auto" and not terminal):
        formatter = JsonFormatter()
    else:
        formatter = TextFormatter(colour=terminal and _wants_colour())
    handler = _Handler(target)
    handler.setFormatter(formatter)
    handler.levels = LogLevels.from_level(number)
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    _set_level(number)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


@dataclass(frozen=True, slots=True)
class LogLevels:
    """Which lines are written, as Triton's clients choose it: each kind by itself."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0
    """Over 0: our own debug lines, too."""

    @classmethod
    def from_level(cls, number: int) -> LogLevels:
        """Everything from a level on."""
        return cls(
            number <= logging.INFO, number <= logging.WARNING, number <= logging.ERROR, int(number <= logging.DEBUG)
        )

    @property
    def lowest(self) -> int:
        """The first level of which something is written."""
        chosen = (
            (self.verbose > 0, logging.DEBUG),
            (self.info, logging.INFO),
            (self.warning, logging.WARNING),
            (self.error, logging.ERROR),
        )
        return next((level for wanted, level in chosen if wanted), logging.CRITICAL)

    def wants(self, level: int) -> bool:
        """Whether a line of this level is written. What is critical always is."""
        if level < logging.INFO:
            return self.verbose > 0
        if level < logging.WARNING:
            return self.info
        if level < logging.ERROR:
            return self.warning
        return self.error or level >= logging.CRITICAL


def log_levels() -> LogLevels:
    """What is written now."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            return handler.levels
    return LogLevels.from_level(logging.getLogger(_OURS).getEffectiveLevel())


def change_log_levels(levels: LogLevels) -> None:
    """Write other lines from now on. For a running server; without `configure_logging` before, only the level changes."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.levels = levels
    _set_level(levels.lowest)


def _set_level(number: int) -> None:
    logging.getLogger(_OURS).setLevel(number)
    # Debug is for our own rooms: at that level libraries write what they decode, credentials included.
    logging.getLogger().setLevel(max(number, logging.INFO))


def one_line(text: str) -> str:
    """Escape what a terminal or a line reader would act on: line breaks, escape sequences, direction marks."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        entry: dict[str, Any] = {
            "time": _utc_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in _fields_of(record).items() if name not in entry}
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = "".join(traceback.format_exception(*record.exc_info))
        if record.stack_info:
            entry["stack"] = record.stack_info
        return _to_json(entry)


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, then fields as `name=value`. Tracebacks follow, each line indented by a bar."""

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        level = f"{record.levelname:<8}"
        fields = "".join(f" {one_line(name)}={_text_value(value)}" for name, value in _fields_of(record).items())
        if self._colour:
            paint = next((paint for least, paint in _LEVEL_COLOURS if record.levelno >= least), _DIM)
            level = f"{paint}{level}{_RESET}"
            fields = f"{_DIM}{fields}{_RESET}" if fields else ""
        lines = [f"{_utc_time(record)} {level} {one_line(record.name)}: {one_line(record.getMessage())}{fields}"]
        if record.exc_info and record.exc_info[0] is not None:
            lines += _barred("".join(traceback.format_exception(*record.exc_info)))
        if record.stack_info:
            lines += _barred(record.stack_info)
        return "\n".join(lines)


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that a second `configure_logging` knows which to replace."""

    levels = LogLevels()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if self.levels.wants(record.levelno):
            super().emit(record)


def _level_number(level: str | int) -> int:
    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if number is None:
        raise ValueError(f"log level {level!r} is not known: use debug, info, warning, error or critical")
    return number


def _wants_colour() -> bool:
    # https://no-color.org: set and not empty means no, whatever it is set to.
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _utc_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Context first, then what the call gave with `extra=`, which knows better where both name a field."""
    given = {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
    return {**context.fields(), **given}


def _to_json(entry: dict[str, Any]) -> str:
    try:
        line = orjson.dumps(entry, default=str, option=_JSON_OPTIONS).decode()
    except TypeError:
        tame = {_tame(name): _tame(value) for name, value in entry.items()}
        line = orjson.dumps(tame, default=str, option=_JSON_OPTIONS).decode()
    return line if line.isascii() else line.translate(_UNICODE_LINE_ENDS)


def _tame(value: Any) -> Any:
    """Half a surrogate pair, a number over 64 bits, a loop: JSON cannot have it, but its text is worth a line."""
    try:
        orjson.dumps(value, default=str, option=_JSON_OPTIONS)
    except TypeError:
        return one_line(str(value))
    return value


def _text_value(value: object) -> str:
    text = str(value)
    if _PLAIN_VALUE.fullmatch(text):
        return text
    quoted = one_line(text).replace('"', '\\"')
    return f'"{quoted}"'


def _barred(text: str) -> list[str]:
    # The bar keeps a line break inside an exception's text from looking like a new record.
    return [f"    | {one_line(line)}" for line in text.rstrip("\n").split("\n")]
