# SPDX-License-Identifier: Apache-2.0
"""Latency targets on one machine, without a fleet: what is read from routers, and what an autoscaler's object means."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.fleet.autoscaling.latency_counts import LATENCY_BOUNDS_SECONDS
from headrace.fleet.autoscaling.latency_target import LatencySpec
from headrace.fleet.local.latency_scaling import LatencyScaling
from headrace.fleet.local.scaling_targets import LATENCY, WINDOW, InvalidTarget, ScalingTarget, scaling_target

WORKLOAD = {"kind": "Deployment", "metadata": {"name": "chat-engine", "labels": {"component": "engine"}}}


def external(name: str, value: str, percentile: str = "99") -> dict[str, Any]:
    metric = {"name": name, "selector": {"matchLabels": {"percentile": percentile}}}
    return {"type": "External", "external": {"metric": metric, "target": {"type": "Value", "value": value}}}


def autoscaler(*metrics: dict[str, Any]) -> dict[str, Any]:
    spec = {
        "scaleTargetRef": {"kind": "Deployment", "name": "chat-engine"},
        "minReplicas": 2,
        "maxReplicas": 8,
        "metrics": list(metrics),
    }
    return {
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat-engine", "annotations": {WINDOW: "30s"}},
        "spec": spec,
    }


def test_external_metrics_of_ours_are_latency_targets() -> None:
    metrics = external("headrace_first_token_latency", "1500m"), external("headrace_token_latency", "40m")
    target = scaling_target(WORKLOAD, [autoscaler(*metrics)])
    assert isinstance(target, ScalingTarget)
    assert (target.metric, target.component) == (LATENCY, "engine")
    spec = target.latency
    assert spec is not None
    assert (spec.first_seconds, spec.next_seconds, spec.percentile) == (1.5, pytest.approx(0.04), 99.0)
    assert (spec.min_replicas, spec.max_replicas, spec.windows.stable_seconds) == (2, 8, 30.0)


def test_other_external_metrics_are_not_measured() -> None:
    assert isinstance(scaling_target(WORKLOAD, [autoscaler(external("queue_length", "5"))]), InvalidTarget)


def streams(requests: int, first: int = 0, generating: int = 0) -> dict[str, Any]:
    counts = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
    counts[25] = first
    counted = {"counts": counts, "seconds": 0.2 * first}
    none = {"counts": [0] * len(counts), "seconds": 0.0}
    return {
        "streams": {"requests": requests, "generating": generating, "first_token": counted, "token": none},
    }


def test_what_an_earlier_daemon_saw_is_not_counted_again() -> None:
    scaling = LatencyScaling(LatencySpec(9, 1, first_seconds=1.0))
    assert scaling.add_statuses(0.0, {"chat": streams(1000, 1000)})
    assert not scaling.busy
    assert scaling.add_statuses(2.0, {"chat": streams(1004, 1004, 3)})
    assert scaling.busy
    decision = scaling.decide(2.0, 1, 1)
    assert decision is not None
    assert decision.replicas == 1
    assert decision.reason.startswith("2 requests/s expected in 30 s")


def test_routers_come_go_and_do_not_answer() -> None:
    scaling = LatencyScaling(LatencySpec(9, 1, first_seconds=1.0))
    assert not scaling.add_statuses(0.0, {"chat": {"backends": []}})
    assert scaling.decide(0.0, 1, 1) is None
    scaling.add_statuses(0.0, {"chat": streams(10, 10)})
    scaling.add_statuses(1.0, {"chat": None, "other": {}})
    scaling.add_statuses(2.0, {"chat": streams(12, 12)})  # two more
    scaling.add_statuses(3.0, {"chat": streams(4, 4)})  # it was restarted: four more
    decision = scaling.decide(4.0, 1, 1)
    assert decision is not None
    assert decision.reason.startswith("1.5 requests/s expected")


def test_the_time_without_replicas_is_not_part_of_the_load() -> None:
    scaling = LatencyScaling(LatencySpec(9, 0, first_seconds=1.0))
    for number in range(1000):
        scaling.add_statuses(2.0 * number, {"chat": streams(0)})
    # A request woke it.
    scaling.add_statuses(2000.0, {"chat": streams(10, 10)})
    assert scaling.decide(2000.0, 1, 1) is None
    scaling.add_statuses(2002.0, {"chat": streams(20, 20)})
    decision = scaling.decide(2002.0, 1, 1)
    assert decision is not None
    assert decision.reason.startswith("first token p95 ")
    assert "; 5 requests/s expected" in decision.reason


def test_the_time_that_replicas_need_is_learned() -> None:
    scaling = LatencyScaling(LatencySpec(9, 1, first_seconds=1.0))
    now, requests = 0.0, 0
    for _ in range(60):
        now, requests = now + 2.0, requests + 2
        scaling.add_statuses(now, {"chat": streams(requests, requests)})
        scaling.decide(now, 1, 1)
    now, requests = now + 2.0, requests + 400
    scaling.add_statuses(now, {"chat": streams(requests, 130)})
    decision = scaling.decide(now, 1, 1)
    assert decision is not None and decision.replicas == 9
    began = now
    for ready in (1, 1, 1, 1, 9):
        now, requests = now + 2.0, requests + 400
        scaling.add_statuses(now, {"chat": streams(requests, 130)})
        scaling.decide(now, 9, ready)
    assert scaling.start_seconds == (30.0 + now - began) / 2


def test_a_number_that_a_user_sets_is_kept_for_a_window() -> None:
    scaling = LatencyScaling(LatencySpec(9, 1, first_seconds=1.0))
    replicas = []
    for number in range(80):
        now = 2.0 * number
        desired = 1 if number < 40 else 5
        scaling.add_statuses(now, {"chat": streams(number, number)})
        decision = scaling.decide(now, desired, desired)
        if decision is not None:
            replicas.append((number, decision.replicas))
            if decision.replicas < desired:
                break
    number, wanted = replicas[-1]
    assert (wanted, number >= 40 + 30) == (4, True)
