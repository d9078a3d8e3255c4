# SPDX-License-Identifier: Apache-2.0
"""One language model over two nodes of a real Slurm, by `headrace service start --nodes 2`, also when a task is killed.

The nodes are two slurmds on this machine. Beside test_slurm_nodes, which has a substitute for srun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slurm_platform import Cluster, cluster

from support import llm_models
from support.programs import HEADRACE, Program
from support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers"), pytest.mark.timeout(1800)]
LONG_SECONDS = 600.0
BODY = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster(nodes=2) as slurm:
        yield slurm


@pytest.fixture
def place(slurm: Cluster) -> Iterator[Path]:
    """A folder of the services, which are stopped; and of which nothing is left."""
    with tempfile.TemporaryDirectory(prefix="hr-jobs-") as folder:
        before = slurm.resources(Path(folder))
        yield Path(folder)
        slurm.tool("scancel", "--user=root")  # of a test that failed
        eventually(lambda: slurm.tool("squeue", "-h") == "", within=LONG_SECONDS)
        assert {item for item in slurm.resources(Path(folder)) - before if item.startswith("pid")} == set()


def headrace(slurm: Cluster, place: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **slurm.environ,
        "SLURM_PARTITION": "main",
        "SLURM_CONTAINER_MODE": "bare",
        "SLURM_BASE_RESULTS_DIR": str(place),
        "PATH": f"{HEADRACE.parent}:{os.environ['PATH']}",
    }
    options = ("--registry", place / "registry.json", "--json")
    return subprocess.run(
        [HEADRACE, *words, *options], env=environment, capture_output=True, text=True, timeout=LONG_SECONDS + 60
    )


def answer(url: str, path: str) -> str:
    request = urllib.request.Request(f"{url}{path}", json.dumps(BODY).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def test_a_model_over_two_nodes_answers_as_one_server_and_a_killed_task_ends_the_job(
    slurm: Cluster, place: Path, tmp_path: Path
) -> None:
    model = llm_models.tiny_llama(tmp_path / "tiny")
    with Program(
        "serve", model, "--http-port", "0", "--grpc-port", "0", log=tmp_path / "log", ready="ready: "
    ) as alone:
        request = urllib.request.Request(
            f"{alone.url}/v1/chat/completions",
            json.dumps({"model": "tiny", **BODY}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            expected = json.load(response)["choices"][0]["message"]["content"]
    words = ["service", "start", "--arch", "tao-dataservices", "--model-path", model, "--platform", "slurm"]
    words += ["--nodes", "2", "--num-gpus", "0", "--setting", "memory=2G", "--setting", "cpus=1"]
    started = headrace(slurm, place, *words, "--timeout", str(LONG_SECONDS))
    assert started.returncode == 0, started.stderr
    service = json.loads(started.stdout)
    assert slurm.tool("squeue", "-h", "-o", "%D %N").split() == ["2", "n[1-2]"]
    assert answer(service["host_url"], "/v1/chat/completions") == expected
    (task,) = [
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get("SLURM_NODEID") == "1"
        and str(place) in (process.info["environ"] or {}).get("SLURM_SUBMIT_DIR", "")
        and "microservice" in (process.info["cmdline"] or ())
    ]
    os.kill(task, signal.SIGKILL)
    eventually(lambda: slurm.tool("squeue", "-h") == "", within=LONG_SECONDS)
    shown = headrace(slurm, place, "service", "status", service["job_id"])
    assert "Failed" in shown.stdout
    assert headrace(slurm, place, "service", "stop", service["job_id"]).returncode == 0
