# SPDX-License-Identifier: Apache-2.0
"""`headrace serve` under real load generators, and what SIGTERM does to requests in flight then."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from headrace.core.protobuf import Schema
from support.ports import free_port

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

SECONDS = 10
INFER = "/v2/models/identity/infer"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()


class Server:
    def __init__(self, *options: str) -> None:
        self.http, self.grpc = free_port(), free_port()
        program = Path(sys.executable).with_name("headrace")
        self.process = subprocess.Popen(
            [program, "serve", "--http-port", str(self.http), "--grpc-port", str(self.grpc), *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        ready = threading.Event()

        def read() -> None:
            for line in self.process.stderr or ():
                self.log.append(line)
                if "ready: " in line:
                    ready.set()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        assert ready.wait(120), self.log

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self._reader.join(60)
        if self.process.stderr:
            self.process.stderr.close()


@contextmanager
def running(*options: str) -> Iterator[Server]:
    server = Server(*options)
    try:
        yield server
    finally:
        server.close()


def tool(name: str) -> str:
    path = shutil.which(name)
    assert path, f"{name} is not installed: run 'make test-platforms', which installs it"
    return path


def test_wrk_runs_without_an_error(tmp_path: Path) -> None:
    script = tmp_path / "post.lua"
    script.write_text(f"wrk.method = 'POST'\nwrk.body = '{BODY.decode()}'\n")
    with running() as server:
        url = f"http://127.0.0.1:{server.http}{INFER}"
        done = subprocess.run(
            [tool("wrk"), "-t1", "-c16", f"-d{SECONDS}s", "--timeout=60s", "-s", script, url],
            capture_output=True,
            text=True,
            check=True,
        )
    assert "Socket errors" not in done.stdout, done.stdout
    assert "Non-2xx" not in done.stdout, done.stdout
    assert int(re.search(r"(\d+) requests in", done.stdout)[1]) > 0  # type: ignore[index]


def test_h2load_runs_without_an_error(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_bytes(b"\0\0\0\0\0")
    with running() as server:
        url = f"http://127.0.0.1:{server.grpc}/inference.GRPCInferenceService/ServerLive"
        fields = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        done = subprocess.run(
            [tool("h2load"), "-D", str(SECONDS), "-c8", "-m10", "-d", message, *fields, url],
            capture_output=True,
            text=True,
            check=True,
        )
    counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", done.stdout)
    assert counts, done.stdout
    assert int(counts[1]) > 0
    assert counts.groups()[1:] == ("0", "0", "0"), done.stdout


class KeepAliveClient(threading.Thread):
    """Asks on one connection after another until none is accepted any more, and counts what stays unanswered."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.answered = 0
        self.unanswered: list[str] = []
        self.request = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (
            INFER.encode(),
            len(BODY),
            BODY,
        )

    def run(self) -> None:
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", self._port), timeout=60)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                continue
            with sock, sock.makefile("rb") as reader:
                while self._ask(sock, reader):
                    pass

    def _ask(self, sock: socket.socket, reader) -> bool:  # type: ignore[no-untyped-def]
        try:
            sock.sendall(self.request)
            status = reader.readline()
            length, keep = 0, True
            while (line := reader.readline().lower().strip()) != b"":
                if line.startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
                keep = keep and line != b"connection: close"
            body = reader.read(length)
        except OSError as error:
            self.unanswered.append(repr(error))
            return False
        if not status.startswith(b"HTTP/1.1 200") or len(body) != length or not length:
            self.unanswered.append(repr((status, body)))
            return False
        self.answered += 1
        return keep


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_under_load_loses_no_request(tmp_path: Path, processes: int) -> None:
    with running("--processes", str(processes), "--grace-seconds", "60") as server:
        clients = [KeepAliveClient(server.http) for _ in range(16)]
        for client in clients:
            client.start()
        ends = time.monotonic() + 120
        while sum(client.answered for client in clients) <= 1000:
            assert time.monotonic() < ends, server.log
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(90)
            assert not client.is_alive()
        assert server.process.wait(90) == 0, server.log
    assert [text for client in clients for text in client.unanswered] == []


def test_wrk_gets_no_cut_response_at_sigterm(tmp_path: Path) -> None:
    script = tmp_path / "post.lua"
    script.write_text(f"wrk.method = 'POST'\nwrk.body = '{BODY.decode()}'\n")
    with running("--grace-seconds", "60") as server:
        url = f"http://127.0.0.1:{server.http}{INFER}"
        with subprocess.Popen(
            # Its own time-out of 2 s also counts connections of which the server has been gone for as long.
            [tool("wrk"), "-t1", "-c16", "-d4s", "--timeout=60s", "-s", script, url],
            stdout=subprocess.PIPE,
            text=True,
        ) as wrk:
            time.sleep(2)
            server.process.send_signal(signal.SIGTERM)
            output, _ = wrk.communicate(timeout=60)
        assert server.process.wait(60) == 0, server.log
    # Once the port is closed wrk cannot connect any more, and counts that as writing; reading must never fail.
    errors = re.search(r"Socket errors: connect \d+, read (\d+), write \d+, timeout (\d+)", output)
    assert errors is None or errors.groups() == ("0", "0"), output
    assert "Non-2xx" not in output


def test_sigterm_answers_what_100_open_grpc_streams_have_sent() -> None:
    """Each stream goes on asking until it is told that the server ends; every message before that has its answer."""
    from importlib.resources import files

    schema = Schema((files("headrace.net.grpc") / "_generated" / "grpc.binpb").read_bytes())
    request = schema.message("grpc.reflection.v1.ServerReflectionRequest")(list_services="").SerializeToString()

    rounds: list[int] = []

    async def chat(channel: grpc.aio.Channel, stop: asyncio.Event) -> tuple[int, int, grpc.StatusCode]:
        call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
        sent = answered = 0
        while not stop.is_set():
            await call.write(request)
            sent += 1
            assert await call.read() is not grpc.aio.EOF
            answered += 1
            rounds.append(answered)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        return sent, answered, await call.code()

    async def run(server: Server) -> list[tuple[int, int, grpc.StatusCode]]:
        stop = asyncio.Event()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            tasks = [asyncio.create_task(chat(channel, stop)) for _ in range(100)]
            async with asyncio.timeout(120):
                while rounds.count(2) < 100:
                    await asyncio.sleep(0.05)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(1.5)
            stop.set()
            return await asyncio.gather(*tasks)

    with running("--grace-seconds", "60") as server:
        results = asyncio.run(run(server))
        assert server.process.wait(60) == 0, server.log
    assert len(results) == 100
    assert all(sent == answered > 1 for sent, answered, _ in results)
    assert {code for _, _, code in results} == {grpc.StatusCode.OK}


def test_watchers_are_notified_and_do_not_delay_the_drain() -> None:
    async def run(server: Server) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            call = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            assert await call.read() == b"\x08\x01"
            server.process.send_signal(signal.SIGTERM)
            assert await call.read() == b"\x08\x02", "a watcher is told that the server no longer serves"
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            return failure.value.code()

    with running("--grace-seconds", "60") as server:
        assert asyncio.run(run(server)) == grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(90) == 0, server.log


def test_open_streams_are_notified_when_the_grace_is_over() -> None:
    async def run(server: Server) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
            await call.write(b"\x3a\x00")
            assert await call.read() is not grpc.aio.EOF
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            return failure.value.code()

    with running("--grace-seconds", "2") as server:
        assert asyncio.run(run(server)) == grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(90) == 1, "connections had to be cut, and the exit code says so"
