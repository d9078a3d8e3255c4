# SPDX-License-Identifier: Apache-2.0
"""`headrace serve` as a process: open ports, log lines, and shutdown under load."""

from __future__ import annotations

import http.client
import json
import logging
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.ports import free_port
from support.programs import run
from support.servers import serve_in_thread, serve_process
from support.tiny_models import CONFIG, make_models
from support.waiting import eventually

REQUEST = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
).encode()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_all_protocols_on_their_ports(tmp_path: Path) -> None:
    metrics = free_port()
    options = ("--metrics-port", str(metrics), "--id=here", "--http-thread-count=4")
    with serve_process(tmp_path / "log", *options) as server:
        assert len(server.ports) == 3 and server.ports[0] == metrics
        http_port = server.ports[1]
        assert get(http_port, "/v2/health/ready")[0] == get(http_port, "/api/health/ready")[0] == 200
        assert json.loads(get(http_port, "/v2")[1])["name"] == "here"
        assert 'id: "here"' in get(http_port, "/api/status")[1]
        for port in (metrics, http_port):
            assert 'nv_inference_request_success{model="identity"' in get(port, "/metrics")[1]
        assert get(metrics, "/v2/health/ready")[0] == 404
        assert "--http-address 0.0.0.0" in server.log
        assert server.log.count("--http-thread-count does nothing here") == 1


def test_ports_that_are_not_allowed() -> None:
    with serve_in_thread("--allow-grpc=false", "--allow-metrics", "false") as server:
        (port,) = server.ports
        assert get(port, "/v2/health/live")[0] == 200
        assert get(port, "/metrics")[0] == 404
    with serve_in_thread("--allow-http=0") as server:
        (port,) = server.ports
        assert get(port, "/v2/health/live")[0] == 404


def test_the_default_metrics_port_may_be_taken(caplog: pytest.LogCaptureFixture) -> None:
    # Whether or not another program has it by chance, this one has it for sure.
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8002))
            taken.listen(1)
        except OSError:
            pass
        http_port, grpc_port = free_port(), free_port()
        with (
            caplog.at_level(logging.WARNING),
            serve_in_thread(f"--http-port={http_port}", f"--grpc-port={grpc_port}") as server,
        ):
            assert server.ports == [http_port, grpc_port]
            assert "port 8002 is taken" in caplog.text and "--metrics-port" in caplog.text
            assert get(http_port, "/metrics")[0] == 200
        done = run("serve", f"--http-port={http_port}", "--metrics-port=8002")
        assert done.returncode == 2 and "cannot listen on 127.0.0.1:8002" in done.stderr


def test_a_port_for_several_servers() -> None:
    http_port, grpc_port = free_port(), free_port()
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port))
    options = ("--reuse-http-port", "true", "--reuse-grpc-port=true", "--allow-metrics=false")
    with serve_in_thread(*ports, *options) as first, serve_in_thread(*ports, *options) as second:
        assert first.ports == second.ports == [http_port, grpc_port]
        assert {get(http_port, "/v2/health/ready")[0] for _ in range(8)} == {200}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--http-prot=1"], "there is no option --http-prot: did you mean --http-port?"),
        (["--http-port"], "--http-port needs a value"),
        (["--trace-endpoint=nowhere"], "tracing endpoint 'nowhere' is not allowed"),
    ],
)
def test_a_wrong_command_line(options: list[str], told: str) -> None:
    done = run("serve", *options)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


class Client(threading.Thread):
    """Asks on one connection after the other until none is accepted, and keeps what was sent and not answered."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.answered = 0
        self.lost: list[object] = []
        self.over = False

    def run(self) -> None:
        while not self.over:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            try:
                connection.connect()
            except OSError:
                return
            try:
                self._use(connection)
            finally:
                connection.close()

    def _use(self, connection: http.client.HTTPConnection) -> None:
        while not self.over:
            try:
                connection.request("POST", "/v2/models/echo/infer", REQUEST)
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(error)
                return
            if answer.status != 200:
                self.lost.append((answer.status, body))
                return
            self.answered += 1
            if answer.getheader("connection") == "close":
                return


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_sigterm_under_load(tmp_path: Path, workers: str) -> None:
    models = make_models(tmp_path / "models", echo=CONFIG)
    with serve_process(tmp_path / "log", models, "--workers", workers) as server:
        clients = [Client(server.port) for _ in range(6)]
        for client in clients:
            client.start()
        watcher = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        ready = []

        def ready_status() -> int:
            watcher.request("GET", "/v2/health/ready")
            answer = watcher.getresponse()
            answer.read()
            ready.append(answer.status)
            return answer.status

        assert ready_status() == 200
        eventually(lambda: min(client.answered for client in clients) >= 20)
        before = sum(client.answered for client in clients)
        server.send(signal.SIGTERM)
        # The connection is still there while it drains, and tells that the server is not ready any more.
        while ready_status() == 200:
            pass
        watcher.close()
        assert ready[-1] == 400
        for client in clients:
            client.join(100)
        assert server.wait() == 0
        assert [client.lost for client in clients] == [[]] * 6
        assert sum(client.answered for client in clients) > before
