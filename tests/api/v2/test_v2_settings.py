# SPDX-License-Identifier: Apache-2.0
"""Trace and log settings of a running server, with both clients, and that they do what they say."""

from __future__ import annotations

import io
import json
import logging
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException
from v2_servers import ask, functions_served

from headrace.api.v2.settings import TraceDefaults, V2Settings
from headrace.core.telemetry import logs
from support.engines import config_of
from support.serving import Serving

MODELS = [(config_of(name), lambda inputs: {"OUTPUT0": inputs["INPUT0"]}) for name in ("one", "two")]


class CountedSpan:
    def set(self, name: str, value: Any) -> None:
        if name == "model":
            self.models.append(value)

    def end(self, failure: str = "") -> None:
        pass

    def __init__(self, models: list[str]) -> None:
        self.models = models


class CountingTracer:
    """Notes the models whose requests are traced."""

    enabled = True

    def __init__(self) -> None:
        self.models: list[str] = []

    def start(self, name: str, parent: Any = None) -> Any:
        return CountedSpan(self.models)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def plain() -> Iterator[Serving]:
    with functions_served(MODELS) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(plain: Serving, request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = tritonclient.http if request.param == "http" else tritonclient.grpc
    with kind.InferenceServerClient(f"127.0.0.1:{plain.port}") as made:
        yield made


def as_dict(settings: Any) -> dict[str, Any]:
    """The settings as HTTP shows them."""
    if isinstance(settings, dict):
        return settings
    shown: dict[str, Any] = {}
    for name, setting in settings.settings.items():
        if hasattr(setting, "value"):
            shown[name] = list(setting.value) if name == "trace_level" else setting.value[0]
        else:
            shown[name] = getattr(setting, setting.WhichOneof("parameter_choice"))
    return shown


OFF = {
    "trace_file": "",
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_mode": "triton",
}


def test_trace_settings_of_all_and_of_one(client: Any) -> None:
    assert as_dict(client.get_trace_settings()) == OFF
    changed = client.update_trace_settings(settings={"trace_rate": "5", "trace_level": ["TIMESTAMPS", "TENSORS"]})
    now = OFF | {"trace_rate": "5", "trace_level": ["TIMESTAMPS", "TENSORS"]}
    assert as_dict(changed) == as_dict(client.get_trace_settings()) == as_dict(client.get_trace_settings("one")) == now
    own = client.update_trace_settings(model_name="one", settings={"trace_rate": "7", "log_frequency": "3"})
    assert as_dict(own) == now | {"trace_rate": "7", "log_frequency": "3"}
    assert as_dict(client.get_trace_settings("two")) == as_dict(client.get_trace_settings()) == now
    # None takes a setting back: a model's to that of all, that of all to the server's first.
    client.update_trace_settings(model_name="one", settings={"trace_rate": None, "log_frequency": None})
    assert as_dict(client.get_trace_settings("one")) == now
    client.update_trace_settings(settings={"trace_rate": None, "trace_level": None})
    assert as_dict(client.get_trace_settings()) == OFF


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"trace_file": "/etc/passwd"}, "trace file location can not be updated through network protocol"),
        ({"trace_mode": "opentelemetry"}, "trace mode can not be updated"),
        ({"nonsense": "1"}, "unknown trace setting 'nonsense'"),
        ({"trace_level": ["LOUD"]}, "trace_level 'LOUD'"),
        ({"trace_rate": "0"}, "integer of 1 or more"),
        ({"trace_rate": "-5"}, "integer of 1 or more"),
        ({"trace_rate": "fast"}, "an integer"),
        ({"trace_rate": "9" * 30}, "an integer"),
        ({"trace_count": "-2"}, "integer of -1 or more"),
        ({"trace_rate": ["1", "2"]}, "one value"),
    ],
)
def test_wrong_trace_settings(client: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InferenceServerException) as failure:
        client.update_trace_settings(settings={"log_frequency": "9", **settings})
    assert text in failure.value.message()
    assert as_dict(client.get_trace_settings()) == OFF
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_trace_settings("none")


def infer(server: Serving, model: str, times: int) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    for _ in range(times):
        assert ask(server, "POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})[0] == 200


def test_trace_settings_choose_which_requests_are_traced() -> None:
    tracer = CountingTracer()
    with functions_served(MODELS, tracer=tracer) as running:
        path, of_one = "/v2/trace/setting", "/v2/models/one/trace/setting"
        first = ask(running, "GET", path)[1]
        assert (first["trace_level"], first["trace_rate"], first["trace_mode"]) == (
            ["TIMESTAMPS"],
            "1",
            "opentelemetry",
        )
        infer(running, "one", 3)
        assert tracer.models == ["one"] * 3
        ask(running, "POST", path, {"trace_rate": "3"})
        infer(running, "two", 7)
        assert tracer.models[3:] == ["two"] * 3
        ask(running, "POST", of_one, {"trace_rate": 1, "trace_count": "2"})
        infer(running, "one", 5)
        assert tracer.models[6:] == ["one"] * 2
        ask(running, "POST", path, {"trace_level": ["OFF"]})
        ask(running, "POST", of_one, {"trace_level": ["TIMESTAMPS"]})
        infer(running, "two", 3)
        infer(running, "one", 1)
        assert tracer.models[8:] == ["one"]
        ask(running, "POST", of_one, {"trace_level": "OFF"})
        infer(running, "one", 2)
        assert len(tracer.models) == 9
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
            client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.int32))
            client.infer("two", [tensor])
            assert tracer.models[9:] == ["two"]
            answers: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer("one", [tensor])
            client.async_stream_infer("two", [tensor])
            assert [answers.get(timeout=30)[1] for _ in range(2)] == [None, None]
            client.stop_stream()
        # The model with settings of its own is still off.
        assert tracer.models[10:] == ["two"]


