# SPDX-License-Identifier: Apache-2.0
"""The mixed traffic of a soak run: clients of every protocol that check their responses, loads and unloads, lost clients.

Each client is a coroutine that repeats one action; failures are counted by their message.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
import websockets

from headrace.api.v2.grpc_messages import inference_schema
from soak.server import Running

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_BETWEEN_SECONDS = 0.02
"""Pause of a client between two actions: the load is steady, not heavy."""
_ACTION_SECONDS = 120.0


class Wrong(Exception):
    """A wrong response."""


class Connection:
    """An HTTP/1.1 connection to a server on this machine: one request after the other."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    async def ask(self, path: str, body: bytes, *fields: str, method: str = "POST") -> tuple[int, bytes]:
        """Send a request; return the status and the body of a response with a length."""
        status, length = await self.begin(path, body, *fields, method=method)
        return status, await self.reader.readexactly(length or 0)

    async def begin(self, path: str, body: bytes, *fields: str, method: str = "POST") -> tuple[int, int | None]:
        """Send a request and read the response's head; return its status, and its length unless it is chunked."""
        lines = (f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *fields)
        self.writer.write("\r\n".join((*lines, "", "")).encode() + body)
        await self.writer.drain()
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        _, found, rest = head.partition(b"\r\ncontent-length:")
        return int(head.split(b" ", 2)[1]), int(rest.split(b"\r\n", 1)[0]) if found else None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the chunks of a chunked response."""
        while size := int((await self.reader.readline()).strip(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    def abort(self) -> None:
        """Close the connection as a killed process does, without an end."""
        self.writer.transport.abort()


@dataclass(slots=True)
class Traffic:
    """The clients of a run: their requests and their failures, counted by kind."""

    server: Running
    seed: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    took_seconds: list[float] = field(default_factory=list)
    """Of the requests of v2 over HTTP since `sampling` last took them."""

    async def run(self, seconds: float) -> None:
        """Run all clients until the time is over."""
        rng = random.Random(self.seed)
        actions: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "v2 http": self._v2_http,
            "v2 binary": self._v2_binary,
            "v2 grpc": self._v2_grpc,
            "predict": self._predict,
            "websocket": self._websocket,
            "load and unload": self._churn,
            "vanishing": self._vanish,
            "metrics": self._metrics,
        }
        if self.server.generates:
            actions["chat stream"] = self._chat
        ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for name, action in actions.items():
                tasks.create_task(self._repeat(name, action, random.Random(rng.random()), ends))

    async def _repeat(
        self, name: str, action: Callable[[random.Random], Awaitable[None]], rng: random.Random, ends: float
    ) -> None:
        while time.monotonic() < ends:
            self.asked[name] += 1
            try:
                async with asyncio.timeout(_ACTION_SECONDS):
                    await action(rng)
            except Exception as error:
                self.wrong[f"{name}: {type(error).__name__}: {str(error)[:200]}"] += 1
            await asyncio.sleep(_BETWEEN_SECONDS)

    async def _v2_http(self, rng: random.Random) -> None:
        async with Connection(self.server.http_port) as connection:
            for _ in range(20):
                numbers = [float(rng.randrange(1 << 20)) for _ in range(4)]
                body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": numbers}]}
                start = time.perf_counter()
                status, answer = await connection.ask("/v2/models/echo/infer", json.dumps(body).encode())
                self.took_seconds.append(time.perf_counter() - start)
                _check(status == 200 and json.loads(answer)["outputs"][0]["data"] == numbers, status, answer)

    async def _v2_binary(self, rng: random.Random) -> None:
        rows = rng.randint(1, 16)
        size = rows * 32
        tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 8], "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        numbers = struct.pack(f"<{rows * 8}f", *(float(rng.randrange(1 << 20)) for _ in range(rows * 8)))
        async with Connection(self.server.http_port) as connection:
            field = f"inference-header-content-length: {len(head)}"
            status, answer = await connection.ask("/v2/models/net/infer", head + numbers, field)
            _check(status == 200 and answer.endswith(numbers), status, answer)

    async def _v2_grpc(self, rng: random.Random) -> None:
        message = inference_schema().message("inference.ModelInferRequest")(model_name="echo")
        message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
        numbers = struct.pack("<4f", *(float(rng.randrange(1 << 20)) for _ in range(4)))
        message.raw_input_contents.append(numbers)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.server.grpc_port}") as channel:
            call = channel.unary_unary(_INFER)
            for _ in range(10):
                answer = await call(message.SerializeToString(), timeout=_ACTION_SECONDS)
                _check(numbers in answer, 0, answer)

    async def _predict(self, rng: random.Random) -> None:
        numbers = [float(rng.randrange(1 << 20)) for _ in range(4)]
        async with Connection(self.server.http_port) as connection:
            field = "content-type: application/json"
            status, answer = await connection.ask("/predict/echo", json.dumps({"inputs": numbers}).encode(), field)
            _check(status == 200 and str(numbers[0]) in answer.decode(), status, answer)

    async def _websocket(self, rng: random.Random) -> None:
        async with websockets.connect(f"ws://127.0.0.1:{self.server.http_port}/predict/echo/stream") as stream:
            for _ in range(rng.randint(1, 10)):
                numbers = struct.pack("<4f", *(float(rng.randrange(1 << 20)) for _ in range(4)))
                await stream.send(numbers)
                _check(await stream.recv() == numbers, 0, b"another answer")

    async def _chat(self, rng: random.Random) -> None:
        prompt = " ".join(rng.choice(("water", "mill", "river", "stone")) for _ in range(rng.randint(1, 30)))
        body = {"model": "writer", "messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "stream": True}
        async with Connection(self.server.http_port) as connection:
            status, length = await connection.begin("/v1/chat/completions", json.dumps(body).encode())
            _check(status == 200 and length is None, status, b"")
            if rng.random() < 0.3:
                await anext(connection.chunks())
                connection.abort()
                return
            whole = b"".join([piece async for piece in connection.chunks()])
            _check(whole.endswith(b"data: [DONE]\n\n"), status, whole[-200:])

    async def _churn(self, rng: random.Random) -> None:
        async with Connection(self.server.http_port) as connection:
            for action in ("unload", "load", "load"):
                status, answer = await connection.ask(f"/v2/repository/models/churned/{action}", b"{}")
                _check(status == 200, status, answer)
        await asyncio.sleep(rng.random())

    async def _vanish(self, rng: random.Random) -> None:
        """Send some of a request, or all of it, and go."""
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8}]}).encode()
        head = f"POST /v2/models/churned/infer HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        whole = head + body
        async with Connection(self.server.http_port) as connection:
            connection.writer.write(whole[: rng.choice((1, len(head) - 3, len(head) + 5, len(whole)))])
            await connection.writer.drain()
            connection.abort()

    async def _metrics(self, rng: random.Random) -> None:
        async with Connection(self.server.http_port) as connection:
            for path in ("/metrics", "/v2/models/stats", "/v1/models"):
                status, length = await connection.begin(path, b"", method="GET")
                _check(status == 200, status, b"")
                if length is None:
                    _ = [piece async for piece in connection.chunks()]
                else:
                    await connection.reader.readexactly(length)
        await asyncio.sleep(1.0)


def _check(holds: bool, status: int, answer: bytes) -> None:
    if not holds:
        raise Wrong(f"{status} {answer[:120]!r}")
