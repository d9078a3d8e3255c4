# SPDX-License-Identifier: Apache-2.0
"""A service that nobody uses, or that will never serve: what it counts, whom it tells, when it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_hub import fake_hub
from service_process import local_service, settings_for

from headrace.core.clock import ManualClock
from headrace.jobs.microservice.idle import IdleTimer, post_status_update, status_update_body
from headrace.jobs.microservice.settings import CallbackSettings, IdleSettings

Open = Callable[..., Any]
KEY = "an-admin-key-that-is-secret"
MODEL = "import numpy as np\n\ndef predict(x: np.ndarray) -> np.ndarray:\n    return x\n"
NEVER = 3600.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    return folder


class Listener:
    """Plays TAO's API: keeps what it is sent, and answers with the statuses it was given, then 200."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, dict[str, Any]]] = []
        self.statuses: list[int] = []
        self.came = threading.Event()
        self.url = ""


@contextmanager
def listener() -> Iterator[Listener]:
    kept = Listener()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            kept.seen.append((self.path, self.headers["authorization"], body))
            status = kept.statuses.pop(0) if kept.statuses else 200
            self.send_response(status)
            if status == 302:
                self.send_header("location", "http://127.0.0.1:9/")
            self.send_header("content-length", "0")
            self.end_headers()
            kept.came.set()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_address[1]}/api/v1/orgs/o/experiments/e/jobs/j"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()


def test_the_idle_timer_fires_no_sooner_than_the_timeout() -> None:
    clock = ManualClock()
    watch = IdleTimer(IdleSettings(timeout_minutes=2), clock)
    watch.loaded()
    assert watch.next_check_seconds == 60
    clock.advance(90)
    assert watch.next_check_seconds == pytest.approx(30)
    watch.request_started()
    clock.advance(900)
    assert watch.next_check_seconds == 60
    watch.request_ended()
    clock.advance(119)
    assert (watch.next_check_seconds, watch.expired()) == (pytest.approx(1), False)
    clock.advance(1)
    assert watch.expired()


def test_it_counts_from_the_load_and_only_inference_counts() -> None:
    clock = ManualClock()
    watch = IdleTimer(IdleSettings(timeout_minutes=30), clock)
    clock.advance(3600)
    assert not watch.expired() and watch.minutes == 0
    watch.loaded()
    clock.advance(29 * 60)
    assert not watch.expired() and watch.minutes == 29
    watch.request_started()
    clock.advance(3600)
    assert not watch.expired() and watch.minutes == 0, "a request runs"
    watch.request_ended()
    clock.advance(30 * 60 - 1)
    assert not watch.expired()
    clock.advance(1)
    assert watch.expired()
    assert not watch.expired(), "once"
    watch.report_again()
    assert not watch.expired()
    clock.advance(30 * 60)
    assert watch.expired()
    off = IdleTimer(IdleSettings(timeout_minutes=0, enabled=False), clock)
    off.loaded()
    assert not off.expired()


def test_an_idle_service_requests_its_deletion(tmp_path: Path, model: Path) -> None:
    clock = ManualClock()
    with listener() as api:
        settings = settings_for(
            model,
            tmp_path,
            idle=IdleSettings(period_seconds=NEVER),
            callback=CallbackSettings(api.url, KEY, "7", pause_seconds=0.01),
        )
        stopped: list[bool] = []
        with local_service(settings, clock=clock, stop=lambda: stopped.append(True)) as running:
            running.until("model_loaded")
            running.infer(inputs={"x": [1]})
            clock.advance(29 * 60)
            running.status()
            running.get("/api/v1/health/readiness")
            running.server.call(running.made.check_idle)
            assert not api.seen
            clock.advance(60)
            api.statuses = [503]
            running.server.call(running.made.check_idle)
            running.server.call(running.made.check_idle)
            assert [path.rpartition("/")[2] for path, _, _ in api.seen] == ["j:status_update"] * 2, (
                "tried again, told once"
            )
            _, key, body = api.seen[-1]
            assert key == f"Bearer {KEY}" and body["experiment_number"] == "7"
            document = json.loads(body["status"])
            assert document["status"] == document["message"] == "AUTO_DELETION_REQUESTED"
            assert (document["reason"], document["idle_timeout_minutes"]) == ("idle_timeout_exceeded", 30)
            assert document["idle_time_minutes"] == 30 and document["last_request_time"] and document["timestamp"]
            assert not stopped, "whoever is asked stops it"
            assert running.infer(inputs={"x": [1]})["outputs"] == {"output": [1.0]}


