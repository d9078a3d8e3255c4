# SPDX-License-Identifier: Apache-2.0
"""The driver `slurm` keeps the contract of all drivers on a real Slurm: from its own machine, and over a real ssh."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

pytest.register_assert_rewrite("driver_contract")

from driver_contract import NOTHING, DriverContract, command  # noqa: E402
from slurm_platform import Cluster  # noqa: E402

from headrace.platforms.contract import (  # noqa: E402
    Container,
    Driver,
    Handle,
    LaunchSpec,
    is_job_id,  # noqa: E402
)
from headrace.platforms.slurm.batch_script import node_port  # noqa: E402

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers")]


class Contract(DriverContract):
    ssh = False
    cancel_after = (0.0, 0.02, 0.1, 0.3)

    @pytest.fixture(autouse=True)
    def platform(self, slurm: Cluster) -> Iterator[None]:
        self.slurm = slurm
        self.jobs = Path(tempfile.mkdtemp(prefix="hr-jobs-"))
        yield
        shutil.rmtree(self.jobs)

    async def driver(self) -> Driver:
        return self.slurm.driver(self.jobs, ssh=self.ssh)

    def spec(
        self,
        job_id: str,
        program: str = "serve",
        words: Sequence[str] = (),
        environment: Mapping[str, str] = NOTHING,
        secret_environment: Mapping[str, str] = NOTHING,
    ) -> LaunchSpec:
        port = node_port(job_id) if is_job_id(job_id) else 20_000
        box = Container("", command(program, words, port=port, python=sys.executable), port)
        return LaunchSpec(job_id, container=box, environment=environment, secret_environment=secret_environment)

    async def kill_behind_its_back(self, handle: Handle) -> None:
        await asyncio.to_thread(self.slurm.tool, "scancel", "--full", "--signal=KILL", handle.data["platform_job_id"])

    async def existing_resources(self) -> set[str]:
        return await asyncio.to_thread(self.slurm.resources, self.jobs)

    async def visible_text(self, handle: Handle) -> str:
        number = handle.data["platform_job_id"]
        job = await asyncio.to_thread(self.slurm.tool, "scontrol", "show", "job", "-d", number)
        script = await asyncio.to_thread(self.slurm.tool, "scontrol", "write", "batch_script", number, "-")
        folders = (self.jobs, self.slurm.folder / "spool", self.slurm.folder / "log")
        results = [Path(top, name) for folder in folders for top, _, names in os.walk(folder) for name in names]
        return job + script + "".join(map(content_of, results))


def content_of(path: Path) -> str:
    """Nothing of what is no plain file, and of what is there no more: Slurm writes its state anew and renames it."""
    try:
        return path.read_bytes().decode(errors="replace") if path.is_file() else ""
    except FileNotFoundError:
        return ""


class TestSlurm(Contract):
    pass


class TestSlurmOverSsh(Contract):
    ssh = True
