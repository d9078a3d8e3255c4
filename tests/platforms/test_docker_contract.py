# SPDX-License-Identifier: Apache-2.0
"""The Docker driver keeps the contract of all drivers, on a real engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

pytest.register_assert_rewrite("driver_contract")

from docker_platform import IMAGE, DockerEngine  # noqa: E402
from driver_contract import NOTHING, DriverContract, command  # noqa: E402

from headrace.platforms.contract import Container, Driver, Handle, LaunchSpec  # noqa: E402
from headrace.platforms.docker.driver import DockerDriver  # noqa: E402
from headrace.platforms.docker.settings import DockerSettings  # noqa: E402

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers")]


class TestDocker(DriverContract):
    cancel_after = (0.0, 0.05, 0.15, 0.4, 0.7)

    @pytest.fixture(autouse=True)
    def platform(self, engine: DockerEngine) -> None:
        self.engine = engine

    async def driver(self) -> Driver:
        # No image is waited for: a registry that is not there fails at once.
        return DockerDriver(DockerSettings(host=self.engine.host, pull_seconds=30))

    def spec(
        self,
        job_id: str,
        program: str = "serve",
        words: Sequence[str] = (),
        environment: Mapping[str, str] = NOTHING,
        secret_environment: Mapping[str, str] = NOTHING,
    ) -> LaunchSpec:
        return LaunchSpec(
            job_id,
            container=Container(IMAGE, command(program, words)),
            environment=environment,
            secret_environment=secret_environment,
        )

    async def kill_behind_its_back(self, handle: Handle) -> None:
        self.engine.docker("kill", handle.job_id)

    async def existing_resources(self) -> set[str]:
        return self.engine.resources()

    async def visible_text(self, handle: Handle) -> str:
        return self.engine.docker("inspect", handle.job_id) + self.engine.docker("top", handle.job_id)
