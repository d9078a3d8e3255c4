# SPDX-License-Identifier: Apache-2.0
"""The parts of scaling by load that run nothing: decisions, samples, what autoscalers ask for, what is told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_site import document

from headrace.core.clock import SystemClock
from headrace.core.errors import InvalidArgument
from headrace.fleet.autoscaling.autoscaler import (
    CONCURRENCY,
    KNATIVE,
    RPS,
    AutoscalerSpec,
    LoadMeter,
    PanicState,
    Sample,
    Windows,
    decide_replicas,
)
from headrace.fleet.documents import ClusterFacts, FleetSettings, cluster_facts
from headrace.fleet.local.autoscaler import Autoscaler, ScalingCondition, WorkloadScaler, with_scaling_conditions
from headrace.fleet.local.controller import CAPABILITIES
from headrace.fleet.local.events import Events
from headrace.fleet.local.kubelet import Kubelet
from headrace.fleet.local.object_store import DocumentStore, ServiceObjects
from headrace.fleet.local.process_runtime import ProcessRuntime
from headrace.fleet.local.scaling_metrics import RequestCounter, RequestLoad
from headrace.fleet.local.scaling_targets import (
    CPU,
    MEMORY,
    QUERY,
    WINDOW,
    InvalidTarget,
    ScalingTarget,
    parse_windows,
    scaling_target,
)
from headrace.fleet.local.scheduler import Scheduler
from headrace.fleet.local.service_proxy import Routers
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import ResourceUsage, System, UsageReader
from headrace.fleet.local.workloads import desired_replicas, replica_bounds
from headrace.fleet.planning import plan
from headrace.platforms.kubernetes_client.objects import Document, kind_of
from headrace.platforms.node_resources import PortAllocator
from headrace.platforms.processes import session_members
from support.waiting import eventually

_windows = st.builds(Windows, st.floats(1, 100), st.floats(0.1, 1), st.floats(1.1, 10))


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=50),
    st.floats(0.01, 1e4),
    st.integers(1, 20),
    st.integers(0, 50),
    st.integers(0, 60),
    st.sampled_from([0.0, 0.1]),
    _windows,
)
def test_a_decision_is_never_outside_of_its_bounds(
    values: list[float], target: float, least: int, more: int, ready: int, tolerance: float, windows: Windows
) -> None:
    aim = AutoscalerSpec(target, least + more, least, 1.0, tolerance, windows)
    samples = [Sample(float(time), value) for time, value in enumerate(values)]
    now = float(len(values) - 1)
    result = decide_replicas(samples, now, aim, ready, PanicState(), least)
    assert result is not None and least <= result.replicas <= least + more
    assert result.seconds in (windows.stable_seconds, windows.panic_seconds)
    assert min(values) - 1e-6 <= result.average <= max(values) * (1 + 1e-9) + 1e-6


@given(st.integers(1, 50), st.floats(-0.1, 0.1))
def test_a_load_within_the_tolerance_changes_nothing(wanted: int, off: float) -> None:
    aim = AutoscalerSpec(4.0, 100, 1, 1.0, 0.1)
    load = 4.0 * wanted * (1 + off * 0.999)
    result = decide_replicas([Sample(0.0, load)], 0.0, aim, wanted, desired=wanted)
    assert result is not None and result.replicas == wanted


def test_scaling_down_waits_for_the_stable_window() -> None:
    """Twelve seconds of load, then none: the average of ten seconds takes replicas away step by step."""
    aim = AutoscalerSpec(1.0, 8, 1, 1.0, 0.0, Windows(10.0, 1.0, 100.0))
    samples = [Sample(float(second), 8.0 if second < 12 else 0.0) for second in range(30)]
    there = 8
    seen = []
    for second in range(12, 30):
        result = decide_replicas(samples[: second + 1], float(second), aim, there)
        assert result is not None
        there = result.replicas
        seen.append(there)
    assert seen[0] == 8 and seen[-1] == 1 and seen == sorted(seen, reverse=True) and len(set(seen)) > 3


def test_seconds_count_the_same_at_any_sampling_interval() -> None:
    meter = LoadMeter()
    for second in (0, 2, 4, 6):
        meter.add(float(second), 0, 0)
    for quarter in range(25, 41):
        meter.add(quarter / 4, 6, quarter)
    values = [sample.value for sample in meter.samples(CONCURRENCY)]
    assert values == [0.0] * 6 + [6.0] * 4
    assert [sample.time for sample in meter.samples(RPS)] == [float(number) for number in range(1, 11)]


def test_a_manual_scale_holds_until_the_window_is_full() -> None:
    keeper = WorkloadScaler(ScalingTarget("w", "engine", CONCURRENCY, AutoscalerSpec(10.0, 5)))
    changes = []
    wanted = 1
    for second in range(200):
        keeper.add_load(float(second), RequestLoad(0, 0, True))
        if second == 20:
            wanted = 4
        change = keeper.decide(float(second), wanted, wanted)
        if change is not None:
            wanted = change.replicas
            changes.append((second, change.message))
    assert [when for when, _ in changes] == [80, 81]
    assert changes[0][1] == "concurrency 0.0 over 60 s, target 10 at 70%: 4 -> 2 replicas"


def test_a_burst_is_reported_by_the_window_that_saw_it() -> None:
    keeper = WorkloadScaler(ScalingTarget("w", "engine", RPS, AutoscalerSpec(10.0, 9)))
    for second in range(66):
        keeper.add_load(float(second), RequestLoad(0, 35 * max(0, second - 59), True))
    change = keeper.decide(65.0, 1, 1)
    assert change is not None
    assert change.message == "requests/s 35.0 over 6 s, target 10 at 70%: 1 -> 5 replicas"


def test_a_ratio_is_of_what_there_is() -> None:
    """KEDA's metricType Value: three replicas, twice too few, so six."""
    keeper = WorkloadScaler(ScalingTarget("w", "engine", QUERY, AutoscalerSpec(1.0, 9, 1, 1.0, 0.1), ratio=True))
    assert keeper.query is None and keeper.decide(0.0, 3, 3) is None
    keeper.add_sample(1.0, 2.0 * 3)
    change = keeper.decide(1.0, 3, 3)
    assert change is not None and change.replicas == 6


