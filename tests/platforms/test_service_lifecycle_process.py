# SPDX-License-Identifier: Apache-2.0
"""`headrace service` with processes of this machine: no platform is needed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from service_lifecycle import ARCH, Shell, run_lifecycle, tiny_model

pytestmark = pytest.mark.slow  # quick: test_launcher.py; the commands alone, tests/cli


def test_three_services_from_start_to_stop(tmp_path: Path) -> None:
    shell = Shell(tmp_path, {}, chat=False, words=["--arch", ARCH, "--model-path", tiny_model(tmp_path / "model")])

    def resources() -> set[str]:
        running = {
            f"pid {process.pid}"
            for process in psutil.process_iter(["cmdline", "status"])
            if str(tmp_path) in str(process.info["cmdline"]) and process.info["status"] != psutil.STATUS_ZOMBIE
        }
        return running | {str(path) for path in tmp_path.glob("services.json.services/jobs/*")}

    def kill(row: dict[str, Any]) -> None:
        os.kill(row["handle"]["pid"], signal.SIGKILL)

    started = run_lifecycle(shell, kill=kill, resources=resources, logged="The model is ready")
    for row in started:
        assert 8080 <= row["host_port"] <= 8199 and row["host_url"] == f"http://localhost:{row['host_port']}"
