# SPDX-License-Identifier: Apache-2.0
"""A service on two nodes of Slurm: the job's own script and two real microservices, under a substitute for srun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.platforms.launch_plan import StartRequest, launch_spec
from headrace.platforms.launcher import Launcher
from headrace.platforms.slurm.batch_script import build_batch_job
from headrace.platforms.slurm.settings import SlurmSettings
from support import llm_models
from support.programs import HEADRACE, Program
from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SRUN = f"""#!{sys.executable}
# Starts a task for each node, all on this machine; a task that fails ends the others, as --kill-on-bad-exit=1 says.
import os, signal, subprocess, sys, time
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = [word for word in sys.argv[1:] if word not in options]
count = next(int(word.partition("=")[2]) for word in options if word.startswith("--nodes="))
assert f"--ntasks={{count}}" in options and "--kill-on-bad-exit=1" in options
given = sys.stdin.buffer.read()
step = {{"SLURM_STEP_NUM_NODES": str(count), "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NODELIST": "n[1-9]"}}
tasks = []
for number in range(count):
    task = subprocess.Popen(command, stdin=subprocess.PIPE, env={{**os.environ, **step, "SLURM_NODEID": str(number)}})
    task.stdin.write(given)
    task.stdin.close()
    tasks.append(task)
def stop(number, _frame):
    for task in tasks:
        task.send_signal(number)
signal.signal(signal.SIGTERM, stop)
while any(task.poll() is None for task in tasks):
    if any(task.poll() for task in tasks):
        stop(signal.SIGKILL, None)
    time.sleep(0.05)
sys.exit(max(abs(task.returncode) for task in tasks))
"""
SCONTROL = "#!/bin/bash\necho 'NodeName=n1 Arch=x NodeAddr=127.0.0.1 NodeHostName=n1'\n"


@contextmanager
def job(model: Path, nodes: int, place: Path) -> Iterator[tuple[str, Program]]:
    """A job that runs: the URL of its service, and the process of its script."""
    tools, folder = place / "tools", place / f"job{nodes}"
    for created in (tools, folder):
        created.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o700)
    environ = {"SLURM_PARTITION": "main", "SLURM_CONTAINER_MODE": "bare"}
    launcher = Launcher(place / "registry.json", state_dir=place / "state", environ=environ)
    plan = launcher._plan(StartRequest("tao-dataservices", str(model), "slurm", num_gpus=0, nodes=nodes))
    spec = launch_spec(plan, None, place)
    created_job = build_batch_job(spec, SlurmSettings(partition="main", mode="bare"), str(folder), 0.0)
    (folder / "env").write_text(created_job.variables)
    (folder / "script").write_text(created_job.script)
    program = Program(
        folder / "script",
        log=folder / "log",
        command=("bash",),
        env={
            "PATH": f"{tools}:{HEADRACE.parent}:{os.environ['PATH']}",
            "SLURMD_NODENAME": "n1",
            "TMPDIR": str(place),
            "OMP_NUM_THREADS": "1",
        },
        new_session=True,
    )
    program.start()
    try:
        assert spec.container is not None
        yield f"http://127.0.0.1:{spec.container.port}", program
    finally:
        # All of the job's processes, as Slurm does it.
        subprocess.run(["kill", "-TERM", "--", f"-{program.pid}"], check=False)
        program.wait()


def asked(url: str, path: str, body: Any = None) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}{path}", None if body is None else json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def answer_when_loaded(url: str, program: Program) -> str:
    def is_loaded() -> bool:
        try:
            status = asked(url, "/api/v1/status")
        except OSError:
            if program.process.poll() is not None:
                raise RuntimeError(program.log) from None
            return False
        if status["status"] == "unhealthy":
            raise RuntimeError(status)
        return bool(status["model_loaded"])

    eventually(is_loaded, within=300)
    messages = [{"role": "user", "content": "the quick brown fox"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    return str(asked(url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])


def test_a_service_on_two_nodes_answers_as_one_on_one(tmp_path: Path) -> None:
    model = llm_models.tiny_llama(tmp_path / "tiny")
    with job(model, 1, tmp_path) as (url, program):
        expected = answer_when_loaded(url, program)
    with job(model, 2, tmp_path) as (url, program):
        assert answer_when_loaded(url, program) == expected
        assert "Joined node 0 as node 1 of 2" in program.log
    assert not (tmp_path / "job2" / "env").exists()
