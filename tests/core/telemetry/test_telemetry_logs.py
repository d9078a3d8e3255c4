# SPDX-License-Identifier: Apache-2.0
"""Log lines: real JSON, one record per line, whatever a client puts in."""

import io
import json
import logging
import subprocess
import sys
import warnings
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.telemetry.logs import (
    JsonFormatter,
    LogFormat,
    TextFormatter,
    bound,
    configure_logging,
    log_fatal,
    one_line,
)

HOSTILE = 'a\n2024-01-01T00:00:00.000Z ERROR   headrace: forged\r\x1b[2J"quote" \\ \x85 \u2028 \u202e \x00'


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def restored_logging():
    """Undo what `configure_logging` does to the process."""
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before = root.level, list(root.handlers), ours.level
    yield
    logging.captureWarnings(False)
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    ours.setLevel(before[2])


def lines_of(stream):
    """Split as the strictest reader would: at everything that anyone calls a line break."""
    return stream.getvalue().splitlines()


def written(format, *args, stream=None, level=logging.INFO, **kwargs):
    stream = stream or io.StringIO()
    configure_logging("debug", format, stream)
    logging.getLogger("headrace.test").log(level, *args, **kwargs)
    return lines_of(stream)


def test_a_json_line_has_the_fields():
    (line,) = written("json", "loaded %s in %d s", "m", 3)
    entry = json.loads(line)
    moment = datetime.fromisoformat(entry.pop("time"))
    assert moment.tzinfo == UTC
    assert entry == {"level": "info", "logger": "headrace.test", "message": "loaded m in 3 s"}


def test_the_time_is_utc_to_the_millisecond():
    record = logging.makeLogRecord({"created": 1_700_000_000.1239, "msg": "x", "name": "n"})
    assert json.loads(JsonFormatter().format(record))["time"] == "2023-11-14T22:13:20.123Z"
    assert TextFormatter().format(record).startswith("2023-11-14T22:13:20.123Z ")


def test_context_and_extra_fields_are_on_the_line():
    with bound(request_id="r-1", model="m", version="2"):
        (line,) = written("json", "x", extra={"bytes": 5, "model": "given", "nested": {"a": [1, None]}})
    entry = json.loads(line)
    assert entry["request_id"] == "r-1"
    assert entry["version"] == "2"
    assert entry["model"] == "given"
    assert entry["bytes"] == 5
    assert entry["nested"] == {"a": [1, None]}


def test_extra_fields_cannot_pose_as_ours():
    (line,) = written("json", "true", extra={"level": "forged", "time": "forged", "logger": "forged"})
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("info", "headrace.test", "true")
    assert entry["time"] != "forged"


@pytest.mark.parametrize("format", ["json", "text"])
def test_an_exception_is_logged_with_its_causes(format):
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer") from None
    except ValueError:
        lines = written(format, "failed", exc_info=True)
    if format == "json":
        (line,) = lines
        exception = json.loads(line)["exception"]
        assert exception.startswith("Traceback (most recent call last):\n")
        assert exception.endswith("ValueError: outer\n")
    else:
        assert lines[0].endswith(" headrace.test: failed")
        assert lines[1] == "    | Traceback (most recent call last):"
        assert lines[-1] == "    | ValueError: outer"


@pytest.mark.parametrize("format", ["json", "text"])
def test_without_an_exception_there_is_no_field(format):
    (line,) = written(format, "fine", exc_info=True)
    assert "None" not in line
    assert "exception" not in line


@pytest.mark.parametrize("format", ["json", "text"])
def test_a_stack_is_logged_when_requested(format):
    lines = written(format, "here", stack_info=True)
    assert "test_a_stack_is_logged_when_requested" in "".join(lines)
    assert format == "text" or json.loads(lines[0])["stack"].startswith("Stack (most recent call last):")


@pytest.mark.parametrize("place", ["message", "argument", "extra value", "extra name", "context"])
@pytest.mark.parametrize("format", ["json", "text"])
def test_a_hostile_text_stays_on_its_line(format, place):
    message, args, extra, request_id = "x", (), {}, "r"
    if place == "message":
        message = HOSTILE.replace("%", "%%")
    elif place == "argument":
        message, args = "%s", (HOSTILE,)
    elif place == "extra value":
        extra = {"path": HOSTILE}
    elif place == "extra name":
        extra = {HOSTILE: "x"}
    else:
        request_id = HOSTILE
    with bound(request_id=request_id):
        (line,) = written(format, message, *args, extra=extra)
    assert "\x1b" not in line
    if format == "json":
        entry = json.loads(line)
        document = {"message": entry["message"], "extra value": entry.get("path"), "context": entry["request_id"]}
        document |= {"argument": entry["message"], "extra name": HOSTILE if HOSTILE in entry else None}
        assert document[place] == HOSTILE
    else:
        assert line.isprintable()


def test_a_hostile_exception_stays_behind_the_bar():
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        lines = written("text", "failed", exc_info=True)
    assert all(line.startswith("    | ") and line.isprintable() for line in lines[1:])


