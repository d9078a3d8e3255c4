# SPDX-License-Identifier: Apache-2.0
"""Measure the server's CPU per streamed token: parsing reasoning and tool calls, and the streams of the three APIs.

    .venv/bin/python bench/scenarios/text_streams.py
    .venv/bin/python bench/scenarios/text_streams.py --formats hermes qwen3_coder

A model plays an output of 400 tokens of four characters, one reply per token, for 16 streams at a time. "plain" is a chat
completion stream of text without a parser. For each tool format a model writes reasoning and two calls with long arguments.
CPU time is that of the server's process. The kinds take turns, and the least of the rounds counts, since other programs
only add to it.

Ends with 1 if parsing takes more than 10 us for a token above "plain", or a stream of /v1/responses or /v1/messages takes
more than 1.3 times a chat completion stream of the same output.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import uvloop
from router_cache import Client, cpu_seconds, free_port, process, wait_for

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "api" / "openai")]

from openai_server import generating, text_tensor  # noqa: E402
from test_output_formats import FUNCTIONS, PAIRS, Transcript, written  # noqa: E402

from headrace.api.openai.http import OpenAiHttp  # noqa: E402
from headrace.backends.contract import Work  # noqa: E402
from headrace.core.requests import NO_PARAMETERS  # noqa: E402
from headrace.net.http.routes import Routes  # noqa: E402
from headrace.net.negotiation import NegotiatingProtocol  # noqa: E402
from headrace.net.server import HttpServer  # noqa: E402
from headrace.net.site import Site  # noqa: E402
from headrace.net.sockets import Address  # noqa: E402
from support.engines import plane_of  # noqa: E402

STREAMS, TOKENS, TOKEN_CHARACTERS = 16, 400, 4
MOST_PARSING_US, MOST_RATIO = 10.0, 1.3
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PLAIN = "plain"


class Player:
    """A model that plays one output, token by token, to every request."""

    def __init__(self, output: str) -> None:
        tokens = [output[at : at + TOKEN_CHARACTERS] for at in range(0, len(output), TOKEN_CHARACTERS)]
        self._tensors = [[text_tensor(token)] for token in tokens]
        self.tokens = len(tokens)
        self._running: list[tuple[Work, int]] = []

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        """Take requests."""
        if not self._running:
            asyncio.get_running_loop().call_soon(self._step)
        self._running += [(work, 0) for work in batch]
        finished()

    def close(self) -> None:
        """Do nothing."""

    def _step(self) -> None:
        """Reply a token to every request, as an engine does after a step."""
        running, self._running = self._running, []
        last = self.tokens - 1
        end = {"finish_reason": "stop", "prompt_tokens": 9, "completion_tokens": self.tokens}
        for work, number in running:
            final = number == last
            work.reply(self._tensors[number], final=final, parameters=end if final else NO_PARAMETERS)
            if not final:
                self._running.append((work, number + 1))
        if self._running:
            asyncio.get_running_loop().call_soon(self._step)


def output_of(kind: str, reasoning: str) -> str:
    """Return what the model of these formats writes; the plain one, text."""
    chance = random.Random(7)
    words = " ".join(chance.choice(["water", "wheel", "mill", "the", "turns", "down"]) for _ in range(2000))
    if kind == PLAIN:
        return words[: TOKENS * TOKEN_CHARACTERS]
    share = TOKENS * TOKEN_CHARACTERS // 3
    calls: Any = [("search", {"words": words[:share]}), ("search", {"words": words[: share // 2]})]
    transcript = Transcript(reasoning=words[:share].strip(), calls=calls)
    while True:  # until the output itself opens the reasoning
        prompt_end, output = written(chance, transcript, kind, reasoning)
        if prompt_end in ("", "<|im_start|>assistant\n", "<|start|>assistant"):
            return output


def players(formats: Sequence[str]) -> dict[str, tuple[str, Player]]:
    """Return the reasoning format and the player of each model."""
    made = {kind: (reasoning, Player(output_of(kind, reasoning))) for kind, reasoning in PAIRS if kind in formats}
    return {PLAIN: ("", Player(output_of(PLAIN, ""))), **made}


async def serve(port: int, formats: Sequence[str]) -> None:
    """Answer until killed."""
    models: list[Any] = []
    for name, (reasoning, player) in players(formats).items():
        parameters = {} if name == PLAIN else {"tool_format": name, "reasoning_format": reasoning}
        models.append((generating(name, parameters=parameters), player))
    routes = Routes()
    OpenAiHttp(await plane_of(models)).add_to(routes)
    site = Site(routes)
    server = HttpServer(site, Address("127.0.0.1", port), lambda: NegotiatingProtocol(site))
    await server.start()
    await asyncio.Event().wait()


def request(port: int, path: str, model: str) -> bytes:
    """Return a request for a stream."""
    messages = [{"role": "user", "content": "begin"}]
    schemas: dict[str, Any] = {} if model == PLAIN else {"search": FUNCTIONS["search"]}
    if path == CHAT:
        tools: list[Any] = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()]
        body: dict[str, Any] = {"messages": messages}
    elif path == RESPONSES:
        tools = [{"type": "function", "name": n, "parameters": s} for n, s in schemas.items()]
        body = {"input": messages}
    else:
        tools = [{"name": n, "input_schema": s} for n, s in schemas.items()]
        body = {"messages": messages, "max_tokens": 4096}
    content = orjson.dumps({"model": model, "stream": True, **body, **({"tools": tools} if tools else {})})
    return (
        b"POST %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), port, len(content), content)
    )


async def load(port: int, path: str, model: str, count: int) -> int:
    """Read as many streams; return how many failed."""
    requests: Iterator[bytes] = iter(repeat(request(port, path, model), count))
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(STREAMS):
        done: asyncio.Future[None] = loop.create_future()
        _, client = await loop.create_connection(lambda done=done: Reader(requests, done), "127.0.0.1", port)  # type: ignore[misc]
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return sum(client.bad for client in clients)


class Reader(Client):
    """One connection of the load, which keeps the end of a stream only."""

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if not self.data:
            self.bad += not data.startswith(b"HTTP/1.1 200")
        self.data = (self.data + data)[-5:]
        if self.data == b"0\r\n\r\n":
            self.data = b""
            self._next()


class Kind(NamedTuple):
    """What is measured."""

    model: str
    path: str


def main() -> int:
    """Measure, print a table and return whether the targets were missed."""
    names = [kind for kind, _ in PAIRS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=list(dict.fromkeys(names)))
    parser.add_argument("--streams", type=int, default=160, help="of each round and kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.formats))
        return 0
    sizes = {name: player.tokens for name, (_, player) in players(options.formats).items()}
    kinds = [Kind(model, path) for model in sizes for path in (CHAT, RESPONSES, MESSAGES)]
    found: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    port = free_port()
    command = (sys.executable, __file__, "--serve", str(port), "--formats", *options.formats)
    with process(*command) as server:
        wait_for(port, "/v1/models")
        for number in range(options.rounds + 1):
            for kind in kinds:
                before = cpu_seconds(server.pid)
                if bad := uvloop.run(load(port, kind.path, kind.model, options.streams)):
                    raise SystemExit(f"{bad} of {options.streams} streams of {kind.path} failed")
                if number:  # the first round warms up
                    spent = cpu_seconds(server.pid) - before
                    found[kind].append(spent / options.streams / sizes[kind.model] * 1e6)
    return report({kind: min(values) for kind, values in found.items()}, list(sizes))


def report(costs: dict[Kind, float], models: Sequence[str]) -> int:
    """Print the costs; return 1 if one is over its target."""
    plain, missed = costs[Kind(PLAIN, CHAT)], False
    print("| output | chat, us per token | above plain | /v1/responses | /v1/messages |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for model in models:
        chat = costs[Kind(model, CHAT)]
        ratios = [costs[Kind(model, path)] / chat for path in (RESPONSES, MESSAGES)]
        missed = missed or chat - plain > MOST_PARSING_US or max(ratios) > MOST_RATIO
        print(f"| {model} | {chat:.1f} | {chat - plain:+.1f} | {ratios[0]:.2f} x | {ratios[1]:.2f} x |")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
