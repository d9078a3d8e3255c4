# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of one node or two, with four pretended GPUs each, and a real sshd: see `scripts/platforms/slurm.sh`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headrace.platforms.slurm.driver import SlurmDriver
from headrace.platforms.slurm.settings import SlurmSettings

SCRIPT = Path(__file__).parents[2] / "scripts" / "platforms" / "slurm.sh"


@dataclass(frozen=True)
class Cluster:
    """One that runs."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """For Slurm's tools; and for the driver, which must not pass the rest of it on."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def settings(self, jobs: Path, *, ssh: bool = False, **given: Any) -> SlurmSettings:
        """For a driver whose files lie under `jobs`."""
        way: Mapping[str, Any] = {}
        if ssh:
            way = {
                "hosts": ("127.0.0.1",),
                "user": "root",
                "ssh_port": int((self.folder / "ssh_port").read_text()),
                "key_file": str(self.folder / "client_key"),
                "known_hosts": str(self.folder / "known_hosts"),
            }
        plain = {"partition": "main", "mode": "bare", "memory": "200M", "cpus": 1}
        return SlurmSettings(**{**plain, "folder": str(jobs / "jobs"), "state": jobs / "state", **way, **given})

    def driver(self, jobs: Path, *, ssh: bool = False, **given: Any) -> SlurmDriver:
        """Over ssh SLURM_CONF comes from the sshd: the driver is not told."""
        environ = dict(os.environ) if ssh else self.environ
        return SlurmDriver(self.settings(jobs, ssh=ssh, **given), environ=environ)

    def tool(self, *words: str) -> str:
        """What one of Slurm's tools prints."""
        return subprocess.run(words, env=self.environ, check=True, capture_output=True, text=True).stdout

    def resources(self, jobs: Path) -> set[str]:
        """All that is there of services: jobs that are not over, files, tunnels and other processes."""
        active = {f"job {line}" for line in self.tool("squeue", "-h", "-o", "%i").split()}
        # The connection that commands share is the driver's own, and ends by itself: see `test_slurm_services`.
        # Not by `rglob`, which stumbles over what is removed while it looks.
        below = [Path(top, name) for top, folders, files in os.walk(jobs) for name in folders + files]
        files = {
            str(path)
            for path in below
            if path.name not in ("jobs", "state", "tunnels", "ssh") and path.parent.name != "ssh"
        }
        running = {
            f"pid {process.pid}"
            for process in psutil.process_iter(["cmdline", "environ", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and "ControlMaster=yes" not in (process.info["cmdline"] or ())
            and (
                str(self.folder / "client_key") in (process.info["cmdline"] or ())
                or any(str(jobs) in value for value in (process.info["environ"] or {}).values())
            )
        }
        return active | files | running


@contextlib.contextmanager
def cluster(nodes: int = 1) -> Iterator[Cluster]:
    """Started and stopped; nothing is left."""
    # Not pytest's folder: the paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="hr-slurm-"))
    try:
        subprocess.run([SCRIPT, "start", folder, str(nodes)], check=True, timeout=180)
        yield Cluster(folder)
    finally:
        # Tunnels of a test that failed: none but ours has that key.
        for process in psutil.process_iter(["cmdline"]):
            if str(folder / "client_key") in (process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        subprocess.run([SCRIPT, "stop", folder], check=True, timeout=180)
        shutil.rmtree(folder)
