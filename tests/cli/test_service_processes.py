# SPDX-License-Identifier: Apache-2.0
"""`headrace service` with real services behind it, each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.ports import launchers_ports
from support.programs import HEADRACE
from support.programs import run as run_command
from support.waiting import eventually

ARCH = "tao-dataservices"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with launchers_ports():
        yield tmp_path
    left = [
        process.pid for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture
def model(folder: Path) -> Path:
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    created = folder / 'it\'s a "model"; $(touch CANARY)'
    created.mkdir()
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 2])],
        [helper.make_tensor_value_info("y", kind, ["n", 2])],
    )
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (created / "model.onnx").write_bytes(whole.SerializeToString())
    return created


def run(folder: Path, *words: object, code: int = 0, **environ: str) -> Any:
    done = run_command("service", *map(str, words), "--registry", "services.json", "--json", env=environ, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def test_a_real_service_from_start_to_stop(folder: Path, model: Path) -> None:
    secret = "wandb-0123456789abcdef"
    started = run(folder, "start", "--arch", ARCH, "--model-path", model.name, WANDB_API_KEY=secret)
    assert started["ready"] and started["model_path"] == str(model)
    process = psutil.Process(started["handle"]["pid"])
    assert started["job_id"] in process.cmdline()
    assert process.environ()["WANDB_API_KEY"] == secret
    status = run(folder, "status")
    assert status["state"] == "running" and status["service"]["model_loaded"] is True
    assert status["service"]["job_id"] == started["job_id"]
    log = run(folder, "logs")["log"]
    assert "The model is ready" in log
    assert secret not in log + json.dumps(status["service"]) + str(process.cmdline())
    assert secret not in (folder / "services.json").read_text()
    assert (folder / "services.json").stat().st_mode & 0o077 == 0
    body = '{"messages": [{"role": "user", "content": "hi"}]}'
    assert "does not chat" in run(folder, "request", "--body", body, "--yes", code=2)
    assert run(folder, "stop", "--yes")["status"] == "stopped"
    assert run(folder, "list") == []
    # Whoever adopts orphans here may take its time to note their end.
    with contextlib.suppress(psutil.NoSuchProcess):
        assert process.status() == psutil.STATUS_ZOMBIE
    assert list((folder / "services.json.services/jobs").iterdir()) == []
    assert not list(folder.rglob("CANARY"))


def test_a_model_that_cannot_be_loaded_is_reported_with_its_log(folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "model.onnx").write_bytes(b"no model")
    result = run(folder, "start", "--arch", ARCH, "--model-path", "broken", code=4)
    assert "will not be ready" in result and "last log lines" in result
    assert run(folder, "list") == []


def test_a_launcher_that_is_killed_leaves_what_is_found_again(folder: Path, model: Path) -> None:
    arguments = [HEADRACE, "service", "start", "--arch", ARCH, "--model-path", model, "--registry", "services.json"]
    launcher = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: launcher.poll() is not None or list(folder.glob("services.json.services/jobs/*/launch.json")))
    assert launcher.poll() is None
    launcher.kill()
    launcher.wait()
    [row] = run(folder, "list")
    # Killed before its gate was opened, the service has ended; after that, it runs.
    assert row["state"] in ("running", "ended", "starting")
    run(folder, "stop", row["job_id"])
    assert run(folder, "list") == []


@pytest.mark.parametrize("platform", ["local-docker", "slurm", "kubernetes", "lepton", "brev"])
def test_a_platform_without_its_tools_says_what_is_missing(folder: Path, platform: str) -> None:
    bare = {"PATH": str(folder), "HOME": str(folder), "KUBECONFIG": str(folder / "none"), "DOCKER_HOST": ""}
    unset = dict.fromkeys(("LEPTON_WORKSPACE_ID", "LEPTON_AUTH_TOKEN", "BREV_API_TOKEN", "SLURM_PARTITION"), "")
    result = run(folder, "preflight", "--platform", platform, code=1, **bare, **unset)
    assert not result["passed"] and any(not check["passed"] and check["message"] for check in result["checks"])
    assert set(result["variables"].values()) <= {"SET", "UNSET"}
    arguments = ["start", "--arch", ARCH, "--model-path", "/m", "--platform", platform, "--image", "headrace"]
    completed = run(folder, *arguments, code=1, **bare, **unset)
    assert completed.startswith("error: ") and "Traceback" not in completed
    assert run(folder, "list") == []
