# SPDX-License-Identifier: Apache-2.0
"""`make serve`, the first thing that a new user types: make itself, with its own rules, in a clone that is all links.

The environment is the one that runs the tests, so that nothing is installed; ports are free ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
FILES = ["Makefile", "pyproject.toml", "scripts", "examples"]
QUESTION = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["bring water"]}]}


def ask(url: str, document: Any = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        return answer.read()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_command_makes_the_models_and_serves_them(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    port, log = free_port(), tmp_path / "log"
    ports = {"PORT": port, "SERVER_GRPC_PORT": free_port(), "SERVER_METRICS_PORT": free_port()}
    with log.open("wb") as output:
        make = subprocess.Popen(
            ["make", "--assume-old=.venv/.installed", "serve"],
            cwd=tmp_path,
            env=os.environ | {f"INFERENCE_{name}": str(number) for name, number in ports.items()},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        eventually(lambda: make.poll() is not None or "model(s)" in log.read_text(), within=240)
        assert make.poll() is None, log.read_text()
        assert (tmp_path / "build" / "models" / "strings" / "config.pbtxt").is_file()
        document = json.loads(ask(f"http://127.0.0.1:{port}/v2/models/strings/infer", QUESTION))
        assert document["outputs"][0]["data"] == ["BRING WATER"]
        states = json.loads(ask(f"http://127.0.0.1:{port}/v2/repository/index", {}))
        assert {state["state"] for state in states} == {"READY"}, states
        assert b"Headrace" in ask(f"http://127.0.0.1:{port}/console")
    finally:
        os.killpg(make.pid, signal.SIGINT)  # Ctrl-C: make and all that it runs
        make.wait(90)
    assert "SIGINT: draining" in log.read_text() and "Traceback" not in log.read_text()
    eventually(lambda: not _are_left(make.pid))  # who is no child of make's may end a moment after it


def _are_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
