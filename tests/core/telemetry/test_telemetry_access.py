# SPDX-License-Identifier: Apache-2.0
"""The access log."""

import json
import logging
from types import SimpleNamespace

import pytest

from headrace.core.telemetry.logs import JsonFormatter, TextFormatter, log_access

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
