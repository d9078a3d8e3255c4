# SPDX-License-Identifier: Apache-2.0
"""A front router watches its ConfigMap: other shares need no new pods."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_cluster import MemoryCluster
from plan_cases import RUNNER, facts, live, one, service
from typer.testing import CliRunner

from headrace.cli.router import router_group
from headrace.cli.router_settings import router_settings
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.front_router import config_version
from headrace.fleet.router.proxy import RouterProxy
from headrace.platforms.kubernetes_client.api import Unreachable
from headrace.programs import router_config_map
from headrace.programs.router import SettingsReloader
from headrace.programs.router_config_map import WatchedConfigMap
from support.virtual_time import run_virtual
from support.waiting import eventually_async


def split(percent: int, **engine: Any) -> Plan:
    def asked(image: str, **more: Any) -> dict[str, Any]:
        return service({"engine": {"minReplicas": 2, "runner": {**RUNNER, "image": image}, **engine, **more}})

    objects = live(plan(asked("engine:1"), facts()))
    for _ in range(2):
        made = plan(asked("engine:2", canaryTrafficPercent=percent), facts(), objects)
        objects = live(made)
    return made


def pods_of(made: Plan) -> Any:
    return one(made, "Deployment", "chat-front")["spec"]["template"]


def test_another_share_changes_the_configuration_and_no_pod() -> None:
    few, many = split(10), split(60)
    config_maps = [one(made, "ConfigMap", "chat-front") for made in (few, many)]
    assert config_maps[0]["data"] != config_maps[1]["data"]
    assert config_version(config_maps[0]) != config_version(config_maps[1])
    assert one(few, "Deployment", "chat-front") == one(many, "Deployment", "chat-front")
    # How long a pod may take to stop is a matter of the pod.
    assert pods_of(split(10, timeoutSeconds=999)) != pods_of(few)


def test_a_front_may_read_its_own_configuration() -> None:
    made = split(10)
    (rule,) = one(made, "Role", "chat-front")["rules"]
    assert rule == {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": ["chat-front"],
        "verbs": ["get", "list", "watch"],
    }
    assert pods_of(made)["spec"]["serviceAccountName"] == "chat-front"


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"config_version": 3}'])
def test_a_configuration_of_others_has_no_version(text: str) -> None:
    assert config_version({"data": {"router.yaml": text}}) == ""


def config_map(cluster: MemoryCluster, text: str) -> None:
    metadata = {"name": "chat-front", "namespace": "default"}
    cluster.set({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"router.yaml": text}})


class FailingCluster(MemoryCluster):
    """An API server that may be away."""

    down = False

    async def list(self, *arguments: Any, **options: Any) -> Any:
        if self.down:
            raise Unreachable("the test has cut the wire")
        return await super().list(*arguments, **options)


def test_contents_come_once_and_again_after_a_failure() -> None:
    async def scenario() -> None:
        cluster, seen = FailingCluster(), list[str]()
        cluster.down = True
        watched = WatchedConfigMap(cluster, "default", "chat-front", "router.yaml")

        async def follow() -> None:
            async for text in watched.contents():
                seen.append(text)

        task = asyncio.ensure_future(follow())
        await asyncio.sleep(10)
        config_map(cluster, "a")
        await asyncio.sleep(10)
        assert seen == []
        cluster.down = False
        await eventually_async(lambda: seen == ["a"])
        config_map(cluster, "a")
        config_map(cluster, "b")
        await asyncio.sleep(200)  # several watches
        config_map(cluster, "")
        cluster.remove("ConfigMap", "chat-front")
        await asyncio.sleep(10)
        assert seen == ["a", "b"], "without a content, the last one stays"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(scenario())


def test_a_running_router_takes_over_other_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(weights: tuple[int, int], version: str) -> str:
        backends = [f"http://127.0.0.1:{port},weight={weight}" for port, weight in zip((1, 2), weights, strict=True)]
        return json.dumps(
            {"backends": backends, "policy": "weighted", "health": {"path": ""}, "config_version": version}
        )

    async def scenario() -> None:
        cluster = MemoryCluster()
        config_map(cluster, text((90, 10), "one"))
        monkeypatch.setattr(
            router_config_map,
            "connect_config_map",
            lambda namespace, name, key: WatchedConfigMap(cluster, namespace, name, key),
        )
        path = tmp_path / "router.yaml"
        path.write_text(text((90, 10), "one"))
        settings = router_settings({}, str(path))
        assert settings.config_version == "one"
        followed = replace(settings, config_map="default/chat-front")
        proxy = RouterProxy(settings.router)
        await proxy.start()
        reloader = SettingsReloader(followed, proxy, lambda content: router_settings({}, str(path), content))
        reloader.start()
        try:
            backends = list(proxy.backends.all)
            config_map(cluster, text((40, 60), "two"))
            await eventually_async(lambda: proxy._status.as_json()["config_version"] == "two")
            assert [backend.weight for backend in proxy.backends.all] == [40, 60]
            assert list(proxy.backends.all) == backends, "the same connections"
            # The mounted file is late, and changes nothing any more.
            path.write_text(text((80, 20), "late"))
            await asyncio.sleep(120)
            assert proxy._status.as_json()["config_version"] == "two"
            # Nor does a content that cannot be read.
            config_map(cluster, "backends: 3")
            await asyncio.sleep(10)
            assert [backend.weight for backend in proxy.backends.all] == [40, 60]
        finally:
            await reloader.close()
            await proxy.close()

    run_virtual(scenario())


@pytest.mark.parametrize("words", [["--config-map", "default/front"], ["--config", "x", "--config-map", "front"]])
def test_a_config_map_belongs_to_a_file(words: list[str]) -> None:
    told = CliRunner().invoke(router_group, words)
    assert told.exit_code and "NAMESPACE/NAME" in told.output + told.stderr
