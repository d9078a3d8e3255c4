# SPDX-License-Identifier: Apache-2.0
"""`headrace service` on a real Docker engine: three services of a user's own architecture, in an image of the tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest
from docker_platform import IMAGE, DockerEngine
from service_lifecycle import PROGRAM, SECRET, Shell, run_lifecycle, write_architecture

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers")]


def test_three_services_from_start_to_stop(engine: DockerEngine, tmp_path: Path) -> None:
    write_architecture(tmp_path, ["python3", "/programs/service.py"], IMAGE)
    arguments = ["--arch", "show", "--architectures", "architectures", "--model-path", "/models/it's a model"]
    arguments += [
        "--platform",
        "local-docker",
        "--mount",
        f"{PROGRAM}:/programs/service.py",
        "--setting",
        "gpu_way=none",
    ]
    shell = Shell(tmp_path, {"DOCKER_HOST": engine.host}, chat=True, words=arguments)
    inspected: list[str] = []

    def kill(row: dict[str, object]) -> None:
        inspected.append(engine.docker("inspect", str(row["job_id"])))
        engine.docker("kill", str(row["job_id"]))

    started = run_lifecycle(shell, kill=kill, resources=engine.resources, logged="serving /models/it's a model")
    for row in started:
        assert 8080 <= row["host_port"] <= 8199 and row["host_url"] == f"http://localhost:{row['host_port']}"
        assert row["docker_url"] == f"http://{row['job_id']}:8080"
    assert SECRET not in inspected[0]