@given(st.text(st.characters(exclude_categories=())), st.dictionaries(st.text(min_size=1), st.text()))
def test_any_text_gives_one_line_of_json(message, fields):
    record = logging.makeLogRecord({"msg": "%s", "args": (message,)} | {f"x_{name}": fields[name] for name in fields})
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    entry = json.loads(line)
    assert {f"x_{name}" for name in fields} <= set(entry)
    try:
        message.encode()
    except UnicodeEncodeError:
        assert entry["message"] == one_line(message)
    else:
        assert entry["message"] == message


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_becomes_printable(text):
    assert one_line(text).isprintable()
    assert one_line(one_line(text)) == one_line(text)
    assert text.isprintable() <= (one_line(text) == text)


class Loop(dict):
    def __str__(self):
        return "a loop"


def test_values_that_json_lacks_are_still_logged():
    loop = Loop()
    loop["again"] = loop
    plain = {"path": io, "number": np.float32(0.5), "moment": datetime(2024, 1, 2, tzinfo=UTC), 5: "key"}
    entry = json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "x", "plain": plain})))
    assert entry["plain"] == {
        "path": str(io),
        "number": 0.5,
        "moment": "2024-01-02T00:00:00+00:00",
        "5": "key",
    }
    for odd, told in ((loop, "a loop"), (1 << 80, str(1 << 80)), ("\ud800", "\\ud800")):
        entry = json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "x", "odd": odd, "fine": 5})))
        assert (entry["odd"], entry["fine"]) == (told, 5)


def test_a_field_name_that_is_not_unicode_is_escaped():
    entry = json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": "x", "\ud800": 5})))
    assert entry["\\ud800"] == 5


def test_a_text_line_reads_well():
    with bound(model="m"):
        (line,) = written("text", "loaded", extra={"note": 'two "words"', "bytes": 5, "path": "/a/b-1.5:c"})
    assert line[24:] == r' INFO     headrace.test: loaded model=m note="two \"words\"" bytes=5 path=/a/b-1.5:c'


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": ""}, True),
        (Terminal, {"NO_COLOR": "0"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, stream, environment, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (line,) = written("text", "x", stream=stream(), level=logging.WARNING, extra={"a": 1})
    assert ("\x1b[33mWARNING " in line) == ("\x1b" in line) == coloured
    assert not coloured or line.count("\x1b[0m") == 2


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_auto_is_text_for_people_and_json_for_machines(monkeypatch, stream):
    monkeypatch.setenv("NO_COLOR", "1")
    (line,) = written("auto", "x", stream=stream())
    assert line.startswith("{") == (stream is io.StringIO)


def test_standard_error_is_the_default(capsys):
    configure_logging(format="json")
    logging.getLogger("headrace").info("here")
    captured = capsys.readouterr()
    assert json.loads(captured.err)["message"] == "here"
    assert captured.out == ""


def test_configuring_again_replaces_ours_and_leaves_others():
    other = logging.NullHandler()
    logging.getLogger().addHandler(other)
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", "json", first)
    configure_logging("warning", "json", second)
    logging.getLogger("headrace").info("quiet")
    logging.getLogger("headrace").warning("loud")
    assert first.getvalue() == ""
    assert [json.loads(line)["message"] for line in lines_of(second)] == ["loud"]
    assert other in logging.getLogger().handlers


def test_debug_is_ours_alone():
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    logging.getLogger("headrace.wire").debug("ours")
    logging.getLogger("hpack").debug("secret header")
    logging.getLogger("hpack").info("theirs")
    assert [json.loads(line)["message"] for line in lines_of(stream)] == ["ours", "theirs"]


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_every_request_of_an_http_client_is_not_news(library):
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    logging.getLogger(library).info("HTTP Request: GET https://...")
    logging.getLogger(library).warning("a warning")
    assert [json.loads(line)["message"] for line in lines_of(stream)] == ["a warning"]


def test_a_higher_level_is_everyones():
    stream = io.StringIO()
    configure_logging(logging.ERROR, "json", stream)
    logging.getLogger("headrace").warning("no")
    logging.getLogger("other").warning("no")
    assert stream.getvalue() == ""


def test_warnings_are_log_lines():
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("info", "json", stream)
        warnings.warn("old\nthing", DeprecationWarning, stacklevel=1)
    (line,) = lines_of(stream)
    assert json.loads(line)["logger"] == "py.warnings"


@pytest.mark.parametrize(("level", "format"), [("loud", "json"), ("", "json"), ("info", "yaml"), ("info", "")])
def test_unknown_settings_are_refused_and_change_nothing(level, format):
    before = list(logging.getLogger().handlers)
    with pytest.raises(ValueError, match="is not known: use "):
        configure_logging(level, format, io.StringIO())
    assert logging.getLogger().handlers == before


def test_importing_configures_nothing():
    # In a process of its own: in this one, tests have configured logs.
    script = "import logging, headrace.core.telemetry.logs; print(logging.getLogger().handlers)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_fatal_error_is_one_plain_line_on_standard_error(
    log_format: LogFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("critical", log_format)
    log_fatal(logging.getLogger("headrace.apps"), "no folder\nhere")
    assert capsys.readouterr().err == "error: no folder\\nhere\n"


def test_a_fatal_error_is_in_a_log_file_and_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    configure_logging("info", "json", file)
    log_fatal(logging.getLogger("headrace.apps"), "no folder")
    assert capsys.readouterr().err == "error: no folder\n"
    assert json.loads(file.getvalue()).items() >= {"level": "critical", "message": "no folder"}.items()