# What routers see


def status(**counts: tuple[int, int]) -> dict[str, Any]:
    """Of a router: requests and outstanding by port, `p1=(10, 2)`."""
    backends = [
        {"url": f"http://127.0.0.1:{port[1:]}", "requests": count, "retries": 0, "outstanding": now}
        for port, (count, now) in counts.items()
    ]
    return {"backends": backends, "leaving": [], "queued": 0}


@given(st.lists(st.dictionaries(st.sampled_from(["p1", "p2", "p3"]), st.integers(0, 50)), min_size=2, max_size=20))
def test_arrivals_never_decrease_when_replicas_are_added_or_removed(looks: list[dict[str, int]]) -> None:
    arrivals, before = RequestCounter(), 0
    for look in looks:
        reported = status(**{port: (count, 1) for port, count in look.items()})
        result = arrivals.update({"a": reported, "b": None}, {1, 2})
        assert result.total >= before
        assert result.concurrent == len(look.keys() & {"p1", "p2"}) and result.routed == bool(result.concurrent)
        before = result.total


def test_arrivals_count_new_pods_restarted_routers_and_those_that_wait() -> None:
    arrivals = RequestCounter()
    assert arrivals.update({"r": status(p1=(100, 3))}, {1, 2}) == RequestLoad(3, 0, True)
    assert arrivals.update({"r": status(p1=(110, 0), p2=(5, 0))}, {1, 2}).total == 15
    assert arrivals.update({"r": None}, {1, 2}) == RequestLoad(0, 15, False)
    assert arrivals.update({"r": status(p1=(112, 0), p2=(5, 0))}, {1, 2}).total == 17
    assert arrivals.update({"r": status(p1=(2, 0), p2=(0, 0))}, {1, 2}).total == 19
    waiting = {
        **status(p1=(2, 1), p9=(0, 1)),
        "queued": 10,
        "leaving": [{"url": "http://127.0.0.1:2", "outstanding": 4}],
    }
    assert arrivals.update({"r": waiting}, {1, 2}).concurrent == 1 + 5 + 4


# What processes use


