# SPDX-License-Identifier: Apache-2.0
"""The driver `kubernetes` keeps the contract of all drivers, on a real API server; its pods are run by a fake kubelet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

pytest.register_assert_rewrite("driver_contract")

from driver_contract import NOTHING, DriverContract, command  # noqa: E402
from kubernetes_platform import Platform  # noqa: E402

from headrace.platforms.contract import Container, Driver, Handle, LaunchSpec  # noqa: E402
from support.ports import free_port  # noqa: E402

pytestmark = pytest.mark.platform


class TestKubernetes(DriverContract):
    @pytest.fixture(autouse=True)
    def platform(self, cluster: Platform) -> None:
        self.cluster = cluster

    async def driver(self) -> Driver:
        return self.cluster.driver()

    def spec(
        self,
        job_id: str,
        program: str = "serve",
        words: Sequence[str] = (),
        environment: Mapping[str, str] = NOTHING,
        secret_environment: Mapping[str, str] = NOTHING,
    ) -> LaunchSpec:
        # The fake kubelet's pods share one network: each has a port of its own, which the Service keeps.
        port = free_port()
        return LaunchSpec(
            job_id,
            container=Container("example/service:1", command(program, words, port=port), port),
            host_port=port,
            environment=environment,
            secret_environment=secret_environment,
            gpus=1,
            labels={"org": "a", "experiment": "b"},
        )

    async def kill_behind_its_back(self, handle: Handle) -> None:
        pods = self.cluster.server.kubectl("get", "pods", "-l", f"headrace-job={handle.job_id}", "-o", "name").split()
        self.cluster.kubelet.kill(pods[0].removeprefix("pod/"))

    async def existing_resources(self) -> set[str]:
        return await asyncio.to_thread(self.cluster.server.resources)

    async def visible_text(self, handle: Handle) -> str:
        what = "jobs,pods,services,endpoints,events,configmaps"
        return await asyncio.to_thread(self.cluster.server.kubectl, "get", what, "-A", "-o", "yaml")
