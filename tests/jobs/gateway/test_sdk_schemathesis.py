# SPDX-License-Identifier: Apache-2.0
"""Schemathesis against the gateway as a program, on both databases: whatever comes, it has no accident.

`tests/jobs/api` does the same within one process, and looks at every answer; here it is about what databases refuse.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_process import gateway
from picture_models import onnx_classifier

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 501, 503]
"""


@pytest.mark.parametrize("phases", ["examples,coverage", "fuzzing"])
def test_no_accident(tmp_path: Path, phases: str) -> None:
    with gateway(tmp_path) as running:
        key = running.command("users", "add", "alice", "--org", "acme", "--role", "admin").strip()
        model = onnx_classifier(tmp_path / "model")
        arguments = ("jobs", "register", str(model), "--org", "acme", "--arch", "classification", "--json")
        created = [json.loads(running.command(*arguments)) for _ in range(3)]
        token = running.login(key, "acme")
        wish = {"name": "w", "cloud_type": "self_hosted", "cloud_specific_details": {"a": "b"}}
        workspace = running.ask("POST", "/api/v1/orgs/acme/workspaces", wish, token).json["id"]
        names = f'[parameters]\n"path.org" = "acme"\n"path.workspace" = "{workspace}"\n'
        names += f'"path.experiment" = {[item["experiment_id"] for item in created]}\n'
        names += f'"path.job" = {[item["job_id"] for item in created]}\n'
        (tmp_path / "schemathesis.toml").write_text(names + SETTINGS)
        program = str(Path(sys.executable).with_name("st"))
        url = f"http://127.0.0.1:{running.port}/openapi.json"
        arguments = ("--phases", phases, "--checks", "not_a_server_error", "--max-examples", "10", "--seed", "2")
        run = subprocess.run(
            [program, "--config-file", "schemathesis.toml", "run", url, *arguments, "--workers", "1", "--no-shrink",
             "-H", f"Authorization: Bearer {key}"],
            cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-8000:]
        assert "Traceback" not in running.log
        assert running.ask("GET", "/api/v1/orgs/acme/experiments", token=key).status == 200
        running.end()