def test_the_first_trace_settings_are_the_servers() -> None:
    settings = V2Settings(trace=TraceDefaults(("TENSORS",), 50, 10, 5, "opentelemetry"))
    with functions_served(MODELS, settings) as running:
        assert ask(running, "GET", "/v2/trace/setting")[1] == {
            "trace_file": "",
            "trace_level": ["TENSORS"],
            "trace_rate": "50",
            "trace_count": "10",
            "log_frequency": "5",
            "trace_mode": "opentelemetry",
        }


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What our handler writes; everything as it was afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before = (list(root.handlers), root.level, ours.level)
    stream = io.StringIO()
    logs.configure_logging("info", "text", stream)
    yield stream
    root.handlers, root.level, ours.level = before[0], before[1], before[2]
    logging.captureWarnings(False)


def written(stream: io.StringIO) -> list[str]:
    stream.seek(0)
    stream.truncate()
    ours, others = logging.getLogger("headrace.test"), logging.getLogger("a.library")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        ours.log(level, "ours")
        others.log(level, "others")
    words = [line.split() for line in stream.getvalue().splitlines()]
    return [f"{name.removesuffix(':').split('.')[0][0]}{level[0]}" for _, level, name, *_ in words if name[:1] in "ha"]


ALL = ["hI", "aI", "hW", "aW", "hE", "aE", "hC", "aC"]


def test_log_settings_change_what_is_written(client: Any, lines: io.StringIO) -> None:
    first = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert as_dict(client.get_log_settings()) == first
    assert written(lines) == ALL
    assert as_dict(client.update_log_settings({"log_info": False})) == first | {"log_info": False}
    assert written(lines) == ["hW", "aW", "hE", "aE", "hC", "aC"]
    client.update_log_settings({"log_info": True, "log_warning": False, "log_format": "ISO8601"})
    now = first | {"log_warning": False, "log_format": "ISO8601"}
    assert as_dict(client.get_log_settings()) == now
    assert written(lines) == ["hI", "aI", "hE", "aE", "hC", "aC"]
    # Debug is for our own rooms.
    client.update_log_settings({"log_verbose_level": 2, "log_warning": True})
    assert written(lines) == ["hD", *ALL]
    client.update_log_settings({"log_verbose_level": 0, "log_info": False, "log_warning": False, "log_error": False})
    assert written(lines) == ["hC", "aC"]
    client.update_log_settings({"log_info": True, "log_warning": True, "log_error": True, "log_format": "default"})
    assert written(lines) == ALL


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"log_file": "/tmp/x"}, "log file location can not be updated"),
        ({"log_format": "other"}, "log_format must be one of"),
        ({"nonsense": True}, "unknown log setting 'nonsense'"),
    ],
)
def test_wrong_log_settings(client: Any, lines: io.StringIO, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InferenceServerException) as failure:
        client.update_log_settings({"log_warning": False, **settings})
    assert text in failure.value.message()
    assert as_dict(client.get_log_settings())["log_warning"] is True


@pytest.mark.parametrize("settings", [{"log_info": 1}, {"log_info": "false"}, {"log_verbose_level": True}])
def test_log_settings_of_the_wrong_type(plain: Serving, lines: io.StringIO, settings: dict[str, Any]) -> None:
    status, answer = ask(plain, "POST", "/v2/logging", settings)
    assert status == 400 and next(iter(settings)) in answer["error"]
    assert written(lines) == ALL


def test_a_log_setting_without_a_value_stays_as_it_is(client: Any, lines: io.StringIO) -> None:
    assert as_dict(client.update_log_settings({"log_info": None, "log_error": None}))["log_info"] is True
    assert written(lines) == ALL


@pytest.mark.parametrize("path", ["/v2/logging", "/v2/trace/setting"])
@pytest.mark.parametrize("body", [b"{", b"[]", b"5", json.dumps({"trace_rate": {}, "log_info": None}).encode()])
def test_text_that_is_not_a_setting(plain: Serving, path: str, body: bytes) -> None:
    assert ask(plain, "POST", path, body)[0] == 400