@pytest.mark.parametrize("exits", [False, True])
def test_without_a_callback_it_exits_only_if_configured(tmp_path: Path, model: Path, exits: bool) -> None:
    clock = ManualClock()
    stopped: list[bool] = []
    settings = settings_for(model, tmp_path, idle=IdleSettings(period_seconds=NEVER, exit_when_idle=exits))
    with local_service(settings, clock=clock, stop=lambda: stopped.append(True)) as running:
        running.until("model_loaded")
        clock.advance(30 * 60)
        running.server.call(running.made.check_idle)
        assert stopped == [True] * exits


def test_it_ends_by_itself(tmp_path: Path, model: Path, open_service: Open) -> None:
    arguments = ("--model-path", model, "--idle_timeout_minutes", "0.001", "--exit-when-idle")
    with open_service(*arguments, folder=tmp_path) as running:
        assert running.wait() == 0
        assert "exiting" in running.log


def test_a_service_that_cannot_load_requests_its_deletion(tmp_path: Path, model: Path, open_service: Open) -> None:
    (model / "model.py").write_text("raise RuntimeError('no such device')\n")
    with listener() as api:
        variables = {"TAO_LOGGING_SERVER_URL": api.url, "TAO_ADMIN_KEY": KEY}
        job = {"job_id": "j-1", "specs": {"model_path": str(model)}}
        arguments = ("--job", json.dumps(job), "--docker-env-vars", json.dumps(variables))
        with open_service(*arguments, "--host", "127.0.0.1", folder=tmp_path) as running:
            assert api.came.wait(180)
            document = json.loads(api.seen[0][2]["status"])
            assert document["reason"] == "model_loading_failed"
            assert document["error"] == running.status()["model_load_error"] and "no such device" in document["error"]
            state = (tmp_path / "service-models" / "j-1_server.json").read_text()
            assert KEY not in running.log + state + json.dumps(running.status())


def test_a_service_stopped_during_its_download_sends_no_request(tmp_path: Path, open_service: Open) -> None:
    with listener() as api, fake_hub() as hub:
        weights = tmp_path / "weights"
        weights.mkdir()
        (weights / "model.safetensors").write_bytes(bytes(100))
        hub.models["acme/tiny"] = weights
        hub.files_open.clear()
        variables = {"TAO_LOGGING_SERVER_URL": api.url, "TAO_ADMIN_KEY": KEY, "HF_ENDPOINT": hub.url}
        arguments = ("--model-path", "hf_model://acme/tiny", "--docker_env_vars", json.dumps(variables))
        with open_service(*arguments, folder=tmp_path) as running:
            running.until(lambda told: told["progress"]["stage"].startswith("downloading"))
            assert running.stop() == 0
        assert not api.seen


@pytest.mark.parametrize(
    ("statuses", "arrived", "count"),
    [([], True, 1), ([500, 500], True, 3), ([500, 500, 500], False, 3), ([401], False, 1), ([302], False, 1)],
)
def test_status_updates_are_tried_again(statuses: list[int], arrived: bool, count: int) -> None:
    with listener() as api:
        api.statuses = statuses
        settings = CallbackSettings(api.url, KEY)
        pauses: list[float] = []
        body = status_update_body(settings, "initialization_failed", {"error": "x"})
        assert post_status_update(settings, body, pauses.append) is arrived
        assert len(api.seen) == count
        assert pauses == [1.0, 2.0][: count - 1]


def test_callback_unreachable() -> None:
    settings = CallbackSettings("http://127.0.0.1:9", KEY, tries=2)
    assert post_status_update(settings, b"{}", lambda _: None) is False
