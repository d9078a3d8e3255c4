# SPDX-License-Identifier: Apache-2.0
"""Logs as JSON lines or as text, the fields that every line carries, and the access log.

A program calls `configure_logging` once; everything else uses `logging.getLogger`. Each record is one line, whatever
a client sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Protocol, TextIO, TypedDict, Unpack, cast

import orjson

LogFormat = Literal["auto", "json", "text"]

_HEADRACE_LOGGER = "headrace"
_NOISY_LIBRARIES = ("httpx", "httpx2")
"""Libraries that log every request at level info: only their warnings are written."""
_FATAL = "headrace_fatal"
"""The attribute of a record that says why the program ends."""
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", _FATAL}
_JSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
# Valid in JSON, but some programs treat them as line ends.
_UNICODE_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_PLAIN_VALUE = re.compile(r"[\w.:/+@-]+")

_RESET, _DIM = "\x1b[0m", "\x1b[2m"
_LEVEL_COLOURS = ((logging.ERROR, "\x1b[31m"), (logging.WARNING, "\x1b[33m"), (logging.INFO, "\x1b[32m"))


def configure_logging(level: str | int = "info", format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send every logger to `stream` (standard error); "auto" is text on a terminal and JSON elsewhere.

    May be called again: the handler of the last call is replaced, other handlers stay.
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
        formatter = TextFormatter(colour=terminal and colour_allowed())
    handler = _Handler(target)
    handler.setFormatter(formatter)
    handler.levels = LogLevels.from_level(number)
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    _set_level(number)
    for name in _NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


@dataclass(frozen=True, slots=True)
class LogLevels:
    """Which levels are written; each is switched separately, as in Triton's logging extension."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0
    """Over 0: also Headrace's own debug lines."""

    @classmethod
    def from_level(cls, number: int) -> LogLevels:
        """Write a level and all above it."""
        return cls(
            number <= logging.INFO, number <= logging.WARNING, number <= logging.ERROR, int(number <= logging.DEBUG)
        )

    @property
    def lowest(self) -> int:
        """The lowest level that is written."""
        chosen = (
            (self.verbose > 0, logging.DEBUG),
            (self.info, logging.INFO),
            (self.warning, logging.WARNING),
            (self.error, logging.ERROR),
        )
        return next((level for enabled, level in chosen if enabled), logging.CRITICAL)

    def includes(self, level: int) -> bool:
        """Return whether a line of this level is written; critical ones always are."""
        if level < logging.INFO:
            return self.verbose > 0
        if level < logging.WARNING:
            return self.info
        if level < logging.ERROR:
            return self.warning
        return self.error or level >= logging.CRITICAL


def log_levels() -> LogLevels:
    """Return the levels that are written now."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            return handler.levels
    return LogLevels.from_level(logging.getLogger(_HEADRACE_LOGGER).getEffectiveLevel())


def change_log_levels(levels: LogLevels) -> None:
    """Change the levels of a running server. Without `configure_logging` before, only the lowest level changes."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            handler.levels = levels
    _set_level(levels.lowest)


def _set_level(number: int) -> None:
    logging.getLogger(_HEADRACE_LOGGER).setLevel(number)
    # Debug only for Headrace: at that level libraries log what they decode, credentials included.
    logging.getLogger().setLevel(max(number, logging.INFO))


