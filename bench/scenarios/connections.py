# SPDX-License-Identifier: Apache-2.0
"""Hold thousands of connections with few requests each: count the answered ones, and measure memory.

    .venv/bin/python bench/scenarios/connections.py                      # 5,000 of them for a minute
    .venv/bin/python bench/scenarios/connections.py --connections 500 --seconds 10

A quarter each of: HTTP/1.1 that is kept alive, streams of events (a Python model that answers every five seconds for as long
as somebody listens), WebSockets, and gRPC streams, one connection each. Every request has a number of its own, which
must come back. The server is one `headrace serve`, the client is this process; both share the machine. Prints one line of
JSON; ends with 1 if a connection was lost, an answer wrong or missing, or the memory of all processes of the server over a
gigabyte. Overload is another matter: `python -m bench --workload overload`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import uvloop
from malformed_requests import PREFACE, frame
from tritonclient.grpc import service_pb2
from websockets.asyncio.client import connect

MOST_BYTES = 1 << 30
PAUSE_SECONDS = (3.0, 12.0)
PATIENCE_SECONDS = 90.0
TENSORS = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""
ECHO = f'backend: "identity"\nmax_batch_size: 64\n{TENSORS}dynamic_batching {{ }}\n'
TICKER = f'backend: "python"\n{TENSORS}model_transaction_policy {{ decoupled: true }}\n'
TICKER_CODE = """
import threading, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.open = []
        threading.Thread(target=self.tick, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            self.open.append((request.get_response_sender(), array))

    def tick(self):
        while True:
            for each in list(self.open):
                if each[0].is_cancelled():
                    self.open.remove(each)
                else:
                    each[0].send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each[1])]))
            time.sleep(5)
