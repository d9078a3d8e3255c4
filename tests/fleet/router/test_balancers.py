# SPDX-License-Identifier: Apache-2.0
"""The configurations in docs/balancers, run by Debian's nginx and HAProxy before two real servers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from routing import ask
from websockets.sync.client import connect

from headrace.net.http.exchange import Exchange
from headrace.net.http.sse import EventStream
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.net.websocket.handshake import accept
from headrace.programs.serve.protocols import build_site
from headrace.programs.serve.settings import ServerSettings
from support.engines import builtin_plane
from support.ports import free_port
from support.serving import Serving, serving

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]

BALANCERS = Path(__file__).resolve().parents[3] / "docs" / "balancers"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()
PATIENCE_SECONDS = 100.0


async def _headrace() -> Site:
    """A server as `headrace serve` makes it, and two routes of this test."""
    anywhere = Address.parse("127.0.0.1:0")
    site = build_site(await builtin_plane(), ServerSettings(http=anywhere, grpc=anywhere)).site

    def opened(connection: Any) -> None:
        connection.on_message = connection.send

    def events(exchange: Exchange) -> None:
        stream = EventStream(exchange)
        stream.send("first")

    site.routes.add("GET", "/test/socket", lambda exchange: accept(exchange, opened) and None)
    site.routes.add("GET", "/test/events", events)
    return site


class Balancer:
    """nginx or HAProxy with its example configuration, changed only in addresses and in where its files go."""

    def __init__(self, name: str, folder: Path, ports: tuple[int, int]) -> None:
        self.http, self.grpc = free_port(), free_port()
        program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
        assert program, f"{name} is not installed: run 'make test-platforms', which installs it"
        file = "nginx.conf" if name == "nginx" else "haproxy.cfg"
        text = (BALANCERS / file).read_text()
        for old, new in {
            "10.0.0.7:8000": f"127.0.0.1:{ports[0]}",
            "10.0.0.8:8000": f"127.0.0.1:{ports[1]}",
            "10.0.0.7:8001": f"127.0.0.1:{ports[0]}",
            "10.0.0.8:8001": f"127.0.0.1:{ports[1]}",
            "8070;": f"127.0.0.1:{self.http};",
            "8071 http2;": f"127.0.0.1:{self.grpc} http2;",
            "bind :8070": f"bind 127.0.0.1:{self.http}",
            "bind :8071": f"bind 127.0.0.1:{self.grpc}",
            # The folder of the test is readable by nobody else, and root's nginx would work as somebody else.
            "worker_processes auto;": f"{'user root;' if os.geteuid() == 0 else ''} worker_processes 2;",
            "/run/nginx-headrace.pid": str(folder / "nginx.pid"),
            "/var/log/nginx/headrace-error.log": str(folder / "error.log"),
            "\nhttp {\n": f"\nhttp {{\n    client_body_temp_path {folder}/body;\n    proxy_temp_path {folder}/proxy;\n",
        }.items():
            text = text.replace(old, new)
        assert "10.0.0." not in text
        config = folder / file
        config.write_text(text)
        if name == "nginx":
            command = [program, "-c", str(config), "-p", str(folder), "-g", "daemon off;"]
        else:
            command = [program, "-f", str(config), "-db"]
        self.log = folder / "balancer.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Until it takes connections."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                if ask(self.http, "GET", "/v2/health/ready").status == 200:
                    return
            except OSError:
                pass
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())


@contextmanager
def _balanced(name: str, folder: Path) -> Iterator[tuple[Balancer, Serving, Serving]]:
    with serving(_headrace) as one, serving(_headrace) as two:  # type: ignore[arg-type]
        balancer = Balancer(name, folder, (one.port, two.port))
        try:
            balancer.wait()
            yield balancer, one, two
        finally:
            balancer.process.terminate()
            balancer.process.wait(100)


def _counted(server: Serving) -> int:
    stats = json.loads(ask(server.port, "GET", "/v2/models/identity/stats").body)
    return int(stats["model_stats"][0]["inference_stats"]["success"]["count"])


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_the_example_serves_every_protocol_and_survives_a_server(name: str, tmp_path: Path) -> None:
    with _balanced(name, tmp_path) as (balancer, one, two):
        for _ in range(20):
            answer = ask(balancer.http, "POST", "/v2/models/identity/infer", BODY)
            assert answer.status == 200 and json.loads(answer.body)["outputs"][0]["data"] == [1, 2, 3, 4]
        assert _counted(one) > 3 and _counted(two) > 3
        _large_body(balancer)
        _events_at_once(balancer)
        with connect(f"ws://127.0.0.1:{balancer.http}/test/socket") as client:
            client.send("hello")
            assert client.recv(60) == "hello"
        _grpc(balancer)
        one.call(one.server.abort)
        statuses = [ask(balancer.http, "POST", "/v2/models/identity/infer", BODY).status for _ in range(20)]
        # One request may have been on its way over a connection that died.
        assert statuses.count(200) >= 19 and statuses[-1] == 200, statuses
        _grpc(balancer)


def _large_body(balancer: Balancer) -> None:
    data = [0.5] * 1_000_000
    body = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, len(data)], "datatype": "FP32", "data": data}]})
    answer = ask(balancer.http, "POST", "/v2/models/identity/infer", body.encode())
    assert answer.status == 200 and len(json.loads(answer.body)["outputs"][0]["data"]) == len(data)


def _events_at_once(balancer: Balancer) -> None:
    """The first event comes although the stream goes on: nothing waits for a buffer to fill."""
    with socket.create_connection(("127.0.0.1", balancer.http), timeout=30) as sock:
        sock.sendall(b"GET /test/events HTTP/1.1\r\nHost: headrace\r\n\r\n")
        text = b""
        while b"data: first\n\n" not in text:
            piece = sock.recv(4096)
            assert piece, text
            text += piece


def _grpc(balancer: Balancer) -> None:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{balancer.grpc}") as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
        for _ in range(4):
            assert client.infer("identity", [tensor]).as_numpy("OUTPUT0").tolist() == [[1, 1, 1, 1]]
