# SPDX-License-Identifier: Apache-2.0
"""The Lepton driver keeps the contract of all drivers, against FakeLepton: not against the platform itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import pytest
from driver_contract import NOTHING, DriverContract, command, free_port
from fake_lepton import FakeLepton

from headrace.platforms.contract import Container, Driver, Handle, LaunchSpec
from headrace.platforms.lepton.deployments import deployment_name
from headrace.platforms.lepton.driver import LeptonDriver
from headrace.platforms.lepton.settings import LeptonSettings


class TestLepton(DriverContract):
    cancel_after = (0.0, 0.002, 0.005, 0.01, 0.1)

    @pytest.fixture(autouse=True)
    def platform(self) -> Iterator[None]:
        with FakeLepton() as fake:
            self.fake = fake
            yield

    async def driver(self) -> Driver:
        return LeptonDriver(
            LeptonSettings(
                workspace="ws",
                token="lepton-token",
                gateway=self.fake.url,
                storage="node-nfs:shared",
                poll_seconds=0.05,
            )
        )

    def spec(
        self,
        job_id: str,
        program: str = "serve",
        words: Sequence[str] = (),
        environment: Mapping[str, str] = NOTHING,
        secret_environment: Mapping[str, str] = NOTHING,
    ) -> LaunchSpec:
        # Replicas of the fake have no network of their own, so each has a port of its own.
        port = free_port()
        box = Container("nvcr.io/nvidia/tao/tao-toolkit:7.0.1", command(program, words, port=port), port)
        return LaunchSpec(job_id, container=box, environment=environment, secret_environment=secret_environment)

    async def kill_behind_its_back(self, handle: Handle) -> None:
        self.fake.kill(deployment_name(handle.job_id))

    async def existing_resources(self) -> set[str]:
        return self.fake.resources()

    async def visible_text(self, handle: Handle) -> str:
        shown = [
            self.fake.answer("GET", f"/api/v2/workspaces/ws/{path}", "Bearer lepton-token", b"")[1]
            for path in ("deployments", "usersecrets")
        ]
        assert deployment_name(handle.job_id) in json.dumps(shown)
        return json.dumps(shown)
