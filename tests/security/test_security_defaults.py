# SPDX-License-Identifier: Apache-2.0
"""What a program that was told nothing lets others do (test 13): it listens on loopback, and control is off."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import stat
from pathlib import Path

import psutil
import pytest
from raw_requests import ask
from surfaces import RunningVerb, fleet_servers, program, write_echo

from support.ports import free_port
from support.servers import ThreadServer, serve_in_thread


def listens_on(running: RunningVerb | ThreadServer) -> set[str]:
    result = psutil.Process(running.pid).net_connections(kind="inet")
    listening = {item.laddr for item in result if item.status == psutil.CONN_LISTEN}
    ours = set(running.ports) if isinstance(running, ThreadServer) else {address.port for address in listening}
    return {address.ip for address in listening if address.port in ours}


def test_a_server_is_for_this_machine_and_is_not_controlled(tmp_path: Path) -> None:
    with serve_in_thread(write_echo(tmp_path / "models")) as running:
        assert listens_on(running) == {"127.0.0.1"}
        files = {
            "file:1/model.py": base64.b64encode(b"import os").decode(),
            "config": json.dumps({"backend": "python"}),
        }
        load = json.dumps({"parameters": files}).encode()
        region = json.dumps({"key": "/x", "offset": 0, "byte_size": 1}).encode()
        for path, body in (
            ("/v2/repository/models/echo/load", load),
            ("/v2/repository/models/echo/unload", b"{}"),
            ("/v2/systemsharedmemory/region/r/register", region),
            ("/api/modelcontrol/unload/echo", b""),
            ("/api/sharedmemorycontrol/register/r/x/0/1", b""),
        ):
            answer = ask(running.port, "POST", path, body)
            if path.startswith("/v2/repository/"):  # Triton's code for load and unload while the repository is polled
                assert answer.status == 503 and b"not allowed if polling is enabled" in answer.body, (path, answer)
            else:
                assert 400 <= answer.status < 500 or answer.status == 501, (path, answer)
        assert ask(running.port, "GET", "/v2/models/echo/ready").status == 200
        # Where a log or a trace is written is for who starts the server (Triton: CVE-2024-0087, CVE-2024-0100).
        for path, name in (("/v2/logging", "log_file"), ("/v2/trace/setting", "trace_file")):
            canary = tmp_path / name
            ask(running.port, "POST", path, json.dumps({name: str(canary)}).encode())
            ask(running.port, "GET", "/v2")
            assert not canary.exists()


def test_a_public_server_without_keys_has_no_administration_and_no_console(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ("--host", "0.0.0.0")  # noqa: S104
    with (
        caplog.at_level(logging.WARNING),
        serve_in_thread(write_echo(tmp_path / "models"), *arguments) as running,
    ):
        assert listens_on(running) == {"0.0.0.0"}  # noqa: S104
        for path in ("/admin/traffic", "/admin/traffic/echo", "/console", "/console/api/live"):
            assert ask(running.port, "GET", path).status == 404, path
        assert "other machines can connect without an API key" in caplog.text


def test_a_router_and_a_gateway_are_for_this_machine(tmp_path: Path) -> None:
    port = free_port()
    arguments = ("router", "--backend", "http://127.0.0.1:1", "--port", str(port))
    with program(tmp_path / "router", *arguments, ready=rf"routing http://[^ ]+:({port})\b") as running:
        assert listens_on(running) == {"127.0.0.1"}
    arguments = ("gateway", "--data-dir", str(tmp_path / "data"), "--port", "0")
    with program(tmp_path / "gateway", *arguments, ready=r"gateway: http://[^/]+:(\d+)/api/v1") as running:
        assert listens_on(running) == {"127.0.0.1"}
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").rglob("*") if path.is_file()}
        assert len(modes) > 3 and not [path for path, mode in modes.items() if mode & 0o077], modes


def test_the_fleet_of_this_machine_is_its_owners_alone(tmp_path: Path) -> None:
    async def mode() -> int:
        server = fleet_servers(tmp_path)["local fleet"]
        await server.start()
        try:
            (socket,) = (path for path in tmp_path.iterdir() if path.is_socket())
            return stat.S_IMODE(socket.stat().st_mode)
        finally:
            await server.drain(0.0)

    assert asyncio.run(mode()) == 0o600


@pytest.mark.parametrize("name", ["operator", "agent"])
def test_programs_of_a_cluster_take_nothing_from_who_connects(tmp_path: Path, name: str) -> None:
    assert {method for method, _ in fleet_servers(tmp_path)[name].site.routes.listed()} == {"GET"}
