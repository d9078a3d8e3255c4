# SPDX-License-Identifier: Apache-2.0
"""The seed's settings class: `INFERENCE_*` and nothing else. The process, from its start to SIGTERM, is a slow test."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from seed_models import expected
from seed_programs import ROW, Answer, Server, run, serve, serve_process, together

from support.waiting import eventually

ENVIRONMENT = {
    "INFERENCE_HOST": "127.0.0.1",
    "INFERENCE_PORT": "8080",
    "INFERENCE_WORKERS": "1",
    "INFERENCE_MODEL_PATH": "models/production",
    "INFERENCE_MODEL_VERSION": "latest",
    "INFERENCE_MAX_BATCH_SIZE": "8",
    "INFERENCE_TIMEOUT_SECONDS": "240.0",
    "INFERENCE_MAX_REQUEST_SIZE_MB": "1",
    "INFERENCE_RATE_LIMIT_PER_MINUTE": "1000",
    "INFERENCE_PERFORMANCE_BATCH_TIMEOUT_MS": "60000",
}
HELD = """
import os, sys, time

class Held:
    def find_spec(self, name, path=None, target=None):
        while name == "torch" and not os.path.exists(os.environ["TORCH_MAY_COME"]):
            time.sleep(0.01)

sys.meta_path.insert(0, Held())
"""
"""As `sitecustomize`: PyTorch is not there before a test says so, however long that takes on this machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, seed_models: Path) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    (folder / "models").symlink_to(seed_models / "versions")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serve(env=ENVIRONMENT | {"INFERENCE_MODEL_PATH": str(folder / "models/production")}) as running:
        yield running


def test_latest_is_the_newest_version(server: Server) -> None:
    assert server.ask("/healthz").document == {"status": "healthy", "model_version": "v1.2.0"}
    assert server.ask("/ready").document == {"status": "ready"}
    # As many as make a full batch: fewer would wait for others for a minute.
    for answer in together([lambda: server.ask(body={"inputs": ROW})] * 8):
        assert answer.document["predictions"] == pytest.approx(expected(ROW, "v1.2.0"))
        assert answer.headers["ratelimit-limit"] == "1000"


def test_the_settings_are_those_of_the_environment(folder: Path) -> None:
    code, shown = run("config", "show", "--origin", folder=folder, env=ENVIRONMENT)
    assert code == 0, shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "server.host 127.0.0.1 env INFERENCE_HOST",
        "server.port 8080 env INFERENCE_PORT",
        "server.workers 1 env INFERENCE_WORKERS",
        "model.path models/production env INFERENCE_MODEL_PATH",
        "model.version latest env INFERENCE_MODEL_VERSION",
        "performance.max_batch_size 8 env INFERENCE_MAX_BATCH_SIZE",
        "performance.inference_timeout_s 240 env INFERENCE_TIMEOUT_SECONDS",
        "safeguards.max_request_size_mb 1 env INFERENCE_MAX_REQUEST_SIZE_MB",
        "safeguards.rate_limit.requests_per_minute 1000 env INFERENCE_RATE_LIMIT_PER_MINUTE",
    ):
        assert line in lines, shown


def test_an_ill_typed_variable_is_named(folder: Path) -> None:
    code, output = run("serve", folder=folder, env={"INFERENCE_WORKERS": "four"})
    assert code == 2
    assert "INFERENCE_WORKERS: takes a whole number from 1 to 256, not 'four'" in output


def test_a_path_that_is_not_there_is_refused(folder: Path) -> None:
    code, output = run("serve", folder=folder, env={"INFERENCE_MODEL_PATH": "models/nowhere"})
    assert code == 2
    assert "models/nowhere" in output and "does not exist" in output


def test_a_larger_body_is_refused(server: Server) -> None:
    answer = server.ask(body=b'{"inputs": [' + b"1.0, " * 250_000 + b"1.0]}")
    assert answer.status == 413


def test_a_full_batch_does_not_wait(server: Server) -> None:
    before = server.counted("production")
    answers = together([lambda: server.ask(body={"inputs": ROW})] * 8)
    assert [answer.status for answer in answers] == [200] * 8
    after = server.counted("production")
    assert after["batches"] - before["batches"] == 1
    assert after["rows"] - before["rows"] == after["largest"] == 8


@pytest.mark.slow
def test_a_process_from_its_start_to_sigterm(folder: Path) -> None:
    """It answers before its model is there, and those who wait for a batch when it is told to end."""
    (folder / "held").mkdir()
    (folder / "held" / "sitecustomize.py").write_text(HELD)
    gate = folder / "torch-may-come"
    environment = ENVIRONMENT | {
        "INFERENCE_HOST": "0.0.0.0",
        "INFERENCE_PERFORMANCE_BATCH_TIMEOUT_MS": "5000",
        "PYTHONPATH": str(folder / "held"),
        "TORCH_MAY_COME": str(gate),
    }
    with serve_process(folder / "log", folder=folder, env=environment, ready="listening on") as server:
        server.wait_for("listening on 0.0.0.0")
        for path, body in (("/healthz", None), ("/ready", None), ("/predict", {"inputs": ROW})):
            answer = server.ask(path, body)
            assert answer.status == 503, answer.content
        assert server.ask("/healthz").error.startswith("Model not loaded")
        assert server.ask("/livez").status == 200
        gate.touch()
        server.wait_for("ready: ")
        # Three predictions wait for others to be computed with.
        answers: list[Answer] = []
        threads = [threading.Thread(target=lambda: answers.append(server.ask(body={"inputs": ROW}))) for _ in range(3)]
        for thread in threads:
            thread.start()
        eventually(lambda: server.metric("nv_inference_pending_request_count", model="production") == 3)
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        for thread in threads:
            thread.join(60)
        assert [answer.status for answer in answers] == [200] * 3
        for answer in answers:
            assert answer.document["predictions"] == pytest.approx(expected(ROW, "v1.2.0"))
        assert "SIGTERM: draining" in server.log