"""

Client = Callable[["Crowd", int], Coroutine[Any, Any, None]]


class Crowd:
    """What all clients share."""

    def __init__(self, port: int, connections: int) -> None:
        self.port = port
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.missing = connections
        self.complete = asyncio.Event()
        """All are connected, or one has failed."""
        self.stop = asyncio.Event()
        self._numbers = iter(range(1, 1 << 24))

    def number(self) -> int:
        """One that nobody else has; below 2**24, since FP32 tells those apart."""
        return next(self._numbers)

    def got(self, kind: str, wanted: int, value: float) -> None:
        """An answer."""
        if value == wanted:
            self.answers[kind] += 1
        else:
            self.wrong.append(f"{kind}: {wanted} {value}")

    def connected(self) -> None:
        """One more is."""
        self.missing -= 1
        if not self.missing:
            self.complete.set()

    async def pause(self) -> None:
        """Until it is time for the next request, or for the end."""
        try:
            await asyncio.wait_for(self.stop.wait(), random.uniform(*PAUSE_SECONDS))
        except TimeoutError:
            pass

    async def run(self, client: Client, place: int) -> None:
        """One client, from its connection to the end."""
        try:
            await client(self, place)
        except Exception as error:
            self.wrong.append(f"{client.__name__}: {error!r}")
            self.complete.set()


async def keep_alive(crowd: Crowd, _: int) -> None:
    """HTTP/1.1: one request after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", crowd.port)
    crowd.connected()
    while not crowd.stop.is_set():
        value = crowd.number()
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        body = json.dumps({"inputs": [tensor]}).encode()
        writer.write(b"POST /v2/models/echo/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            answer = json.loads(await reader.readexactly(int(length.split(b":")[1])))
        crowd.got("http", value, answer["outputs"][0]["data"][0])
        await crowd.pause()
    writer.close()


async def events(crowd: Crowd, _: int) -> None:
    """A stream of events that does not end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", crowd.port)
    crowd.connected()
    value = crowd.number()
    body = json.dumps({"INPUT0": value}).encode()
    head = b"POST /v2/models/ticker/generate_stream HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    while not crowd.stop.is_set():
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = await reader.readline()
        if not line:
            raise ConnectionError("the stream ended")
        if line.startswith(b"data: "):
            crowd.got("events", value, json.loads(line[6:])["OUTPUT0"])
    writer.close()


async def websocket(crowd: Crowd, _: int) -> None:
    """Messages on a WebSocket."""
    async with connect(f"ws://127.0.0.1:{crowd.port}/predict/echo/stream", compression=None, open_timeout=90) as stream:
        crowd.connected()
        while not crowd.stop.is_set():
            value = crowd.number()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await stream.send(json.dumps({"inputs": [value]}))
                answer = json.loads(await stream.recv())
            crowd.got("websocket", value, answer["predictions"][0])
            await crowd.pause()


async def grpc_stream(crowd: Crowd, _: int) -> None:
    """Messages on a ModelStreamInfer, by hand: a channel of grpcio for each would cost this process its memory."""
    reader, writer = await asyncio.open_connection("127.0.0.1", crowd.port)
    crowd.connected()
    path = b"/inference.GRPCInferenceService/ModelStreamInfer"
    fields = b"\x83\x86" + b"".join(
        b"\x00" + bytes((len(name),)) + name + bytes((len(text),)) + text
        for name, text in (
            (b":path", path),
            (b":authority", b"a"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )
    writer.write(PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, fields))
    while not crowd.stop.is_set():
        value = crowd.number()
        request = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[struct.pack("<f", value)])
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
        message = request.SerializeToString()
        writer.write(frame(0, 0, 1, struct.pack("!BI", 0, len(message)) + message))
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = service_pb2.ModelStreamInferResponse.FromString(await _message(reader, writer))
        if answer.error_message:
            raise ValueError(answer.error_message)
        crowd.got("grpc", value, struct.unpack("<f", answer.infer_response.raw_output_contents[0])[0])
        await crowd.pause()
    writer.close()


async def _message(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The next message of the stream; what else the server says is answered or passed over."""
    content = b""
    while len(content) < 5 or len(content) < 5 + int.from_bytes(content[1:5]):
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        kind, flags = head[3], head[4]
        if kind == 0:
            content += payload
        elif kind in {4, 6} and not flags & 1:
            writer.write(frame(kind, 1, 0, payload if kind == 6 else b""))
        elif kind in {3, 7} or (flags & 1 and kind == 1):
            raise ConnectionError(f"the stream was ended by a frame of kind {kind}")
    return content[5:]


KINDS: tuple[Client, ...] = (keep_alive, events, websocket, grpc_stream)


async def hold(port: int, server: psutil.Process, connections: int, seconds: float) -> dict[str, Any]:
    """Connect, hold, ask, count."""
    crowd = Crowd(port, connections)
    began = time.monotonic()
    tasks = []
    for number in range(connections):
        tasks.append(asyncio.create_task(crowd.run(KINDS[number % len(KINDS)], number)))
        if number % 50 == 49:
            await asyncio.sleep(0.02)
    await asyncio.wait_for(crowd.complete.wait(), PATIENCE_SECONDS)
    opened = time.monotonic() - began
    await asyncio.sleep(seconds)
    processes = [server, *server.children(recursive=True)]
    memory = sum(process.memory_info().rss for process in processes)
    held = len([connection for connection in server.net_connections("tcp") if connection.status == "ESTABLISHED"])
    cpu = sum(sum(process.cpu_times()[:2]) for process in processes)
    crowd.stop.set()
    await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)
    return {
        "connections": connections,
        "held": held,
        "seconds": round(seconds + opened),
        "answers": dict(crowd.answers),
        "wrong_or_lost": len(crowd.wrong),
        "first_wrong": crowd.wrong[:3],
        "server_rss_mb": round(memory / 1e6),
        "server_cpu_seconds": round(cpu, 1),
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=5_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < options.connections + 100:
        sys.exit(f"this shell allows {most} open files: `ulimit -n` has to allow {options.connections + 100}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="headrace-connections-") as folder:
        for name, config, code in (("echo", ECHO, ""), ("ticker", TICKER, TICKER_CODE)):
            version = Path(folder, name, "1")
            version.mkdir(parents=True)
            version.with_name("config.pbtxt").write_text(config)
            if code:
                (version / "model.py").write_text(code)
        with socket.socket() as http_socket, socket.socket() as grpc_socket:
            http_socket.bind(("127.0.0.1", 0))
            grpc_socket.bind(("127.0.0.1", 0))
            port, grpc_port = http_socket.getsockname()[1], grpc_socket.getsockname()[1]
        # Every port speaks every protocol: one has all of them.
        arguments = [
            "serve",
            folder,
            "--http-port",
            str(port),
            "--grpc-port",
            str(grpc_port),
            "--allow-metrics",
            "false",
        ]
        server = subprocess.Popen([Path(sys.executable).with_name("headrace"), *arguments])
        try:
            while not _ready(port):
                time.sleep(0.1)
            result = uvloop.run(hold(port, psutil.Process(server.pid), options.connections, options.seconds))
        finally:
            server.send_signal(signal.SIGTERM)
            seen_code = server.wait(90)
    print(json.dumps(result | {"server_exit_status": seen_code}))
    whole = result["held"] >= options.connections and not result["wrong_or_lost"]
    return 0 if whole and result["server_rss_mb"] * 1e6 <= MOST_BYTES else 1


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
