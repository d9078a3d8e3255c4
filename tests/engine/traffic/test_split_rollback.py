# SPDX-License-Identifier: Apache-2.0
"""A version that fails or dawdles loses its traffic by itself; one that leaves is stood in for; nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from split_planes import SplitPlane, echo, fail, open_split_plane

from headrace.core.clock import ManualClock
from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, InvalidArgument, NotFound
from headrace.engine.engine import EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.traffic.settings import RollbackRules, SplitSettings, TrafficSettings
from headrace.engine.traffic.splits import TrafficSplits
from headrace.engine.traffic.statistics import RollbackWindow
from headrace.models.config.types import DynamicBatching, InstanceGroup
from support.async_tests import async_test
from support.engines import Gate


@async_test
@pytest.mark.parametrize("scheduling", [None, DynamicBatching()], ids=["short way", "long way"])
async def test_a_candidate_that_fails_is_rolled_back_by_itself(
    scheduling: Any, caplog: pytest.LogCaptureFixture
) -> None:
    split_plane = await open_split_plane(echo, fail, scheduling=scheduling)
    received: list[tuple[str, str, str]] = []
    split_plane.traffic.on_rollback = lambda *what: received.append(what)
    split_plane.split("1=0.5 2=0.5", rollback=RollbackRules(error_rate=0.1, least_requests=20))
    failed, seen = 0, Counter[str]()
    with caplog.at_level(logging.WARNING, "headrace.traffic"):
        for _ in range(1_000):
            try:
                seen[await split_plane.ask()] += 1
            except HeadraceError:
                failed += 1
    # Those that it failed before it was judged are lost to their callers, and no others.
    assert failed == 20 and seen == {"1": 980}
    candidate = split_plane.of("2")
    assert candidate["state"] == "rolled_back" and candidate["errors"] == 20 and candidate["error_rate"] == 1
    assert candidate["effective_weight"] == 0 and split_plane.of("1")["effective_weight"] == 1
    assert "20 errors of the last 20 requests" in candidate["reason"]
    assert [event["what"] for event in split_plane.report()["events"]] == ["is rolled back"]
    assert len(received) == 1 and received[0][:2] == ("m", "2")
    assert [record.levelname for record in caplog.records if "rolled back" in record.message] == ["WARNING"]
    assert split_plane.metric("headrace_traffic_rollbacks_total", version="2") == 1
    assert split_plane.metric("headrace_traffic_errors_total", version="2") == 20
    diverted = split_plane.metric("headrace_traffic_diverted_total", version="2", reason="rolled_back")
    assert diverted == candidate["diverted"] > 300
    # It stays so, also when its version is loaded anew, until the split is set again.
    await split_plane.load(2, echo, scheduling=scheduling)
    assert {await split_plane.ask() for _ in range(50)} == {"1"}
    split_plane.split("1=0.5 2=0.5", rollback=RollbackRules(error_rate=0.1))
    assert {await split_plane.ask() for _ in range(50)} == {"1", "2"}
    await split_plane.close()


@async_test
async def test_what_the_caller_did_wrong_is_not_the_versions_error() -> None:
    split_plane = await open_split_plane(echo, echo, scheduling=DynamicBatching())
    split_plane.split("1=0 2=1", baseline="1", rollback=RollbackRules(error_rate=0.01, least_requests=1))
    for _ in range(30):
        with pytest.raises(InvalidArgument):
            split_plane.begin(array=np.ones((1, 3), np.float32))
    gate = Gate()
    await split_plane.load(2, gate, instance_groups=(InstanceGroup("m", runs="thread"),))
    request = split_plane.begin()
    await gate.entered()
    request.pending.cancel()
    assert isinstance(await request.answer(), Cancelled)
    gate.let()
    version = split_plane.of("2")
    assert (version["refused"], version["cancelled"], version["errors"]) == (30, 1, 0)
    assert version["state"] == "serving" and version["error_rate"] is None
    await split_plane.close()


@async_test
async def test_a_candidate_that_refuses_what_the_baseline_answers_is_rolled_back() -> None:
    def refusing(inputs: Any) -> Any:
        raise InvalidArgument("made for other inputs")

    split_plane = await open_split_plane(echo, refusing)
    split_plane.split("1=0.5 2=0.5", rollback=RollbackRules(error_rate=0.05, least_requests=20))
    seen: Counter[str] = Counter()
    for _ in range(300):
        try:
            seen[await split_plane.ask()] += 1
        except InvalidArgument:
            seen["refused"] += 1
    assert seen == {"1": 280, "refused": 20}
    candidate = split_plane.of("2")
    assert candidate["state"] == "rolled_back" and candidate["errors"] == 0 and candidate["refused"] == 20
    assert "it refused 20 requests in a row, while the baseline answered" in candidate["reason"]
    await split_plane.close()


@async_test
@pytest.mark.parametrize("wrong", [1.0, 0.9])
async def test_a_candidate_that_refuses_what_the_baseline_refuses_stays(wrong: float) -> None:
    def strict(inputs: Any) -> Any:
        if inputs["INPUT0"][0, 0] < 0:
            raise InvalidArgument("no negative numbers")
        return echo(inputs)

    split_plane = await open_split_plane(strict, strict)
    split_plane.split("1=0.5 2=0.5", rollback=RollbackRules(error_rate=0.05, least_requests=5))
    for number in range(300):
        try:
            await split_plane.ask(array=np.full((1, 4), -1 if number % 10 < 10 * wrong else 1, np.float32))
        except InvalidArgument:
            pass
    assert split_plane.of("2")["state"] == "serving"
    assert split_plane.of("2")["refused"] > 100
    await split_plane.close()


@async_test
async def test_a_candidate_that_is_slow_is_rolled_back() -> None:
    def slow(inputs: Any) -> Any:
        time.sleep(0.003)
        return echo(inputs)

    split_plane = await open_split_plane(echo, slow)
    split_plane.split("1=0.5 2=0.5", rollback=RollbackRules(p99_ms=2.0, least_requests=10))
    seen = Counter([await split_plane.ask() for _ in range(200)])
    assert seen["2"] == 10
    assert "took longer than p99_ms 2" in split_plane.of("2")["reason"]
    assert split_plane.of("1")["state"] == "serving"
    await split_plane.close()


def test_only_the_last_seconds_count() -> None:
    clock = ManualClock()
    window = RollbackWindow(RollbackRules(error_rate=0.5, least_requests=10, window_seconds=60), clock)
    assert not any(window.add(0.0, error=True) for _ in range(9))
    clock.advance(61)
    assert not window.add(0.0, error=True) and window.judged == 1
    assert not any(window.add(0.0, error=False) for _ in range(4))
    clock.advance(30)
    assert not any(window.add(0.0, error=True) for _ in range(4))
    assert window.judged == 9
    # The tenth makes it enough to judge: 6 of 10 is more than half.
    assert "6 errors of the last 10 requests in 60 s" in window.add(0.0, error=True)


@pytest.mark.parametrize(("slow", "verdict"), [(1, False), (2, True)])
def test_the_99th_percentile_is_the_one_that_the_report_shows(slow: int, verdict: bool) -> None:
    window = RollbackWindow(RollbackRules(p99_ms=10, least_requests=100), ManualClock())
    received = [window.add(0.020 if number >= 100 - slow else 0.001, error=False) for number in range(100)]
    assert bool(received[-1]) is verdict and not any(received[:-1])


@async_test
async def test_the_baseline_stays_and_a_person_may_roll_back() -> None:
    split_plane = await open_split_plane(fail, echo)
    split_plane.split("1=0.9 2=0.1", rollback=RollbackRules(error_rate=0.1, least_requests=5))
    for _ in range(50):
        try:
            await split_plane.ask()
        except HeadraceError:
            continue
    assert split_plane.of("1")["state"] == "serving"
    with pytest.raises(FailedPrecondition, match="baseline"):
        split_plane.traffic.roll_back("m", "1", "test")
    with pytest.raises(NotFound, match="these are: 1, 2"):
        split_plane.traffic.roll_back("m", "7", "test")
    split_plane.traffic.roll_back("m", "2", "somebody complained")
    assert split_plane.of("2")["reason"] == "somebody complained"
    await split_plane.close()


@async_test
async def test_a_version_that_was_unloaded_is_replaced_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    split_plane = await open_split_plane(echo, echo, echo)
    split_plane.split("1=0.2 2=0.5 3=0.3", baseline="1")
    with caplog.at_level(logging.INFO, "headrace.traffic"):
        await split_plane.unload(3)
        assert {await split_plane.ask() for _ in range(200)} == {"1", "2"}
        await split_plane.load(2)  # a change that has nothing to do with it
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
        assert "version '3'" in caplog.text and "baseline" in caplog.text
        assert (split_plane.of("3")["state"], split_plane.of("3")["effective_weight"]) == ("missing", 0)
        assert split_plane.of("1")["effective_weight"] == pytest.approx(0.5)
        assert split_plane.metric("headrace_traffic_diverted_total", version="3", reason="missing") > 20
        # Without the baseline it is the largest of the others; without any, the newest.
        await split_plane.unload(1)
        assert {await split_plane.ask() for _ in range(50)} == {"2"}
        await split_plane.load(9)
        await split_plane.unload(2)
        assert {await split_plane.ask() for _ in range(50)} == {"9"}
        assert split_plane.of("newest")["requests"] == 50
        await split_plane.load(1)
        await split_plane.load(3)
        assert {await split_plane.ask() for _ in range(200)} == {"1", "3"}
    events = [f"{event['version']} {event['what']}" for event in split_plane.report()["events"]]
    assert events == ["3 is missing", "1 is missing", "2 is missing", "1 is back", "3 is back"]
    for number in (1, 3, 9):
        await split_plane.unload(number)
    assert split_plane.served.default is None
    with pytest.raises(NotFound):
        split_plane.begin()
    await split_plane.close()


CONFIG = """backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
version_policy { all { } }
"""


@async_test
async def test_versions_are_added_and_removed_under_load(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "m" / str(number)).mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    settings = EngineSettings((tmp_path,), RepositorySettings(mode="explicit", load_models=("m",)))
    engine = open_engine(settings)
    configured = TrafficSettings({"m": SplitSettings({"1": 0.5, "2": 0.5})})
    traffic = TrafficSplits(engine.plane, engine.metrics, configured)  # before anything is loaded
    await engine.start()
    traffic.settled()
    split_plane = SplitPlane()
    split_plane.plane, split_plane.traffic = engine.plane, traffic
    seen: Counter[str] = Counter()
    stop = False

    async def load() -> None:
        while not stop:
            seen[await split_plane.ask()] += 1
            await asyncio.sleep(0)

    clients = [asyncio.create_task(load()) for _ in range(4)]

    async def more(version: str) -> None:
        before = seen[version]
        while seen[version] < before + 50 and not any(client.done() for client in clients):
            await asyncio.sleep(0)

    try:
        await more("1")
        await more("2")
        (tmp_path / "m" / "2").rmdir()
        await engine.plane.load("m")
        gone = seen["2"]
        await more("1")
        assert seen["2"] <= gone + len(clients)  # each client had at most one request in flight
        assert split_plane.of("2")["state"] == "missing"
        (tmp_path / "m" / "2").mkdir()
        await engine.plane.load("m")
        await more("2")
    finally:
        stop = True
    await asyncio.gather(*clients)  # not one of them was told an error
    assert split_plane.of("1")["errors"] == split_plane.of("2")["errors"] == 0
    assert split_plane.of("1")["answered"] + split_plane.of("2")["answered"] == seen.total()
    await engine.close(5)


@async_test
async def test_splits_of_the_configuration_are_replaced_as_a_whole() -> None:
    split_plane = await open_split_plane(echo, echo)
    split_plane.traffic.replace(TrafficSettings({"m": SplitSettings({"1": 1.0, "2": 0.0})}))
    await split_plane.ask()
    split_plane.traffic.replace(
        TrafficSettings({"m": SplitSettings({"1": 1.0, "2": 0.0}), "later": SplitSettings({"1": 1.0})})
    )
    assert split_plane.of("1")["requests"] == 1  # what stays the same goes on counting
    with pytest.raises(InvalidArgument):
        split_plane.traffic.replace(TrafficSettings({"m": SplitSettings({"1": 0.5})}))
    assert set(split_plane.traffic.splits()) == {"m", "later"}
    split_plane.traffic.replace(TrafficSettings())
    assert not split_plane.traffic.splits() and await split_plane.ask() == "2"
    await split_plane.close()


@async_test
async def test_a_configured_split_of_what_is_not_there_is_refused() -> None:
    split_plane = await open_split_plane(echo)
    split_plane.traffic.replace(TrafficSettings({"m": SplitSettings({"1": 0.5, "v9": 0.5})}))
    with pytest.raises(FailedPrecondition, match="traffic: model 'm' has no version 'v9': it has 1; correct the split"):
        split_plane.traffic.settled()
    await split_plane.close()


@async_test
async def test_a_configured_split_of_a_model_that_is_not_loaded_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    split_plane = await open_split_plane(echo)
    with caplog.at_level(logging.WARNING, "headrace.traffic"):
        split_plane.traffic.replace(TrafficSettings({"ghost": SplitSettings({"1": 1.0})}))
        split_plane.traffic.settled()
    assert sum("Model 'ghost'" in record.message for record in caplog.records) == 1
    await split_plane.close()
