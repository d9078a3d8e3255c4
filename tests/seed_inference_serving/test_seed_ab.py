# SPDX-License-Identifier: Apache-2.0
"""The seed's example 5, versions under test, with `headrace ab` and a server that is told its split by a file."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import uvloop
from seed_models import SECRET, expected
from seed_programs import ROW, Server, run, serve

from headrace.core.clock import SystemClock
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.telemetry.metrics import Registry
from headrace.core.tensors import Tensor
from headrace.engine.engine import EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.traffic.settings import SplitSettings
from headrace.engine.traffic.splits import TrafficSplits
from headrace.programs.serve.split_reload import SplitsFile
from support.waiting import eventually

CONFIG = """
predict: {model: production}
traffic:
  production:
    weights: {v1.0.0: 0.9, v1.2.0: 0.1}
    sticky: {header: x-user-id}
"""


@contextmanager
def serving(models: Path, folder: Path) -> Iterator[Server]:
    """A server that is told its split by `inference.yaml` in a folder, and looks at it every 0.05 seconds."""
    (folder / "inference.yaml").write_text(CONFIG)
    with (
        patch.object(SplitsFile.__init__, "__defaults__", (0.05,)),
        serve(models / "repository", "--config", folder / "inference.yaml") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, seed_models: Path) -> Iterator[Server]:
    """For all tests that leave the split of `production` as it is."""
    with serving(seed_models, tmp_path_factory.mktemp("ab")) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path, seed_models: Path) -> Iterator[Server]:
    with serving(seed_models, tmp_path) as running:
        yield running


def within(count: int, total: int, share: float) -> bool:
    """Five standard deviations: wrong once in two million runs."""
    return abs(count - total * share) <= 5 * math.sqrt(total * share * (1 - share))


@pytest.mark.parametrize("thousands", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_many_thousand_requests_through_the_data_plane(seed_models: Path, thousands: int) -> None:
    async def counted() -> Counter[str]:
        settings = EngineSettings(repositories=(seed_models / "joined",), repository=RepositorySettings(), gpus=0)
        engine = open_engine(settings)
        await engine.start()
        traffic = TrafficSplits(engine.plane, Registry(SystemClock()))
        traffic.set("production", SplitSettings({"v1.0.0": 0.9, "v1.2.0": 0.1}))
        request = InferRequest("production", (Tensor.of("INPUT__0", np.array([ROW], np.float32)),))
        seen: Counter[str] = Counter()
        for _ in range(thousands):
            answered = asyncio.Event()
            left = iter(range(999, -1, -1))

            def on_result(result: InferResponse | BaseException, left=left, answered=answered) -> None:
                seen[getattr(result, "model_version", repr(result))] += 1
                if next(left) == 0:
                    answered.set()

            for _ in range(1000):
                engine.plane.infer(request, on_result)
            await answered.wait()
        traffic.close()
        await engine.close(5)
        return seen

    seen = uvloop.run(counted())
    assert seen["1"] + seen["2"] == thousands * 1000
    assert within(seen["2"], thousands * 1000, 0.1), seen


def test_three_thousand_requests_over_http(server: Server) -> None:
    seen: Counter[str] = Counter()
    answers: dict[str, list[float]] = {}
    with server.client() as client:
        for _ in range(3000):
            answer = client.ask(body={"inputs": ROW}).document
            seen[answer["model_version"]] += 1
            answers[answer["model_version"]] = answer["predictions"]
    assert {version: pytest.approx(expected(ROW, version)) for version in answers} == answers
    assert seen["v1.0.0"] + seen["v1.2.0"] == 3000
    assert within(seen["v1.2.0"], 3000, 0.1), seen


def test_one_key_always_lands_on_one_version(server: Server) -> None:
    seen: dict[str, set[str]] = {}
    with server.client() as client:
        for _ in range(3):
            for number in range(200):
                user = f"user-{number}"
                version = client.ask(body={"inputs": ROW}, x_user_id=user).document["model_version"]
                seen.setdefault(user, set()).add(version)
    assert all(len(versions) == 1 for versions in seen.values())
    assert within(sum("v1.2.0" in versions for versions in seen.values()), 200, 0.1)


def test_who_names_a_version_gets_it(server: Server) -> None:
    for version in ("v1.0.0", "v1.2.0"):
        for _ in range(20):
            answer = server.ask(body={"inputs": ROW, "model_version": version}).document
            assert answer["model_version"] == version


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (("v1.0.0=0.9", "v1.2.0=0.2"), "sum to 1.1"),
        (("v1.0.0=1.5", "v1.2.0=-0.5"), "-0.5"),
        (("v1.0.0=0.9", "v9=0.1"), "v9"),
        (("v1.0.0=much", "v1.2.0=0.1"), "much"),
    ],
)
def test_ab_set_refuses(server: Server, weights: tuple[str, ...], text: str) -> None:
    before = server.ask("/admin/traffic/production").document["split"]
    code, told = run("ab", "set", "production", *weights, "--url", server.url)
    assert code != 0
    assert text in told and "Traceback" not in told
    assert server.ask("/admin/traffic/production").document["split"] == before


def test_the_file_refuses_weights_that_do_not_sum(tmp_path: Path, seed_models: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(CONFIG.replace("0.1", "0.2"))
    code, told = run("config", "check", "wrong.yaml", folder=tmp_path)
    assert code != 0
    assert "wrong.yaml:" in told and "sum to 1.1" in told
    code, told = run("serve", seed_models / "repository", "--config", "wrong.yaml", folder=tmp_path)
    assert code == 2
    assert "wrong.yaml:" in told and "sum to 1.1" in told


def test_ab_report(server: Server) -> None:
    with server.client() as client:
        for _ in range(200):
            assert client.ask(body={"inputs": ROW}).status == 200
    code, told = run("ab", "report", "production", "--url", server.url)
    assert code == 0, told
    for text in ("v1.0.0 (1)", "v1.2.0 (2)", "p99 ms", "Fisher's exact", "Mann-Whitney U", "Latencies"):
        assert text in told, told
    code, told = run("ab", "report", "production", "--json", "--url", server.url)
    versions = {one["label"]: one["requests"] for one in json.loads(told)["versions"]}
    assert versions["v1.0.0"] > versions["v1.2.0"] > 0


def test_a_candidate_that_fails_is_rolled_back_by_itself(server: Server) -> None:
    rules = ("--rollback-error-rate", "0.05", "--rollback-least", "20")
    code, told = run("ab", "set", "candidate", "v1.0.0=0.5", "v1.2.0=0.5", *rules, "--url", server.url)
    assert code == 0, told
    statuses: Counter[int] = Counter()
    last: list[int] = []
    with server.client() as client:
        for _ in range(300):
            answer = client.ask("/predict/candidate", {"inputs": ROW})
            statuses[answer.status] += 1
            last.append(answer.status)
            assert SECRET not in answer.content.decode()
    assert statuses == {200: 280, 500: 20}
    assert set(last[150:]) == {200}
    code, told = run("ab", "report", "candidate", "--url", server.url)
    assert code == 0
    assert "rolled back" in told and "errors" in told
    assert server.metric("headrace_traffic_rollbacks_total", model="candidate") == 1


def test_a_candidate_made_for_other_inputs_is_rolled_back_by_itself(server: Server) -> None:
    """It refuses what the baseline answers, so the requests cannot be at fault."""
    rules = ("--rollback-error-rate", "0.05", "--rollback-least", "20")
    code, told = run("ab", "set", "misfit", "v1.0.0=0.5", "v1.2.0=0.5", *rules, "--url", server.url)
    assert code == 0, told
    with server.client() as client:
        statuses = Counter(client.ask("/predict/misfit", {"inputs": ROW}).status for _ in range(200))
    assert statuses == {200: 180, 400: 20}
    code, told = run("ab", "report", "misfit", "--url", server.url)
    assert "rolled back" in told and "it refused 20 requests in a row" in " ".join(told.split())


def test_shadow(own_server: Server) -> None:
    server = own_server
    options = ("--shadow", "v1.2.0=1.0", "--tolerance", "0.001", "--url", server.url)
    code, told = run("ab", "set", "production", "v1.0.0=1", *options)
    assert code == 0, told
    with server.client() as client:
        for _ in range(50):
            assert client.ask(body={"inputs": ROW}).document["model_version"] == "v1.0.0"
        # A copy is computed after the caller has its answer.
        eventually(lambda: client.ask("/admin/traffic/production/report").document["shadows"][0]["compared"] >= 50)
    code, told = run("ab", "report", "production", "--url", server.url)
    assert code == 0
    assert "Agreement with the returned responses" in told and "v1.2.0" in told
    code, told = run("ab", "clear", "production", "--url", server.url)
    assert code == 0
    assert server.ask(body={"inputs": ROW}).document["model_version"] == "v1.2.0"


def written(file: Path, text: str) -> None:
    """Whole or not at all: whoever follows the file must not read half of it."""
    new = file.with_name("new.yaml")
    new.write_text(text)
    new.replace(file)


def test_the_file_is_followed_while_the_server_runs(own_server: Server, tmp_path: Path) -> None:
    server, file = own_server, tmp_path / "inference.yaml"
    with server.client() as client:

        def version() -> str:
            return str(client.ask(body={"inputs": ROW}).document["model_version"])

        written(file, CONFIG.replace("0.9", "1").replace("0.1", "0"))
        eventually(lambda: {version() for _ in range(50)} == {"v1.0.0"})
        assert {version() for _ in range(50)} == {"v1.0.0"}
        written(file, CONFIG.replace("0.1", "0.2"))
        server.wait_for("its traffic splits are not used")
        assert "sum to 1.1" in server.log
        assert {version() for _ in range(50)} == {"v1.0.0"}
