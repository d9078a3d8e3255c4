# SPDX-License-Identifier: Apache-2.0
"""The Brev driver keeps the contract of all drivers, against FakeBrev: not against the platform itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from driver_contract import NOTHING, DriverContract, command, free_port
from fake_brev import FakeBrev, living

from headrace.platforms.brev.driver import BrevDriver
from headrace.platforms.brev.settings import BrevSettings
from headrace.platforms.contract import Container, Driver, Handle, LaunchSpec


class TestBrev(DriverContract):
    cancel_after = (0.0, 0.15, 0.3, 0.45)
    # Each step is several programs. The other tests have quick ones in test_brev_parts.py, and on other platforms.
    quick_tests = (
        "test_a_service_is_started_reached_and_stopped_without_a_trace",
        "test_secrets_arrive_and_are_visible_nowhere",
        "test_hostile_texts_arrive_as_they_are_or_are_refused",
        "test_what_cannot_arrive_is_refused_before_anything_runs",
        "test_an_id_that_is_not_a_uuid_reaches_nothing",
    )

    @pytest.fixture(autouse=True)
    def platform(self, tmp_path: Path) -> Iterator[None]:
        self.root = tmp_path / "fake"
        self.fake = FakeBrev(self.root)
        self.fake.add_instance("box")
        self.state = tmp_path / "state"
        yield
        assert self.fake.end() == set()

    async def driver(self) -> Driver:
        return BrevDriver(
            BrevSettings(
                instance_id="box",
                program=str(self.fake.program),
                state_dir=self.state,
                poll_seconds=0.05,
                command_seconds=120,
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
        # Containers of the fake have no network of their own, so each has a port of its own.
        port = free_port()
        box = Container("nvcr.io/nvidia/tao/tao-toolkit:7.0.1", command(program, words, port=port), port)
        return LaunchSpec(job_id, container=box, environment=environment, secret_environment=secret_environment)

    async def kill_behind_its_back(self, handle: Handle) -> None:
        self.fake.kill("box", handle.job_id)

    async def existing_resources(self) -> set[str]:
        tunnels = {path.name for path in self.state.glob("*")} if self.state.is_dir() else set()
        return self.fake.resources() | (tunnels - {".lock"}) | living(self.root)

    async def visible_text(self, handle: Handle) -> str:
        """What `docker inspect` would show, and every word that brev was given."""
        config = self.root / "homes" / "box" / ".fake-docker" / handle.job_id / "config.json"
        return config.read_text() + str(self.fake.calls())