def one_line(text: str) -> str:
    """Escape line breaks, terminal escape sequences and direction marks."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def log_fatal(log: logging.Logger, message: str) -> None:
    """Log why the program ends. On standard error it is one plain line, whatever the format of the log."""
    log.critical("%s", message, extra={_FATAL: True})
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]
    if handlers and not any(handler.is_plain for handler in handlers):
        sys.stderr.write(f"error: {one_line(message)}\n")


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
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
    """Time, level, logger, message, then fields as `name=value`; each line of a traceback starts with a bar."""

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line, with indented lines for a traceback."""
        level = f"{record.levelname:<8}"
        fields = "".join(f" {one_line(name)}={_text_value(value)}" for name, value in _fields_of(record).items())
        if self._colour:
            paint = next((paint for minimum, paint in _LEVEL_COLOURS if record.levelno >= minimum), _DIM)
            level = f"{paint}{level}{_RESET}"
            fields = f"{_DIM}{fields}{_RESET}" if fields else ""
        lines = [f"{_utc_time(record)} {level} {one_line(record.name)}: {one_line(record.getMessage())}{fields}"]
        if record.exc_info and record.exc_info[0] is not None:
            lines += _with_margin("".join(traceback.format_exception(*record.exc_info)))
        if record.stack_info:
            lines += _with_margin(record.stack_info)
        return "\n".join(lines)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that a second `configure_logging` replaces."""

    levels = LogLevels()

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._waiting: list[str] = []
        """Lines of the access log that this iteration of the event loop writes at its end, in one call."""

    def write_soon(self, line: str) -> None:
        """Write a line at the end of the event loop's iteration, and before any other line."""
        self._waiting.append(line)
        if len(self._waiting) == 1:
            try:
                asyncio.get_running_loop().call_soon(self.flush)
            except RuntimeError:  # no event loop runs here
                self.flush()

    def flush(self) -> None:
        """Write the lines that wait, and all that the stream holds."""
        with self.lock or nullcontext():
            if self._waiting:
                lines, self._waiting = self._waiting, []
                try:
                    self.stream.write("".join(lines))
                except Exception:
                    self.handleError(logging.makeLogRecord({"name": _access_log.name, "msg": "answered"}))
        super().flush()

    @property
    def is_plain(self) -> bool:
        """Whether it writes to standard error, perhaps beside progress bars, where a person reads why a program ends."""
        return self.stream is sys.stderr or self.stream.isatty()

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        if self.is_plain and hasattr(record, _FATAL):
            return f"error: {one_line(record.getMessage())}"
        return super().format(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record if its level is switched on."""
        if self.levels.includes(record.levelno):
            if self._waiting:
                self.flush()
            super().emit(record)


def _level_number(level: str | int) -> int:
    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if number is None:
        raise ValueError(f"log level {level!r} is not known: use debug, info, warning, error or critical")
    return number


def colour_allowed() -> bool:
    """Return whether output may have colours, if it goes to a terminal."""
    # https://no-color.org: any non-empty value disables colour.
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _utc_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of the context and those of `extra=`, which take precedence."""
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
    return {**fields(), **extra}


def _to_json(entry: dict[str, Any]) -> str:
    try:
        line = orjson.dumps(entry, default=str, option=_JSON_OPTIONS).decode()
    except TypeError:
        safe = {_json_safe(name): _json_safe(value) for name, value in entry.items()}
        line = orjson.dumps(safe, default=str, option=_JSON_OPTIONS).decode()
    return line if line.isascii() else line.translate(_UNICODE_LINE_ENDS)


def _json_safe(value: Any) -> Any:
    """Replace a value that JSON cannot hold (half a surrogate pair, a number over 64 bits, a loop) by its text."""
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


def _with_margin(text: str) -> list[str]:
    # With the bar, a line break inside an exception's text does not look like a new record.
    return [f"    | {one_line(line)}" for line in text.rstrip("\n").split("\n")]


class Fields(TypedDict, total=False):
    """Fields that can be bound to the current task."""

    request_id: str
    model: str
    version: str
    job: str


# One variable for all fields: binding three costs as much as binding one.
_fields: ContextVar[Mapping[str, str]] = ContextVar("headrace_fields", default=MappingProxyType({}))


def fields() -> Mapping[str, str]:
    """Return the fields that are bound here, by name."""
    return _fields.get()


def bind(**values: Unpack[Fields]) -> None:
    """Set fields for the rest of this task or callback."""
    _fields.set(_with(values))


class bound:  # noqa: N801 - lower case like `contextlib.suppress`: it is used as a verb
    """`with bound(model="m"):` sets fields inside the block and restores them after it."""

    __slots__ = ("_token", "_values")

    def __init__(self, **values: Unpack[Fields]) -> None:
        self._values = values

    def __enter__(self) -> None:
        """Set the fields."""
        self._token: Token[Mapping[str, str]] = _fields.set(_with(self._values))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the fields."""
        _fields.reset(self._token)


def _with(values: Fields) -> Mapping[str, str]:
    return {**_fields.get(), **cast("Mapping[str, str]", values)}


_access_log = logging.getLogger("headrace.access")
_headrace_log = logging.getLogger(_HEADRACE_LOGGER)


class Head(Protocol):
    """What the access log reads of a request's head."""

    @property
    def method(self) -> bytes:
        """The method, as sent."""

    @property
    def path(self) -> bytes:
        """The path, as sent, without the query."""

    @property
    def version(self) -> str:
        """The HTTP version: "1.1" or "2"."""


def log_access(peer: str, head: Head, status: int, key_name: str = "") -> None:
    """Write one line for a finished request. The query is left out: it may contain keys and tokens.

    `key_name` is the name of the API key, never the key.
    """
    if not _access_log.isEnabledFor(logging.INFO):
        return
    handler = _quick_handler()
    if handler is not None and not _fields.get():
        if handler.levels.info:
            named = f',"key_name":{_json_text(key_name)}' if key_name else ""
            answered = _answered(head.method, head.path, head.version)
            handler.write_soon(f"{_access_start()}{_json_text(peer)}{answered}{status:d}{named}}}\n")
        return
    details = {
        "peer": peer,
        "method": _text(head.method),
        "path": _text(head.path),
        "protocol": f"HTTP/{head.version}",
        "status": status,
    }
    if key_name:
        details["key_name"] = key_name
    _access_log.info("answered", extra=details)


# Python's logging takes longer for a line than the server for its request. So where the log is JSON lines and has no
# other handler, as in a server, lines of the access log are put together from remembered pieces; else each is a record.


def _quick_handler() -> _Handler | None:
    """Return the one handler that would get a record of the access log, if it writes JSON."""
    handlers = logging.root.handlers
    if len(handlers) != 1 or _access_log.handlers or _headrace_log.handlers or _access_log.filters:
        return None
    handler = handlers[0]
    return handler if type(handler) is _Handler and type(handler.formatter) is JsonFormatter else None


def _access_start() -> str:
    """Return the beginning of a line of the access log, up to the peer."""
    now = time.time()
    second = int(now)
    return f'{{"time":"{_second(second)}.{int((now - second) * 1000):03d}{_ACCESS_START}'


_ACCESS_START = 'Z","level":"info","logger":"headrace.access","message":"answered","peer":'


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(maxsize=1024)
def _json_text(text: str) -> str:
    return _to_json({"": text})[4:-1]


@lru_cache(maxsize=1024)
def _answered(method: bytes, path: bytes, version: str) -> str:
    """Return the middle of a line of the access log, up to the status."""
    fields = {"method": _text(method), "path": _text(path), "protocol": f"HTTP/{version}"}
    return f',{_to_json(fields)[1:-1]},"status":'


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