@pytest.fixture
def busy() -> Iterator[int]:
    """A session whose second process computes."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    started = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    yield started.pid
    for session_member in session_members(started.pid):
        os.kill(session_member.pid, signal.SIGKILL)
    started.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_session_is_measured_with_all_its_processes(busy: int) -> None:
    usage = UsageReader()
    eventually(lambda: len(UsageReader().read(0.0, [busy])[busy].ticks) == 2)
    before = usage.read(0.0, [busy])[busy]
    eventually(lambda: usage.cores(before, usage.read(1.0, [busy])[busy], 1.0) > 0)
    assert before.memory > 1 << 20
    assert usage.read(2.0, [2**22 + 1]) == {2**22 + 1: ResourceUsage()}


def test_cores_are_of_processes_that_were_there_before() -> None:
    usage = UsageReader()
    tick = usage.cores(ResourceUsage({(1, 1): 0}), ResourceUsage({(1, 1): 100}), 1.0)
    before, after = ResourceUsage({(1, 1): 100, (2, 5): 50}), ResourceUsage({(1, 1): 300, (2, 9): 1000, (3, 1): 77})
    assert usage.cores(before, after, 2.0) == pytest.approx(tick)


# What autoscalers of a plan ask for


def facts() -> ClusterFacts:
    runner: dict[str, Any] = {
        "name": "ome-container",
        "image": "i",
        "command": ["c"],
        "ports": [{"containerPort": 8080}],
    }
    runner["resources"] = {"requests": {"cpu": "2", "memory": "1Gi"}}
    formats = [{"name": "stub", "modelFormat": {"name": "stub"}, "autoSelect": False}]
    runtime = document(
        "ClusterServingRuntime", "r", {"supportedModelFormats": formats, "engineConfig": {"runner": runner}}
    )
    model = document(
        "ClusterBaseModel", "m", {"modelFormat": {"name": "stub"}, "storage": {"storageUri": "local:///m"}}
    )
    created = cluster_facts([runtime, model], FleetSettings(node_pinning="none"))
    return ClusterFacts(
        created.runtimes, created.models, created.weights, created.accelerators, CAPABILITIES, created.settings
    )


def objects(annotations: dict[str, str] | None = None, **engine: Any) -> list[Document]:
    spec = {"model": {"name": "m"}, "runtime": {"name": "r"}, "engine": {"minReplicas": 1, "maxReplicas": 4, **engine}}
    planned = plan(document("InferenceService", "s", spec, annotations=annotations or {}), facts())
    assert not planned.problems
    return list(planned.objects)


def aimed(annotations: dict[str, str] | None = None, **engine: Any) -> ScalingTarget | InvalidTarget | None:
    created = objects(annotations, **engine)
    (workload,) = (item for item in created if kind_of(item) == "Deployment")
    return scaling_target(workload, created)


@pytest.mark.parametrize(
    ("engine", "metric", "target", "share", "words"),
    [
        ({"scaleMetric": "concurrency", "scaleTarget": 4}, CONCURRENCY, 4.0, 0.7, "concurrency 9.0 {}, target 4 at 70%"),
        ({"scaleMetric": "rps"}, RPS, 200.0, 0.7, "requests/s 9.0 {}, target 200 at 70%"),
        ({}, CPU, 1.6, 1.0, "cpu 9.00 cores {}, target 1.60 per replica"),
        ({"scaleMetric": "memory", "scaleTarget": 50}, MEMORY, 2.0**29, 1.0, "memory 0 MiB {}, target 512 MiB per replica"),
        ({"kedaConfig": {"enableKeda": True, "scalingThreshold": "0.5"}}, QUERY, 0.5, 1.0, "query 9 {}, target 0.5"),
    ],
)  # fmt: skip
def test_an_autoscaler_becomes_an_aim(
    engine: dict[str, Any], metric: str, target: float, share: float, words: str
) -> None:
    result = aimed(**engine)
    assert isinstance(result, ScalingTarget)
    aim = result.spec
    assert (result.metric, aim.target, aim.utilisation, aim.min_replicas, aim.max_replicas) == (
        metric,
        target,
        share,
        1,
        4,
    )
    assert result.describe(9.0, 60.0) == words.format("over 60 s") and result.component == "engine" and not result.ratio


def resource(name: str, **target: Any) -> dict[str, Any]:
    return {"type": "Resource", "resource": {"name": name, "target": target}}


def pods(name: str, **target: Any) -> dict[str, Any]:
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": target}}


@pytest.mark.parametrize(
    ("given", "metric", "target"),
    [
        (resource("cpu", type="Utilization", averageUtilization=50), CPU, 1.0),
        (resource("cpu", type="AverageValue", averageValue="500m"), CPU, 0.5),
        (resource("memory", type="AverageValue", averageValue="256Mi"), MEMORY, 2.0**28),
        (pods("rps", type="AverageValue", averageValue="2500m"), RPS, 2.5),
    ],
)
def test_the_metric_of_an_autoscaler_block_becomes_an_aim(given: dict[str, Any], metric: str, target: float) -> None:
    result = aimed(autoscaler={"class": "HPA", "hpa": {"metrics": [given]}})
    assert isinstance(result, ScalingTarget)
    assert (result.metric, result.spec.target) == (metric, target)


@pytest.mark.parametrize(
    ("autoscaler", "reason", "words"),
    [
        ({"class": "HPA", "hpa": {"metrics": [resource("cpu"), resource("memory")]}}, "UnsupportedMetric", "keep one"),
        ({"class": "HPA", "hpa": {"metrics": [pods("queue", averageValue="1")]}}, "UnsupportedMetric", "named queue"),
        ({"class": "HPA", "hpa": {"metrics": [pods("rps", value="1")]}}, "UnsupportedMetric", "averageValue"),
        (
            {"class": "HPA", "hpa": {"metrics": [{"type": "External", "external": {"metric": {"name": "lag"}}}]}},
            "UnsupportedMetric",
            "External metrics named lag",
        ),
        ({"class": "KEDA", "keda": {"triggers": [{"type": "cron"}]}}, "UnsupportedTrigger", "not cron"),
        (
            {"class": "KEDA", "keda": {"triggers": [{"type": "prometheus"}, {"type": "kafka"}]}},
            "UnsupportedTrigger",
            "not prometheus, kafka",
        ),
    ],
)
def test_a_metric_that_one_machine_cannot_measure_states_the_reason(
    autoscaler: dict[str, Any], reason: str, words: str
) -> None:
    result = aimed(autoscaler=autoscaler)
    assert isinstance(result, InvalidTarget)
    assert result.reason == reason and words in result.message


def test_less_than_is_a_ratio() -> None:
    query = {
        "enableKeda": True,
        "customPromQuery": "avg(free)",
        "scalingOperator": "LessThan",
        "scalingThreshold": "10",
    }
    result = aimed(kedaConfig=query)
    assert isinstance(result, ScalingTarget) and result.ratio and result.spec.target == 1.0
    keeper = WorkloadScaler(result)
    keeper.decide(0.0, 2, 2)
    keeper.add_series(1.0, {(("__name__", "free"),): 5.0})
    change = keeper.decide(1.0, 2, 2)
    assert change is not None and change.replicas == 4


def test_a_fixed_replica_count_is_not_measured() -> None:
    assert aimed(maxReplicas=1) is None and aimed(minReplicas=3, maxReplicas=3) is None
    # From zero on requests are counted by the router that wakes it.
    assert (
        scaling_target(
            next(manifest for manifest in objects(minReplicas=0) if kind_of(manifest) == "Deployment"),
            objects(minReplicas=0),
        )
        is None
    )


def test_a_service_that_cannot_be_scaled_states_the_reason() -> None:
    result = aimed(kedaConfig={"enableKeda": True, "customPromQuery": "topk(3, waiting)"})
    assert isinstance(result, InvalidTarget) and result.reason == "UnsupportedQuery" and "topk()" in result.message
    result = aimed({WINDOW: "soon"}, scaleMetric="rps")
    assert isinstance(result, InvalidTarget) and result.reason == "InvalidAnnotation" and WINDOW in result.message
    workload: Document = {"kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": {}}}
    scaler: Document = {
        "kind": "HorizontalPodAutoscaler",
        "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "d"}, "minReplicas": 1, "maxReplicas": 2},
    }
    bare = scaling_target(workload, [scaler])
    assert isinstance(bare, InvalidTarget) and "resources.requests.cpu" in bare.message


def test_knatives_annotations_set_the_windows() -> None:
    assert parse_windows({}) == KNATIVE
    prefix = "autoscaling.knative.dev/"
    claims = {f"{prefix}window": "1m30s", f"{prefix}panic-window-percentage": "20.0"}
    assert parse_windows({**claims, f"{prefix}panic-threshold-percentage": "150"}) == Windows(90.0, 18.0, 1.5)
    for name, value in (("window", "0s"), ("window", "2h"), ("panic-window-percentage", "nan"), ("window", "60")):
        with pytest.raises(InvalidArgument, match=name):
            parse_windows({f"{prefix}{name}": value})
    result = aimed({f"{prefix}target-utilization-percentage": "100", WINDOW: "10s"}, scaleMetric="concurrency")
    assert (
        isinstance(result, ScalingTarget)
        and result.spec.utilisation == 1.0
        and result.spec.windows.stable_seconds == 10
    )


def test_kedas_bounds() -> None:
    scaler: Document = {"kind": "ScaledObject", "spec": {"minReplicaCount": 2, "maxReplicaCount": 5}}
    requests = [desired_replicas({"spec": {"replicas": index}}, scaler) for index in (0, 1, 4, 9)]
    assert requests == [2, 2, 4, 5] and replica_bounds(scaler) == (2, 5)
    sleepy: Document = {"kind": "ScaledObject", "spec": {"minReplicaCount": 0, "maxReplicaCount": 5}}
    assert desired_replicas({"spec": {"replicas": 0}}, sleepy) == 0 and replica_bounds(sleepy) == (1, 5)


def test_the_loop_sleeps_until_a_scale_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room between least and most nothing is looked at, however long it runs; a change is seen at once."""
    settings = LocalSettings(tmp_path)
    system = System(SystemClock())
    live, routers, store = (
        ServiceObjects(tmp_path / "objects"),
        Routers(settings, system),
        DocumentStore(tmp_path / "documents"),
    )
    machine, events = (
        Scheduler(PortAllocator(tmp_path / "ports", "127.0.0.1", 10_900, 10_901)),
        Events(tmp_path / "events", 10),
    )
    received: list[ScalingCondition] = []
    scaling = Autoscaler(
        live,
        Kubelet(settings, store, machine, routers, events, ProcessRuntime(), system),
        routers,
        lambda *_: pytest.fail("nothing is to be scaled"),
        lambda _, note: received.append(note),
    )
    looks: list[float] = []
    monkeypatch.setattr(Autoscaler, "_update_targets", _counted(Autoscaler._update_targets, looks))

    async def run() -> None:
        task = asyncio.ensure_future(scaling.run())
        live.apply(("default", "s"), objects(maxReplicas=1))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(looks) == 1 and not scaling.components(("default", "s"))
        live.apply(("default", "s"), objects(kedaConfig={"enableKeda": True, "customPromQuery": "topk(1, a)"}))
        scaling.objects_changed()
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(looks) == 2 and scaling.components(("default", "s")) == {"engine"}
        assert [item.reason for item in received] == ["UnsupportedQuery"] and scaling.conditions(
            ("default", "s")
        ) == received
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def _counted(work: Callable[[Autoscaler], None], looks: list[float]) -> Callable[[Autoscaler], None]:
    def counted(scaling: Autoscaler) -> None:
        looks.append(1.0)
        work(scaling)

    return counted


