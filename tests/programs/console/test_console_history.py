# SPDX-License-Identifier: Apache-2.0
"""The metrics history and the last requests of a server's console, without a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from console_models import write_plain
from console_process import INFER, ask, console_server

from headrace.api.access.api_keys import create_key
from headrace.programs.console.history import INTERVAL_SECONDS, LANGUAGE_BOUNDS_MS, History, percentile, point
from headrace.version import __version__
from support.servers import serve_in_thread
from support.waiting import eventually

BOUNDS = [1.0, 10.0, 100.0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_in_thread(write_plain(tmp_path_factory.mktemp("history_models"))) as running:
        yield running.url


def counts(done: int, took: list[int], **more: Any) -> dict[str, Any]:
    return {"done": done, "failed": 0, "in_flight": 1, "waiting": 0, "took": took, **more}


def test_percentiles_are_interpolated_within_their_bucket() -> None:
    assert percentile([0, 0, 0, 0], BOUNDS, 0.5) is None
    assert percentile([0, 10, 0, 0], BOUNDS, 0.5) == 5.5
    assert percentile([5, 5, 0, 0], BOUNDS, 0.5) == 1.0
    assert percentile([0, 0, 0, 3], BOUNDS, 0.99) == 100.0


def test_a_point_has_rates_means_and_gauges() -> None:
    before = counts(10, [10, 0, 0, 0], computed=10, queue_ns=0, compute_ns=0, batches={"1": 10})
    now = counts(30, [10, 20, 0, 0], computed=20, queue_ns=20_000_000, compute_ns=50_000_000, batches={"1": 10, "4": 5})
    created = point(before, now, 5.0, BOUNDS)
    assert (created["requests"], created["queue"], created["compute"], created["batch"]) == (4.0, 2.0, 5.0, 4.0)
    assert created["p50"] == 5.5 and created["in_flight"] == 1 and "ttft_p50" not in created
    idle = point(now, now, 5.0, BOUNDS)
    assert (idle["requests"], idle["p50"], idle["queue"], idle["batch"]) == (0.0, None, None, None)
    # A model that was loaded again starts at zero.
    assert point(now, before, 5.0, BOUNDS)["requests"] == 0.0


def test_a_language_model_has_its_own_series() -> None:
    def llm(times: int) -> dict[str, Any]:
        first, following = ([0] * (len(LANGUAGE_BOUNDS_MS[name]) + 1) for name in ("ttft", "itl"))
        first[3], following[2] = times, 9 * times
        return {
            "tokens": [20 * times, 10 * times],
            "prefix": [5 * times, 20 * times],
            "kv": [0.5, 2],
            "running": 3,
            "waiting": 1,
            "ttft": first,
            "itl": following,
        }

    created = point(counts(1, [1], llm=llm(1)), counts(3, [3], llm=llm(3)), 2.0, BOUNDS)
    assert (created["prompt"], created["generated"], created["prefix"], created["kv"]) == (20.0, 10.0, 25.0, 25.0)
    assert (created["running"], created["queued"]) == (3, 1)
    ttft, itl = created["ttft_p50"], created["itl_p95"]
    assert ttft is not None and 10 < ttft < 20 and itl is not None and 1 < itl <= 2.5


def test_the_ring_keeps_its_length_and_forgets_idle_models() -> None:
    history = History(BOUNDS, 10 * INTERVAL_SECONDS)
    now, done = 1000.0, 0
    for number in range(40):
        done += 10 if number < 5 else 0
        models = {"busy": counts(10 * number, [10 * number, 0, 0, 0]), "once": counts(done, [done], in_flight=0)}
        history.add(now, counts(10 * number + done, [0]), models, {"cpu": 50.0})
        now += INTERVAL_SECONDS
        if number == 5:
            assert history.document("once")["series"]["requests"] == [2.0] * 4 + [0.0]
    document = history.document("busy")
    assert len(document["time"]) == 10 and document["time"] == sorted(document["time"])
    assert document["series"]["requests"] == [2.0] * 10
    assert history.document()["series"]["cpu"] == [50.0] * 10
    assert history.document("once")["series"] == {}
    assert len(history.document("busy", seconds=2 * INTERVAL_SECONDS)["time"]) == 2
    assert history.document("busy", since=document["time"][-2])["time"] == document["time"][-1:]
    assert history.latest["busy"]["requests"] == 2.0 and "once" not in history.latest


def test_a_gap_is_null_and_a_single_point_is_there() -> None:
    history = History(BOUNDS)
    history.add(0.0, counts(0, [0, 0, 0, 0]), {}, {})
    assert history.document()["time"] == []
    history.add(5.0, counts(1, [1, 0, 0, 0]), {}, {})
    history.add(10.0, counts(1, [1, 0, 0, 0]), {}, {})
    series = history.document()["series"]
    assert series["p50"] == [0.5, None] and not any(math.isnan(value) for value in series["requests"])


def test_the_history_is_served(server: str) -> None:
    def points() -> Any:
        assert ask(f"{server}/v2/models/echo/infer", INFER).status == 200
        answer = ask(f"{server}/console/api/history?model=echo&seconds=300")
        assert answer.status == 200 and answer.fields["cache-control"] == "no-store"
        document = answer.json
        return document if any(document["series"].get("p50", ())) else None

    document = eventually(points)
    assert document["interval_seconds"] == INTERVAL_SECONDS and document["seconds"] == 3600
    assert {len(values) for values in document["series"].values()} == {len(document["time"])}
    assert max(document["series"]["requests"]) > 0
    whole = ask(f"{server}/console/api/history").json
    assert whole["series"]["process_memory"][-1] > 1e6
    live = ask(f"{server}/console/api/live").json
    assert live["rates"]["echo"]["p95"] is None or live["rates"]["echo"]["p95"] > 0
    assert ask(f"{server}/console/api/history?seconds=x").status == 400


def test_live_has_version_start_and_addresses(server: str) -> None:
    about = ask(f"{server}/console/api/live").json["server"]
    assert about["version"] == __version__ and about["started"] > 1.7e9
    assert about["addresses"]["http"] == server and "grpc" in about["addresses"]


def test_the_last_requests_are_listed_without_their_content(server: str) -> None:
    secret = {"inputs": [{**INFER["inputs"][0], "data": [4321.5, 2, 3, 4]}]}
    assert ask(f"{server}/v2/models/river/infer", {"id": "good", **secret}).status == 200
    wrong = {"id": "bad", "inputs": [{**INFER["inputs"][0], "shape": [2, 2]}]}
    assert ask(f"{server}/v2/models/river/infer", wrong).status == 400
    answer = ask(f"{server}/console/api/requests")
    good = next(timeline for timeline in answer.json["recent"] if timeline["id"] == "good")
    assert (good["model"], good["version"], good["rows"], good["outcome"]) == ("river", "2", 1, "ok")
    assert good["took_ms"] > 0 and good["began"] > 1.7e9
    bad = next(timeline for timeline in answer.json["failed"] if timeline["id"] == "bad")
    assert bad["outcome"] == "INVALID_ARGUMENT" and "shape" in bad["message"]
    assert b"4321.5" not in answer.body


def test_only_the_newest_requests_are_kept(server: str) -> None:
    for number in range(130):
        assert ask(f"{server}/v2/models/echo/infer", {"id": f"r{number}", **INFER}).status == 200
    recent = [
        timeline["id"]
        for timeline in ask(f"{server}/console/api/requests").json["recent"]
        if timeline["model"] == "echo"
    ]
    assert recent[:3] == ["r129", "r128", "r127"] and len(recent) == 50


def test_history_and_requests_need_the_scope_read(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    reader = {"authorization": f"Bearer {create_key(keys, 'reader', ['read'], created=0)}"}
    caller = {"authorization": f"Bearer {create_key(keys, 'caller', ['infer'], created=0)}"}
    with serve_in_thread("--api-keys-file", keys, "--host", "127.0.0.1") as running:
        for path in ("history", "requests"):
            url = f"{running.url}/console/api/{path}"
            assert [ask(url).status, ask(url, **caller).status, ask(url, **reader).status] == [401, 403, 200]


def test_the_length_is_a_setting(tmp_path: Path) -> None:
    with serve_in_thread("--console-history-secs", "600") as running:
        assert ask(f"{running.url}/console/api/live").json["server"]["history_seconds"] == 600


@pytest.mark.slow
def test_history_and_requests_are_those_of_all_workers(tmp_path: Path) -> None:
    with console_server(tmp_path / "log", write_plain(tmp_path), "--workers", "2", workers=2) as url:

        def rate() -> bool:
            for number in range(20):
                assert ask(f"{url}/v2/models/echo/infer", {"id": f"w{number}", **INFER}).status == 200
            return bool(any(ask(f"{url}/console/api/history?model=echo").json["series"].get("requests", ())))

        eventually(rate)
        recent = {timeline["id"] for timeline in ask(f"{url}/console/api/requests").json["recent"]}
        assert recent == {f"w{number}" for number in range(20)}
