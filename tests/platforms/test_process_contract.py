# SPDX-License-Identifier: Apache-2.0
"""The process driver keeps the contract of all drivers."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from driver_contract import HERE, NOTHING, DriverContract

from headrace.platforms.contract import PORT, Driver, Handle, LaunchSpec
from headrace.platforms.process import ProcessDriver
from support.ports import service_ports


class TestProcess(DriverContract):
    cancel_after = (0.0, 0.001, 0.01, 0.1)

    @pytest.fixture(autouse=True)
    def root(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "launch"

    async def driver(self) -> Driver:
        return ProcessDriver(self.folder, ports=service_ports(), environ={**os.environ, "PYTHONPATH": str(HERE)})

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
            "contract_program:main",
            (program, "--port", PORT, *words),
            environment=environment,
            secret_environment=secret_environment,
        )

    async def kill_behind_its_back(self, handle: Handle) -> None:
        os.kill(handle.data["pid"], signal.SIGKILL)

    async def existing_resources(self) -> set[str]:
        files = {str(path) for path in self.folder.glob("jobs/*")} | {
            str(path) for path in self.folder.glob("ports/[0-9]*")
        }
        running = {
            str(process.pid)
            for process in psutil.process_iter(["cmdline", "status"])
            if str(self.folder) in str(process.info["cmdline"]) and process.info["status"] != psutil.STATUS_ZOMBIE
        }
        return files | running
