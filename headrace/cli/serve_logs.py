# SPDX-License-Identifier: Apache-2.0
"""From the options about logs and traces to where they go. Triton's words and ours mean the same thing in the end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TextIO

from headrace.api.v2.settings import TraceDefaults
from headrace.cli.flags import Given
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.logs import LogFormat

log = logging.getLogger("headrace.cli")

_FORMATS: dict[str, LogFormat] = {
    "auto": "auto",
    "json": "json",
    "text": "text",
    # Triton's: its own look, and one with the time as it is here.
    "default": "text",
    "ISO8601": "text",
}
_COLLECTOR = "http://localhost:4318/v1/traces"
_MODES = ("triton", "opentelemetry")
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the log goes and what is in it."""

    level: str
    format: LogFormat
    file: str = ""


def log_settings(given: Given) -> LogSettings:
    """The log that the options ask for: Triton's switches leave out levels from below, and verbose adds them again."""
    level = given.text("log-level")
    if given.whole("log-verbose") > 0:
        level = "debug"
    elif not given.truth("log-info"):
        level = "warning" if given.truth("log-warning") else "error" if given.truth("log-error") else "critical"
    form = given.text("log-format")
    if form not in _FORMATS:
        raise InvalidArgument(f"--log-format is auto, json or text, not {form!r}")
    return LogSettings(level, _FORMATS[form], given.text("log-file"))


@contextmanager
def open_log(path: str) -> Iterator[TextIO | None]:
    """The file for the log; None for standard error."""
    if not path:
        yield None
        return
    with ExitStack() as opened:
        try:
            stream = opened.enter_context(open(path, "a", buffering=1, encoding="utf-8"))
        except OSError as error:
            raise InvalidArgument(f"--log-file {path}: {error.strerror}; name a file that can be written") from None
        yield stream


def warn(lines: Iterable[str]) -> None:
    """Log what the user should know of the options."""
    for line in lines:
        log.warning("%s", line)


def trace_settings(given: Given) -> tuple[str, TraceDefaults | None]:
    """The OpenTelemetry collector for spans ("" for none), and Triton's trace settings at the start."""
    common = _entries(given, "")
    endpoint = given.text("trace-endpoint")
    if not (common or _entries(given, "triton") or _entries(given, "opentelemetry")):
        return endpoint, None
    mode = common.get("mode", ["triton"])[-1]
    if mode not in _MODES:
        raise InvalidArgument(f"--trace-config mode is triton or opentelemetry, not {mode!r}")
    trace = TraceDefaults(
        level=_levels(common.get("level", [])),
        rate=_count("rate", common.get("rate", ["1000"])[-1], 1),
        count=_count("count", common.get("count", ["-1"])[-1], -1),
        log_frequency=_count("log-frequency", _entries(given, "triton").get("log-frequency", ["0"])[-1], 0),
        mode=mode,
    )
    if mode == "opentelemetry":
        endpoint = endpoint or _entries(given, mode).get("url", [_COLLECTOR])[-1]
    elif trace.level != ("OFF",) and not endpoint:
        warn(["--trace-config writes no files here: add mode=opentelemetry and opentelemetry,url=URL for spans"])
    return endpoint, trace


def _entries(given: Given, mode: str) -> dict[str, list[str]]:
    """What the options say of one mode, or ("") of all: values by setting."""
    found: dict[str, list[str]] = {}
    for text in (*_old_entries(given), *given.texts("trace-config")):
        front, equals, value = text.partition("=")
        of_mode, comma, setting = front.rpartition(",")
        if not equals or not setting or (comma and of_mode not in _MODES):
            raise InvalidArgument(
                f"--trace-config is SETTING=VALUE, triton,SETTING=VALUE or opentelemetry,SETTING=VALUE, not {text!r}"
            )
        if of_mode == mode:
            found.setdefault(setting, []).append(value)
    return found


def _old_entries(given: Given) -> Iterator[str]:
    """The options that were there before `--trace-config`, in its words."""
    yield from (f"level={level}" for level in given.texts("trace-level"))
    for option, setting in (
        ("trace-file", "triton,file"),
        ("trace-rate", "rate"),
        ("trace-count", "count"),
        ("trace-log-frequency", "triton,log-frequency"),
    ):
        if given.has(option):
            yield f"{setting}={given.text(option)}"


def _levels(texts: list[str]) -> tuple[str, ...]:
    named = [level.upper() for level in texts]
    for level in named:
        if level not in _LEVELS:
            raise InvalidArgument(f"--trace-config level is {', '.join(_LEVELS)}, not {level!r}")
    return tuple(level for level in _LEVELS[1:] if level in named) or _LEVELS[:1]


def _count(setting: str, text: str, least: int) -> int:
    digits = text.removeprefix("-")
    number = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
    if number is None or number < least:
        raise InvalidArgument(f"--trace-config {setting} is a whole number from {least}, not {text!r}")
    return number
