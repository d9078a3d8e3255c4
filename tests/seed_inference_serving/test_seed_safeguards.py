# SPDX-License-Identifier: Apache-2.0
"""The seed's safeguards that need a slow model: rate limit, timeout, and what is refused when there is too much to do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from seed_programs import Answer, Server, serve, serve_process

from support.waiting import eventually

SLOW = """
import os
import time

import numpy as np


def predict(x: np.ndarray) -> np.ndarray:
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{x[0, 0]:g}\\n")
    while os.path.exists(f"{os.environ['SEEN']}.hold.{x[0, 0]:g}"):
        time.sleep(0.005)
    return x
"""
CONFIG_PBTXT = """
backend: "python" max_batch_size: 1
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
CONFIG = """
predict: {model: slow}
performance: {inference_timeout_s: 60}
safeguards:
  rate_limit: {requests_per_minute: 100}
  concurrency: {max_in_flight: 3}
"""


def made_in(folder: Path, config: str) -> Path:
    (folder / "models/slow/1").mkdir(parents=True)
    (folder / "models/slow/1/model.py").write_text(SLOW)
    (folder / "models/slow/config.pbtxt").write_text(CONFIG_PBTXT)
    (folder / "inference.yaml").write_text(config)
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    environment = {"SEEN": str(folder / "seen")}
    with serve(folder / "models", "--config", folder / "inference.yaml", env=environment) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_in(tmp_path_factory.mktemp("safeguards"), CONFIG)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as running:
        yield running


@contextmanager
def held(folder: Path, value: float) -> Iterator[None]:
    """While it lasts, the model does not come to an end with a request of this value."""
    mark = folder / f"seen.hold.{value:g}"
    mark.touch()
    try:
        yield
    finally:
        mark.unlink()


class BackgroundRequest:
    """A request under way, from an address of its own."""

    def __init__(self, server: Server, value: float, source: str) -> None:
        self._thread = threading.Thread(target=self._ask, args=(server, value, source))
        self._answer: list[Answer] = []
        self._thread.start()

    def _ask(self, server: Server, value: float, source: str) -> None:
        self._answer.append(server.ask(body={"inputs": [value]}, source=source))

    def answer(self) -> Answer:
        self._thread.join(240)
        return self._answer[0]


def wait_until_computed(folder: Path, value: float) -> None:
    seen = folder / "seen"
    eventually(lambda: seen.exists() and f"{value:g}" in seen.read_text().split())


def test_a_hundred_a_minute(server: Server) -> None:
    with server.client("127.0.0.21") as client:
        answers = [client.ask(body={"inputs": [0.0]}) for _ in range(100)]
        assert {answer.status for answer in answers} == {200}
        # 1.7 a second are added while these are sent.
        while (refused := client.ask(body={"inputs": [0.0]})).status == 200:
            pass
        assert refused.status == 429
        first = answers[0]
        assert first.headers["ratelimit-limit"] == first.headers["x-ratelimit-limit"] == "100"
        assert first.headers["ratelimit-remaining"] == "99"
        assert refused.headers["ratelimit-remaining"] == "0"
        assert int(refused.headers["retry-after"]) >= 1
        assert "this address may send 100 requests in 60 seconds" in refused.error
        assert client.ask("/healthz").status == 200
    assert server.ask(body={"inputs": [0.0]}, source="127.0.0.22").status == 200
    assert server.metric("headrace_rate_limited_total", by="address") >= 1


@pytest.mark.slow  # in `tests/api/predict` time is moved: `test_timeout_handling_frees_the_queue`
def test_timeout_frees_the_queue_slot(tmp_path: Path) -> None:
    """The one that computes cannot be stopped, but is not waited for; those behind it leave the queue."""
    folder = made_in(tmp_path, CONFIG.replace("inference_timeout_s: 60", "inference_timeout_s: 3"))
    with serving(folder) as server:
        with held(folder, 1.5):
            computing = BackgroundRequest(server, 1.5, "127.0.0.31")
            wait_until_computed(folder, 1.5)
            waiting = [BackgroundRequest(server, value, "127.0.0.31") for value in (0.011, 0.012)]
            for asked in (computing, *waiting):
                answer = asked.answer()
                assert answer.status == 504, answer.content
                assert answer.seconds >= 2.9
            # Their places among the three are free: one more is taken on, though the model is still busy, and not refused.
            assert server.ask(body={"inputs": [0.013]}, source="127.0.0.31").status == 504
        while (answer := server.ask(body={"inputs": [0.014]}, source="127.0.0.31")).status == 504:
            pass
        assert answer.status == 200
    seen = (folder / "seen").read_text().split()
    assert "0.014" in seen
    assert not {"0.011", "0.012", "0.013"}.intersection(seen)


def test_requests_over_the_limit_are_refused_immediately(server: Server, folder: Path) -> None:
    with held(folder, 0.4):
        first = BackgroundRequest(server, 0.4, "127.0.0.41")
        wait_until_computed(folder, 0.4)
        others = [BackgroundRequest(server, 0.0, "127.0.0.41") for _ in range(2)]
        eventually(lambda: server.metric("nv_inference_pending_request_count", model="slow") >= 2)
        # It does not wait for the three, which cannot come to an end yet.
        refused = server.ask(body={"inputs": [0.0]}, source="127.0.0.41")
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert server.ask("/healthz").status == 200
    assert [asked.answer().status for asked in (first, *others)] == [200] * 3
    assert server.metric("headrace_shed_total") >= 1


@pytest.mark.slow  # `tests/api/access/test_bucket_table.py` has several processes without servers
def test_workers_count_together(tmp_path: Path) -> None:
    with serve_process(tmp_path / "log", "--workers", "2", "--rate-limit-per-minute", "50") as server:
        server.wait_for('"worker":1}')
        # A connection each, which either worker may get.
        began = time.monotonic()
        statuses = Counter(server.ask("/predict/identity", {"inputs": [1.0]}).status for _ in range(100))
        came_meanwhile = (time.monotonic() - began) * 50 / 60
    assert set(statuses) == {200, 429}
    assert 50 <= statuses[200] <= 55 + came_meanwhile
