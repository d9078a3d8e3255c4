# SPDX-License-Identifier: Apache-2.0
"""`headrace service` on a real Slurm: three bare jobs with `headrace microservice`, from its own machine and over ssh."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_lifecycle import ARCH, HEADRACE, Shell, run_lifecycle, tiny_model
from slurm_platform import Cluster

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers")]


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's: ssh's shared connection is a socket, whose path must be short.
    path = Path(tempfile.mkdtemp(prefix="hr-show-"))
    yield path
    shutil.rmtree(path)


class ClusterUser:
    """A user of the cluster, with a model there."""

    def __init__(self, slurm: Cluster, folder: Path, environ: dict[str, str], *settings: str) -> None:
        self._slurm = slurm
        self._folder = folder
        model = tiny_model(folder / "model")
        common = {
            "SLURM_PARTITION": "main",
            "SLURM_CONTAINER_MODE": "bare",
            "SLURM_BASE_RESULTS_DIR": f"{folder}/results",
        }
        arguments = ["--arch", ARCH, "--model-path", str(model), "--platform", "slurm", "--num-gpus", "0"]
        for setting in ("memory=200M", "cpus=1", f"tools={HEADRACE.parent}", *settings):
            arguments += ["--setting", setting]
        self.shell = Shell(folder, {**common, **environ}, chat=False, words=arguments)

    def kill(self, row: dict[str, Any]) -> None:
        """As an administrator would."""
        self._slurm.tool("scancel", "--full", "--signal=KILL", row["platform_job_id"])

    def resources(self) -> set[str]:
        """Of the cluster, and of this machine: tunnels and what is known of them."""
        state = self._folder / "services.json.services" / "slurm" / "tunnels"
        return self._slurm.resources(self._folder / "results" / "headrace") | {str(path) for path in state.rglob("*")}


def test_three_services_from_start_to_stop(slurm: Cluster, folder: Path) -> None:
    me = ClusterUser(slurm, folder, {"SLURM_CONF": slurm.environ["SLURM_CONF"]})
    started = run_lifecycle(me.shell, kill=me.kill, resources=me.resources, logged="The model is ready")
    for row in started:
        assert row["slurm_node"] and row["host_port"] >= 20_000 and "tunnel_pid" not in row


def test_three_services_over_ssh_from_start_to_stop(slurm: Cluster, folder: Path) -> None:
    environ = {"SLURM_HOSTNAME": "127.0.0.1", "SLURM_USER": "root", "SSH_KEY_PATH": str(slurm.folder / "client_key")}
    port = (slurm.folder / "ssh_port").read_text().strip()
    me = ClusterUser(slurm, folder, environ, f"ssh_port={port}", f"known_hosts={slurm.folder / 'known_hosts'}")

    def kill(row: dict[str, Any]) -> None:
        me.kill(row)
        # A tunnel that dies is made again for whoever asks next; what answers is the service, at its end.
        kept = next(item for item in me.shell("list", "--json") if item["job_id"] != row["job_id"])
        os.kill(kept["tunnel_pid"], signal.SIGKILL)
        assert "does not chat" in me.shell.read(me.shell.request(kept["job_id"]), code=2)
        again = next(row for row in me.shell("list", "--json") if row["job_id"] == kept["job_id"])
        assert again["tunnel_pid"] != kept["tunnel_pid"] and again["host_url"] == kept["host_url"]

    started = run_lifecycle(me.shell, kill=kill, resources=me.resources, logged="The model is ready")
    for row in started:
        assert row["slurm_node"] and row["host_url"] == f"http://localhost:{row['host_port']}"
        assert 8080 <= row["host_port"] <= 8199 and row["tunnel_pid"]