# What is told


def test_conditions_state_the_reason_and_survive_a_restart_of_the_daemon() -> None:
    then, now = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    ready: dict[str, Any] = {"conditions": [{"type": "Ready", "status": "True"}]}
    assert with_scaling_conditions(ready, (), (), now) == ready
    first = with_scaling_conditions(
        ready, {"engine"}, [ScalingCondition("engine", True, "SuccessfulRescale", "1 -> 2")], then
    )
    (_, told) = first["conditions"]
    assert (told["type"], told["status"], told["severity"]) == ("EngineScalingActive", "True", "Info")
    assert with_scaling_conditions(first, {"engine"}, (), now) == first
    again = with_scaling_conditions(
        first, {"engine"}, [ScalingCondition("engine", True, "SuccessfulRescale", "2 -> 3")], now
    )
    assert again["conditions"][1]["lastTransitionTime"] == told["lastTransitionTime"]
    notes = [
        ScalingCondition("engine", True, "SuccessfulRescale", "2 -> 3"),
        ScalingCondition("engine", False, "NoMetric", "none"),
    ]
    bad = with_scaling_conditions(again, {"engine"}, notes, now)["conditions"][1]
    assert (bad["status"], bad["message"], bad["lastTransitionTime"]) == ("False", "none", "2026-01-02T00:00:00Z")
    assert with_scaling_conditions(first, (), (), now) == ready
