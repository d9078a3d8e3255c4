# SPDX-License-Identifier: Apache-2.0
"""Health, status, profile and the paths that do not exist, over HTTP."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from v1_site import TrtisSite, ask, infer, make_repository

from headrace.api.v1 import http
from headrace.api.v1.messages import message_class
from headrace.api.v1.status import V1Settings
from headrace.core.clock import ManualClock
from support.serving import Serving, serving

SINGLE_TEXT = """id: "inference:0"
version: "0.7.0"
uptime_ns: N
model_status {
  key: "single"
  value {
    config {
      name: "single"
      version_policy {
        latest {
          num_versions: 1
        }
      }
      input {
        name: "A"
        data_type: TYPE_FP16
        dims: 3
      }
      output {
        name: "X"
        data_type: TYPE_FP16
        dims: 3
      }
      instance_group {
        name: "single"
        count: 1
        kind: KIND_CPU
      }
      backend: "identity"
    }
    version_status {
      key: 1
      value {
        ready_state: MODEL_READY
      }
    }
  }
}
ready_state: SERVER_READY
"""


def test_the_status_text_is_what_the_guide_prints(site: TrtisSite, server: Serving) -> None:
    answer = ask(server, "GET", "/api/status/single")
    assert answer.code == 200
    assert answer.fields["content-type"].startswith("text/plain")
    text = re.sub(r"uptime_ns: \d+", "uptime_ns: N", answer.body.decode())
    # How often status and health were asked for depends on the tests before.
    text = re.sub(r"(status|health)_stats \{\n.*?\n\}\n", "", text, flags=re.DOTALL)
    assert text == SINGLE_TEXT


def test_the_status_has_every_model_and_why_one_is_not_there(server: Serving) -> None:
    status = message_class("ServerStatus").FromString(ask(server, "GET", "/api/status?format=binary").body)
    assert sorted(status.model_status) == ["broken", "pair", "resnet", "single", "stateful", "variable", "words"]
    assert sorted(status.model_status["resnet"].version_status) == [1, 3]
    assert status.model_status["resnet"].config.output[0].label_filename == "labels.txt"
    (broken,) = status.model_status["broken"].version_status.values()
    assert broken.ready_state == 2
    assert "did you mean 'dynamic_batching'" in broken.ready_state_reason.message
    assert status.ready_state == 2


def test_the_text_names_no_data_type_unknown_to_the_oldest_clients(server: Serving) -> None:
    text = ask(server, "GET", "/api/status/words").body
    assert b'name: "A"' in text and b"TYPE_STRING" not in text
    binary = ask(server, "GET", "/api/status/words?format=binary").body
    assert message_class("ServerStatus").FromString(binary).model_status["words"].config.input[0].data_type == 13


def test_forms_of_the_status(server: Serving) -> None:
    binary = ask(server, "GET", "/api/status/pair?format=binary")
    assert binary.fields["content-type"] == "application/octet-stream"
    assert message_class("ServerStatus").FromString(binary.body).model_status["pair"].config.max_batch_size == 4
    shown = ask(server, "GET", "/api/status/pair?format=json")
    assert shown.fields["content-type"] == "application/json"
    assert json.loads(shown.body)["model_status"]["pair"]["config"]["max_batch_size"] == 4
    for other in ("?format=text", "?format=xml", "?form=binary", "?format="):
        assert ask(server, "GET", f"/api/status/pair{other}").body.startswith(b'id: "inference:0"\n')
    assert ask(server, "GET", "/api/status/").body.count(b"\nmodel_status {") == 7


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_status_is_the_same_as_a_short_one(server: Serving, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """It is written in another thread."""
    ask(server, "GET", "/api/status/pair")  # a status tells how often it was asked for, from the second time on
    short = ask(server, "GET", f"/api/status/pair?format={form}")
    monkeypatch.setattr(http, "_SYNC_FORMAT_BYTES", 0)
    long = ask(server, "GET", f"/api/status/pair?format={form}")
    assert long.outcome == (200, "SUCCESS", "")
    assert long.fields["content-type"] == short.fields["content-type"]
    assert re.sub(rb"\d+", b"", long.body) == re.sub(rb"\d+", b"", short.body)
    monkeypatch.setattr(http, "many_lines", None)
    monkeypatch.setattr(http, "_json", None)
    failed = ask(server, "GET", f"/api/status/pair?format={form}")
    assert failed.code == 500


def test_an_unknown_model_has_no_status(server: Serving) -> None:
    answer = ask(server, "GET", "/api/status/x")
    assert answer.outcome == (400, "NOT_FOUND", "no status available for unknown model 'x'")
    assert answer.fields["nv-status"].startswith(
        'code: NOT_FOUND msg: "no status available for unknown model \\\'x\\\'" server_id: "inference:0" request_id: '
    )
    assert answer.body == b""


def test_request_ids_count_up(server: Serving) -> None:
    requests = ["/api/status", "/api/health/live", "/api/status/x", "/api/profile?cmd=start", "/api/status/pair"]
    numbers = [ask(server, "GET", path).status.request_id for path in requests]
    assert numbers == list(range(numbers[0], numbers[0] + len(requests)))
    assert ask(server, "GET", "/api/status").fields["nv-status"].startswith('code: SUCCESS server_id: "inference:0" ')


def test_health(server: Serving) -> None:
    live = ask(server, "GET", "/api/health/live")
    assert live.outcome == (200, "SUCCESS", "")
    assert live.body == b""
    # A model is broken: strictly speaking, the server is not ready.
    assert ask(server, "GET", "/api/health/ready").outcome == (400, "SUCCESS", "")
    assert ask(server, "GET", "/api/health").outcome == (400, "UNKNOWN", "unknown health mode ''")


def test_profiling_is_off(server: Serving) -> None:
    for command in ("?cmd=start", "?cmd=stop", "", "/?cmd=start"):
        answer = ask(server, "GET", f"/api/profile{command}")
        assert answer.outcome == (400, "UNSUPPORTED", "Profile API not enabled")


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/api/health/other", 400),
        ("GET", "/api", 400),
        ("GET", "/api/", 400),
        ("GET", "/api/nothing", 400),
        ("POST", "/api/infer", 400),
        ("POST", "/api/infer/pair/one", 400),
        ("POST", "/api/infer/pair/1/2", 400),
        ("POST", "/api/modelcontrol/reload/pair", 400),
        ("POST", "/api/sharedmemorycontrol/register/a/b/c/d", 400),
        ("GET", "/api/profile/other", 400),
        ("POST", "/api/health/live", 405),
        ("POST", "/api/status", 405),
        ("POST", "/api/profile", 405),
        ("GET", "/api/infer/pair", 405),
        ("PUT", "/api/infer/pair/1", 405),
        ("GET", "/api/modelcontrol/load/pair", 405),
        ("DELETE", "/api/repository/index", 405),
    ],
)
def test_what_does_not_exist_is_refused_without_a_status(server: Serving, method: str, path: str, code: int) -> None:
    answer = ask(server, method, path, b"x" * 100_000 if method in ("POST", "PUT") else None)
    assert answer.code == code
    assert "nv-status" not in answer.fields
    assert answer.body == b""


def test_what_was_computed_is_counted_by_batch_size(server: Serving) -> None:
    row = np.arange(6, dtype=np.float32).tobytes()
    header = 'batch_size: {} input {{ name: "A" dims: 3 dims: 2 }} output {{ name: "X" }}'
    for rows in (1, 2, 2):
        assert infer(server, "variable", row * rows, header.format(rows)).code == 200
    assert infer(server, "variable", row, header.format(9)).code == 400
    status = message_class("ServerStatus").FromString(ask(server, "GET", "/api/status/variable?format=binary").body)
    version = status.model_status["variable"].version_status[1]
    counts = {rows: (stats.success.count, stats.failed.count) for rows, stats in version.infer_stats.items()}
    assert counts == {0: (0, 1), 1: (1, 0), 2: (2, 0)}
    assert version.infer_stats[2].compute.count == 2
    assert version.infer_stats[2].success.total_time_ns >= version.infer_stats[2].compute.total_time_ns > 0
    assert version.model_inference_count == 5
    assert version.last_inference_timestamp_milliseconds > 1_700_000_000_000
    assert status.status_stats.success.count > 0


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[tuple[TrtisSite, Serving, ManualClock]]:
    clock = ManualClock()
    settings = V1Settings("me:7", "1.2.3", clock, allow_profiling=True)
    site = TrtisSite(make_repository(tmp_path / "models"), start=False, settings=settings)
    with serving(site.build) as server:
        yield site, server, clock
        server.call(site.engine.close, 5)


def test_a_server_reports_that_it_is_starting_ready_and_stopping(
    starting: tuple[TrtisSite, Serving, ManualClock],
) -> None:
    site, server, clock = starting
    header = 'batch_size: 1 input { name: "A" byte_size: 6 } output { name: "X" byte_size: 6 }'

    def state() -> str:
        return ask(server, "GET", "/api/status").body.decode().rsplit("ready_state: ", 1)[1].split("\n")[0]

    assert state() == "SERVER_INITIALIZING"
    assert ask(server, "GET", "/api/health/live").code == 200
    assert ask(server, "GET", "/api/health/ready").code == 400
    assert infer(server, "single", bytes(6), header).outcome == (400, "UNAVAILABLE", "Server not ready")
    server.call(site.engine.start)
    clock.advance(2.5)
    assert state() == "SERVER_READY"
    answer = infer(server, "single", bytes(6), header)
    assert answer.code == 200
    assert answer.status.server_id == "me:7"
    text = ask(server, "GET", "/api/status").body.decode()
    assert text.startswith('id: "me:7"\nversion: "1.2.3"\nuptime_ns: 2500000000\n')
    site.engine.plane.accepting = False
    assert state() == "SERVER_EXITING"
    # What still arrives is served: nothing that was accepted is lost.
    assert infer(server, "single", bytes(6), header).code == 200


def test_profiling_may_be_allowed_and_then_does_nothing(starting: tuple[TrtisSite, Serving, ManualClock]) -> None:
    _, server, _ = starting
    assert ask(server, "GET", "/api/profile?cmd=start").outcome == (200, "SUCCESS", "")
    assert ask(server, "GET", "/api/profile?cmd=dance").outcome == (
        400,
        "INVALID_ARG",
        "unknown profile command 'dance': use 'start' or 'stop'",
    )
    assert b"profile_stats {\n  success {\n    count: 1\n" in ask(server, "GET", "/api/status").body


def test_an_unexpected_exception_is_reported_without_its_text(
    site: TrtisSite, server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def states() -> None:
        failed.set()
        raise RuntimeError("a secret")

    monkeypatch.setattr(site.engine.plane, "states", states)
    answer = ask(server, "GET", "/api/status")
    assert failed.is_set()
    assert answer.outcome[:2] == (400, "INTERNAL")
    assert "secret" not in str(answer)
    assert "a secret" in caplog.text
