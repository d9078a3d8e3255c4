# SPDX-License-Identifier: Apache-2.0
"""Stored responses of a real server with two workers: each worker knows all of them, and a kill loses none."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from support.programs import BOTH_WORKERS_READY, Program
from support.servers import serve_process
from support.waiting import eventually

MAKE_MODEL = Path(__file__).parents[3] / "examples/12-scripted-agent/make_model.py"
LONG = " ".join(f"word{number}" for number in range(3000))
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0")
ASKED = 6
"""Connections: with two workers, both get some."""


def asked(url: str, what: str, *arguments: Any, **more: Any) -> Any:
    """Ask over a connection of its own, so that any worker may answer."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return getattr(client.responses, what)(*arguments, **more)


@pytest.mark.slow
def test_workers_share_responses_and_a_kill_loses_none(tmp_path: Path) -> None:
    make_model = runpy.run_path(str(MAKE_MODEL))["make_model"]
    make_model(tmp_path / "models", "short", ["One.", "Two."], "hermes", "none")
    make_model(tmp_path / "models", "long", [LONG], "hermes", "none")
    arguments = (tmp_path / "models", "--workers", "2", "--openai-state-dir", tmp_path / "state")
    server = Program("serve", *FREE_PORTS, *arguments, log=tmp_path / "first.log", ready=BOTH_WORKERS_READY).start()
    try:
        first = asked(server.url, "create", model="short", input="begin")
        assert [asked(server.url, "retrieve", first.id) for _ in range(ASKED)] == [first] * ASKED
        second = asked(server.url, "create", model="short", input="go on", previous_response_id=first.id)
        assert (first.output_text, second.output_text) == ("One.", "Two.")
        queued = [asked(server.url, "create", model="long", input="x", background=True).id for _ in range(3)]
        assert [asked(server.url, "cancel", name).status for name in queued] == ["cancelled"] * 3
        running = asked(server.url, "create", model="long", input="x", background=True)
        assert eventually(lambda: asked(server.url, "retrieve", running.id).status == "in_progress")
        workers = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
        for pid in (server.pid, *workers):
            os.kill(pid, signal.SIGKILL)
    finally:
        server.kill()
    with serve_process(tmp_path / "second.log", *arguments) as server:
        assert asked(server.url, "retrieve", second.id) == second
        assert asked(server.url, "retrieve", running.id).status == "failed"
        third = asked(server.url, "create", model="short", input="and?", previous_response_id=second.id)
        assert third.output_text == "Two."
