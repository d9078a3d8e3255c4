# SPDX-License-Identifier: Apache-2.0
"""The shared activator as the operator sees it: its pods, and a port for each service."""

from __future__ import annotations

import json
from typing import Any, cast

from headrace.fleet.cluster.activator_pods import ActivatorPods, front_owner
from headrace.fleet.planning.shared_activator import ACTIVATION, FIRST_PORT, LAST_PORT
from headrace.platforms.kubernetes_client.api import ApiClient


def pod(name: str, address: str = "10.0.0.7", ready: bool = True, **metadata: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "headrace-system", "uid": name, **metadata},
        "status": {"podIP": address, "conditions": [condition]},
    }


def front(name: str, port: int, created: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    owner = {"kind": "InferenceService", "name": name}
    metadata = {
        "name": f"{name}-front",
        "namespace": "default",
        "creationTimestamp": created,
        "ownerReferences": [owner],
    }
    return {"metadata": {**metadata, "annotations": {ACTIVATION: json.dumps({"port": port})}}}


def pods(flips: list[bool] | None = None, **metadata: Any) -> ActivatorPods:
    made = ActivatorPods(cast("ApiClient", None), "headrace-system", (flips if flips is not None else []).append)
    made.informer.put(pod("a", **metadata))
    return made


def port(made: ActivatorPods, name: str, *fronts: dict[str, Any]) -> int:
    activator = made.for_service(("default", name), lambda: [(front_owner(item), item) for item in fronts])
    assert activator is not None
    return activator.port


def test_only_ready_pods_of_its_own_namespace_count() -> None:
    flips: list[bool] = []
    made = pods(flips)
    made.informer.put(pod("forged", "10.6.6.6", namespace="team-a"))
    made.informer.put(pod("starting", "10.0.0.8", ready=False))
    made.informer.put(pod("going", "10.0.0.9", deletionTimestamp="2026-01-01T00:00:00Z"))
    made.informer.put(pod("b", "10.0.1.7"))
    assert made.addresses == ("10.0.0.7", "10.0.1.7")
    made.informer.put(pod("a", ready=False, resourceVersion="2"))
    made.informer.put(pod("b", "10.0.1.7", ready=False, resourceVersion="2"))
    assert made.for_service(("default", "chat"), tuple) is None
    assert flips == [True, False, False, True]


def test_a_service_keeps_its_port_and_no_two_have_the_same() -> None:
    made = pods()
    assert port(made, "chat", front("chat", 20123)) == 20123, "as it is written"
    assert [port(made, name) for name in ("a", "b", "a")] == [FIRST_PORT, FIRST_PORT + 1, FIRST_PORT], "not written yet"
    assert port(made, "c", front("d", FIRST_PORT + 2)) == FIRST_PORT + 3
    made.forget(("default", "a"))
    assert port(made, "e") == FIRST_PORT


def test_of_two_with_the_same_port_the_older_one_keeps_it() -> None:
    made = pods()
    fronts = [front("new", 20000, "2026-02-01T00:00:00Z"), front("old", 20000)]
    assert port(made, "old", *fronts) == 20000
    assert port(made, "new", *fronts) == 20001


def test_without_a_free_port_a_service_has_its_own_front() -> None:
    made = pods()
    fronts = [front(f"s{number}", number) for number in range(FIRST_PORT, LAST_PORT + 1)]
    assert made.for_service(("default", "chat"), lambda: [(front_owner(item), item) for item in fronts]) is None
