# SPDX-License-Identifier: Apache-2.0
"""The queue, the ConfigMap and the manifests, without a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headrace.fleet.cluster.configuration import settings_from
from headrace.fleet.cluster.resources import CHILDREN
from headrace.fleet.documents import FleetSettings
from headrace.fleet.install.manifests import ManifestSettings, cluster_rules, manifests
from headrace.fleet.planning.pod_defaults import SLEEP_ACTION
from headrace.platforms.kubernetes_client import work_queue
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError
from headrace.platforms.kubernetes_client.objects import Document, Resource, ServedResource, served_resources
from headrace.platforms.kubernetes_client.work_queue import WorkQueue, backoff
from headrace.programs.operator import Controller, OperatorSettings
from support.virtual_time import run_virtual
from support.waiting import eventually_async

KEY = ("default", "a")


def test_a_key_is_never_processed_concurrently_and_once_more_if_requeued_meanwhile() -> None:
    seen: list[int] = []
    inside = 0

    async def work(key: tuple[str, str]) -> bool:
        nonlocal inside
        inside += 1
        seen.append(inside)
        for _ in range(3):
            jobs.add(KEY)
            await asyncio.sleep(0)
        inside -= 1
        return True if len(seen) < 3 else await asyncio.Event().wait()

    async def run() -> None:
        nonlocal jobs
        jobs = WorkQueue(work, workers=4)
        jobs.add(KEY)
        jobs.add(KEY)
        task = asyncio.create_task(jobs.run())
        while len(seen) < 3:
            await asyncio.sleep(0)
        assert not jobs.idle
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    jobs: WorkQueue
    asyncio.run(run())
    assert seen == [1, 1, 1]


def test_what_fails_is_tried_again_later_and_later() -> None:
    assert [round(backoff(times) / work_queue.FIRST_SECONDS / 2 ** (times - 1), 2) <= 1 for times in range(1, 8)] == [
        True
    ] * 7
    assert backoff(1) < backoff(4) < backoff(9) <= work_queue.LONGEST_SECONDS
    assert backoff(10**6) <= work_queue.LONGEST_SECONDS
    tries: list[float] = []

    async def work(key: tuple[str, str]) -> bool:
        tries.append(asyncio.get_running_loop().time())
        return len(tries) == 2

    async def run() -> None:
        jobs = WorkQueue(work)
        jobs.add(KEY)
        task = asyncio.create_task(jobs.run())
        await eventually_async(lambda: len(tries) == 2 and jobs.idle)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(run())
    assert tries[1] - tries[0] >= work_queue.FIRST_SECONDS * 0.7


class KnativeRemovedApi(ApiClient):
    """A FakeApi of a cluster that has all kinds and no objects; Knative is taken away after the first look at its kinds."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.looks = 0
        self.versions = [(1, 33), (1, 29)]

    async def version(self) -> tuple[int, int]:
        return self.versions.pop(0)

    async def discover(self, resources: Sequence[Resource]) -> dict[str, frozenset[str]]:
        self.looks += 1
        found: dict[str, set[str]] = {}
        for each in resources:
            if self.looks == 1 or each.capability != "knative":
                found.setdefault(ServedResource(each, each.versions[0]).api_version, set()).add(each.plural)
        return {name: frozenset(plurals) for name, plurals in found.items()}

    async def get(self, where: ServedResource, namespace: str, name: str) -> Document | None:
        return None

    async def list(self, where: ServedResource, selector: str = "", *_: Any) -> tuple[list[Document], str]:
        if where.resource.capability == "knative":
            raise ApiError(404, "NotFound", "it is gone")
        return [], "1"

    async def watch(self, *_: Any) -> AsyncIterator[tuple[str, Document]]:
        await asyncio.Event().wait()
        yield "ADDED", {}


def test_a_kind_removed_during_discovery_does_not_stop_the_operator() -> None:
    async def run() -> None:
        api = KnativeRemovedApi()
        controller = Controller(api, OperatorSettings(discover_seconds=0.01))
        following = asyncio.create_task(controller.follow())
        await eventually_async(lambda: controller.snapshot.complete)
        assert "knative" not in controller.snapshot.facts.capabilities
        # Asked once: a control plane that is being upgraded says now one and now the other.
        assert SLEEP_ACTION in controller.snapshot.facts.capabilities and len(api.versions) == 1
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


def test_the_config_map_of_ome_is_understood() -> None:
    ingress = {
        "ingressDomain": "example.org",
        "enableGatewayAPI": True,
        "disableIngressCreation": False,
        "omeIngressGateway": "gateways/main",
        "additionalIngressDomains": ["a.org"],
        "urlScheme": 7,
    }
    data = {"ingress": json.dumps(ingress), "deploy": '{"defaultDeploymentMode": "Serverless"}', "kedaConfig": "{no"}
    found = settings_from(FleetSettings(), {"data": data})
    assert (found.ingress_domain, found.enable_gateway_api, found.disable_ingress_creation) == (
        "example.org",
        True,
        False,
    )
    assert found.default_mode == "Serverless" and found.additional_domains == ("a.org",)
    assert found.url_scheme == "http" and found.prometheus_address == FleetSettings().prometheus_address
    assert settings_from(FleetSettings(), None) == FleetSettings()
    assert settings_from(FleetSettings(), {"data": {"ingress": "[]"}}) == FleetSettings()


@pytest.mark.parametrize(
    ("value", "wanted"), [("0", 0), ("20", 20), ("3600", 3600), ("3601", 5), ("-1", 5), ("true", 5), ('"9"', 5)]
)
def test_the_wait_of_pods_before_they_stop(value: str, wanted: int) -> None:
    data = {"deploy": f'{{"preStopSeconds": {value}}}'}
    assert settings_from(FleetSettings(), {"data": data}).pre_stop_seconds == wanted


def test_the_best_served_version_is_used() -> None:
    offered = {"autoscaling/v2beta2": frozenset({"horizontalpodautoscalers"}), "v1": frozenset({"services"})}
    found = {each.kind: where.api_version for each, where in served_resources(CHILDREN, offered).items()}
    assert found == {"HorizontalPodAutoscaler": "autoscaling/v2beta2", "Service": "v1"}
    where = ServedResource(CHILDREN[0], "v1")
    assert where.path("ns", "x", "status") == "/api/v1/namespaces/ns/services/x/status"
    assert where.path() == "/api/v1/services"


def test_the_operator_requests_no_more_rights_than_it_needs() -> None:
    rules = cluster_rules()
    assert not any("*" in word for rule in rules for words in rule.values() for word in words)
    assert not any("secrets" in rule["resources"] for rule in rules)
    verbs = {verb for rule in rules for verb in rule["verbs"]}
    assert not verbs & {"escalate", "bind", "impersonate", "deletecollection"}
    kinds = [each["kind"] for each in manifests(ManifestSettings(namespace="x", image="i:1", replicas=2))]
    assert kinds.count("CustomResourceDefinition") == 8 and kinds.count("Deployment") == 2
    made = manifests(ManifestSettings(namespace="x", image="i:1"))
    commands = [
        each["spec"]["template"]["spec"]["containers"][0]["args"][:2] for each in made if each["kind"] == "Deployment"
    ]
    assert commands == [["operator", "run"], ["operator", "activator"]]
