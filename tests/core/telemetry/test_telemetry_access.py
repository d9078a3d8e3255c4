# SPDX-License-Identifier: Apache-2.0
"""The access log."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headrace.core.telemetry.logs import (
    JsonFormatter,
    LogLevels,
    TextFormatter,
    bound,
    change_log_levels,
    configure_logging,
    log_access,
)

HEAD = SimpleNamespace(method=b"POST", path=b"/v2/models/m/infer", version="1.1", query=b"token=secret")


def test_a_request_is_one_line_with_fields(caplog):
    caplog.set_level(logging.INFO, "headrace.access")
    log_access("10.0.0.1:5000", HEAD, 200)
    (record,) = caplog.records
    assert record.name == "headrace.access"
    entry = json.loads(JsonFormatter().format(record))
    del entry["time"]
    assert entry == {
        "level": "info",
        "logger": "headrace.access",
        "message": "answered",
        "peer": "10.0.0.1:5000",
        "method": "POST",
        "path": "/v2/models/m/infer",
        "protocol": "HTTP/1.1",
        "status": 200,
    }
    assert TextFormatter().format(record)[24:] == (
        " INFO     headrace.access: answered peer=10.0.0.1:5000 method=POST path=/v2/models/m/infer"
        " protocol=HTTP/1.1 status=200"
    )


def test_the_query_is_not_written(caplog):
    caplog.set_level(logging.INFO, "headrace.access")
    log_access("p", HEAD, 200)
    assert "secret" not in JsonFormatter().format(caplog.records[0])


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_bytes_of_any_kind_stay_on_the_line(caplog, formatter):
    caplog.set_level(logging.INFO, "headrace.access")
    log_access("p", SimpleNamespace(method=b"G\nET", path=b'/a"\r\n b\xff\x1b[2J', version="2"), 400)
    line = formatter.format(caplog.records[0])
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert "xff" in line


def test_nothing_is_read_when_the_level_is_off(caplog):
    caplog.set_level(logging.WARNING, "headrace.access")
    log_access("p", None, 200)
    assert not caplog.records


# A server's own log, which is JSON lines with no other handler, is written without records.


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root, access = logging.getLogger(), logging.getLogger("headrace.access")
    handlers, level, access_level = list(root.handlers), root.level, access.level
    headrace_level = logging.getLogger("headrace").level
    for handler in handlers:
        root.removeHandler(handler)
    access.setLevel(logging.NOTSET)
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    yield stream
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    access.setLevel(access_level)
    logging.getLogger("headrace").setLevel(headrace_level)
    logging.captureWarnings(False)


def only_ours() -> None:
    """Remove what pytest adds for each phase of a test."""
    root = logging.getLogger()
    root.handlers[:] = [handler for handler in root.handlers if isinstance(handler.formatter, JsonFormatter)]


HEADS = (
    HEAD,
    SimpleNamespace(method=b"G\nET", path=b'/a"\r\n b\xff\x1b[2J', version="2"),
    SimpleNamespace(method=b"GET", path="/\u2028\u00e4\u0085".encode(), version="1.1"),
)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("key_name", ["", "alice", 'q"\u2028', "\ud800"])
def test_a_line_is_that_of_a_record(output: io.StringIO, head: SimpleNamespace, key_name: str) -> None:
    only_ours()
    log_access("[::1]:5000", head, 200, key_name)
    quick = output.getvalue()
    output.truncate(0)
    output.seek(0)
    with bound(model="m"):  # a line with bound fields goes by way of a record
        log_access("[::1]:5000", head, 200, key_name)
    slow = output.getvalue()
    assert slow.replace('"model":"m",', "")[35:] == quick[35:]
    assert len(quick.splitlines()) == 1
    assert quick[:9] == slow[:9] == '{"time":"'
    assert len(json.loads(quick)["time"]) == len(json.loads(slow)["time"]) == len("2026-11-19T20:00:00.000Z")


def test_lines_of_one_iteration_are_written_at_its_end_and_before_any_other_line(output: io.StringIO) -> None:
    async def main() -> None:
        only_ours()
        log_access("a", HEAD, 200)
        log_access("b", HEAD, 200)
        assert output.getvalue() == ""
        await asyncio.sleep(0)
        assert [json.loads(line)["peer"] for line in output.getvalue().splitlines()] == ["a", "b"]
        log_access("c", HEAD, 200)
        logging.getLogger("headrace.test").info("later")
        assert [json.loads(line)["message"] for line in output.getvalue().splitlines()[2:]] == ["answered", "later"]
        await asyncio.sleep(0)
        assert len(output.getvalue().splitlines()) == 4

    asyncio.run(main())


def test_levels_and_other_handlers_count_as_for_records(output: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    only_ours()
    change_log_levels(LogLevels(info=False))
    log_access("a", HEAD, 200)
    change_log_levels(LogLevels())
    logging.getLogger("headrace.access").setLevel(logging.INFO)
    assert output.getvalue() == ""
    logging.getLogger().addHandler(caplog.handler)
    log_access("b", HEAD, 200)
    assert [record.peer for record in caplog.records] == ["b"]
    assert len(output.getvalue().splitlines()) == 1


def test_a_stream_that_refuses_fails_no_request(output: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    only_ours()
    output.close()
    log_access("a", HEAD, 200)
    assert "ValueError" in capsys.readouterr().err
