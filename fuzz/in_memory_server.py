# SPDX-License-Identifier: Apache-2.0
"""The inference server without a socket: takes bytes, returns bytes, and raises what went wrong inside.

Used by the targets that speak a protocol. The models behind it return their input; everything before them is the product.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np

from fuzz.target import Broken, require
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.predict.settings import PredictSettings
from headrace.backends.contract import Work
from headrace.core.dtypes import BYTES, FP32
from headrace.core.errors import InvalidArgument
from headrace.core.generation import GenerationRequest, PromptImage, PromptVideo
from headrace.core.tensors import Tensor
from headrace.models.config.types import InputSpec, OutputSpec
from headrace.net.negotiation import NegotiatingProtocol, feed
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.protocols import build_site
from headrace.programs.serve.settings import ServerSettings
from support.engines import config_of, plane_of

MOST_TURNS = 20_000
"""Turns of the event loop for one input. No input needs more than a few thousand."""
GOOD_FAILURES = (501, 503, 505)
"""Statuses of 500 and above that are not errors of the server."""
_READ_BYTES = 64 << 10


class Recorder(logging.Handler):
    """Records logged exceptions: each is an unexpected one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.errors.append(error or Broken(f"logged as an error: {record.getMessage()}"))


class MemoryTransport(asyncio.Transport):
    """Records written bytes. As strict as uvloop's transport: a write after `write_eof` is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.protocol: Any = None
        self.reading, self.ended, self.closed = True, False, False

    def write(self, data: Any) -> None:
        require(not self.ended, "written after the end of writing")
        if not self.closed:
            self.written += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self.write(data)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("192.0.2.1", 50000) if name == "peername" else default


class Server:
    """A site with every protocol, in its own event loop, which a target runs step by step."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self._record_error(context))
        self.recorder = Recorder()
        log = logging.getLogger("headrace")
        log.addHandler(self.recorder)
        log.propagate = False
        self.answered: list[tuple[bytes, int]] = []
        """Method and path, and status (HTTP's, or gRPC's), of every answer."""
        self.site = self.loop.run_until_complete(self._site())

    def connect(self) -> Connection:
        """Open a new connection."""
        self.answered.clear()
        self.recorder.errors.clear()
        return Connection(self)

    def turn(self) -> None:
        """Run one iteration of the event loop."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def check(self) -> None:
        """Raise the first unexpected exception, or for a response that reports an internal error."""
        if self.recorder.errors:
            raise Broken("an unexpected exception") from self.recorder.errors[0]
        for request, status in self.answered:
            # gRPC statuses are below 500. INTERNAL is also the status for a client that ends in the middle of a message.
            require(status < 500 or status in GOOD_FAILURES, f"{request!r} was answered {status!r}")

    def _record_error(self, context: dict[str, Any]) -> None:
        self.recorder.errors.append(context.get("exception") or Broken(str(context.get("message"))))

    async def _site(self) -> Site:
        texts = OutputSpec("text_output", BYTES, (-1,))
        inputs = (InputSpec("text_input", BYTES, (1,), optional=True),)
        typed = {"inputs": (InputSpec("INPUT0", FP32, (4,)),), "outputs": (OutputSpec("OUTPUT0", FP32, (4,)),)}
        generating = {"max_batch_size": 0, "inputs": inputs, "outputs": (texts,), "scheduling": None, "decoupled": True}
        plane = await plane_of(
            [
                (config_of("any", max_batch_size=0), _same),
                (config_of("four", **typed), _same),
                (replace(config_of("words", **generating), backend="llm"), EchoGenerator()),
            ]
        )
        loopback = Address("127.0.0.1", 0)
        settings = ServerSettings(loopback, loopback, predict=PredictSettings(model="four"), openai=OpenAiSettings())
        reader: Any = NoMedia()
        site = build_site(plane, settings, media=reader).site
        site.access_log = lambda _, head, status: self.answered.append((head.method + b" " + head.path, status))
        return site


class Connection:
    """One connection to a server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.transport = MemoryTransport()
        protocol = NegotiatingProtocol(server.site)
        self.transport.protocol = protocol
        self._in_loop(protocol.connection_made, self.transport)

    @property
    def written(self) -> bytes:
        """The bytes that the server has written."""
        return bytes(self.transport.written)

    def send(self, data: bytes, cuts: Sequence[int] = ()) -> None:
        """Send bytes to the server in pieces; like a socket, only while it reads, and none after it has closed."""
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            for start in range(begin, end, _READ_BYTES):
                self.until(lambda: self.transport.reading or self.over)
                if self.over:
                    return
                self._give(data[start : min(start + _READ_BYTES, end)])

    def _give(self, data: bytes) -> None:
        """Pass the bytes of one read. A protocol with its own buffer takes what fits; its next read takes the rest."""
        while data and not self.over:
            protocol, size = self.transport.protocol, len(data)
            if isinstance(protocol, asyncio.BufferedProtocol):
                size = min(size, len(protocol.get_buffer(size)))
            self._in_loop(feed, protocol, data[:size])
            data = data[size:]
            self.until(lambda: self.transport.reading or self.over)

    @property
    def over(self) -> bool:
        """Whether the server has closed the connection, or its side of it."""
        return self.transport.closed or self.transport.ended

    def until(self, holds: Callable[[], bool], turns: int = MOST_TURNS) -> None:
        """Run the event loop until a condition is true."""
        for turn in range(turns):
            if holds():
                return
            self._server.turn()
            if turn > 100:  # then it waits for a thread of its own
                self._server.loop.run_until_complete(asyncio.sleep(0.0005))
        require(False, f"the server has made no progress after {turns} turns")

    def hang_up(self) -> None:
        """Close the client's end: the connection must close, and its requests must be gone."""
        site, transport = self._server.site, self.transport
        for _ in range(5):
            self._server.turn()
        if not transport.closed and not self._in_loop(transport.protocol.eof_received):
            transport.close()
        for _ in range(8):
            if transport.closed:
                break
            site.tick(site.now + 1000.0)
            for connection in list(site.connections):
                self._in_loop(connection.sweep, site.now)
            for _ in range(5):
                self._server.turn()
        closed = transport.closed
        transport.closed = True
        self._in_loop(transport.protocol.connection_lost, None)
        for _ in range(3):
            self._server.turn()
        require(closed, "the server still waits for a client that has closed")
        require(not site.connections, "a closed connection is still registered")

    def _in_loop(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result: list[Any] = []

        def call() -> None:
            result.append(function(*arguments))

        self._server.loop.call_soon(call)
        self._server.turn()
        return result[0] if result else None


class EchoGenerator:
    """A generating model: returns the prompt, or the last message, once for each choice."""

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        for work in batch:
            asyncio.get_running_loop().call_soon(self._say, work)
        finished()

    def _say(self, work: Work) -> None:
        request = work.request
        if not isinstance(request, GenerationRequest):
            work.reply([_text("said")], final=True)
            return
        generation = request.generation
        text = str(generation.messages[-1].get("content") if generation.messages else generation.prompt)[:200]
        for index in range(generation.sampling.n):
            about = {
                "index": index,
                "finish_reason": "stop",
                "prompt_tokens": 1,
                "completion_tokens": 1,
                "cached_tokens": 0,
            }
            if generation.sampling.logprobs is not None:
                about["logprobs"] = "[]"
            work.reply([_text(text)], final=index == generation.sampling.n - 1, parameters=about)

    def close(self) -> None:
        pass


class NoMedia:
    """A reader of media that fetches nothing: fuzzing does not leave the machine."""

    async def picture(self, url: str) -> PromptImage:
        if url.startswith("data:"):
            return PromptImage(np.zeros((2, 2, 3), np.uint8))
        raise InvalidArgument("not here")

    async def clip(self, url: str, fps: float = 2.0, max_frames: int | None = None) -> PromptVideo:
        raise InvalidArgument("not here")


def _text(text: str) -> Tensor:
    array = np.empty(1, dtype=object)
    array[0] = text.encode(errors="replace")
    return Tensor("text_output", BYTES, array)


def _same(inputs: Any) -> Any:
    return {"OUTPUT0": inputs["INPUT0"]}
