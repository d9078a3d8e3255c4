# SPDX-License-Identifier: Apache-2.0
"""What others answer may be JSON that is nested more deeply than Python can go: whoever asked goes on all the same."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from headrace.cli.client import ServerClient
from headrace.core.errors import Unavailable
from headrace.fleet.pod_client import router_status
from headrace.fleet.status.workloads import pod_state
from headrace.jobs.batch_process import find_summary, read_progress
from headrace.jobs.service_status import StatusClient
from headrace.programs.doctor.servers import ask

DEEP = '{"state":' + "[" * 100_000


class _Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = DEEP.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), _Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_servers_services_and_routers(port: int) -> None:
    url = f"http://127.0.0.1:{port}"

    async def asked() -> None:
        services = StatusClient()
        try:
            assert await services(url, 30) is None
        finally:
            services.close()
        assert await router_status("127.0.0.1", port, 30) is None

    asyncio.run(asked())
    assert ask(url, "/v2", os.environ).document is None
    with pytest.raises(Unavailable, match="did not return JSON"):
        ServerClient(url).get("/v2")


def test_logs_and_files(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(DEEP)
    assert read_progress(tmp_path / "state.json") is None
    summary = '{"state":"done","total":1,"succeeded":1,"failed":0,"output":"o"}'
    assert find_summary(f"{summary}\n{DEEP}\n") is not None
    ended = {"terminated": {"exitCode": 1, "message": DEEP[:4000], "reason": "Error"}}
    status = {"phase": "Running", "containerStatuses": [{"name": "c", "state": ended, "restartCount": 1}]}
    assert "exit code 1" in pod_state({"metadata": {"name": "p"}, "spec": {}, "status": status}).message
