# SPDX-License-Identifier: Apache-2.0
"""Clients that hang up in the middle of their streams leave nothing behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from language_model_server import Server
from openai import OpenAI

from support.waiting import eventually, eventually_async

pytestmark = pytest.mark.worker("language models")

CLIENTS = 200
GENERATED = "headrace_llm_generated_tokens_total"
LONG: dict[str, Any] = {"model": "llama", "max_tokens": 400, "ignore_eos": True, "stream": True}


def chat_request(number: int, path: str = "/v1/completions") -> bytes:
    body = json.dumps({**LONG, "prompt": f"{number} the river runs to the sea"}).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


async def leave(port: int, number: int) -> bytes:
    """Ask, wait for the beginning where one comes, and hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chat_request(number))
    await writer.drain()
    # Those who came first are generated for; of the others, who wait, every second leaves before anything has come.
    seen = await reader.readuntil(b"data: ") if number < 32 or number % 2 else b""
    if number % 3:
        writer.close()
    else:
        writer.transport.abort()  # type: ignore[attr-defined]
    return seen


def test_200_clients_who_hang_up_leave_no_page_in_use(served: Server, client: OpenAI) -> None:
    eventually(lambda: served.load_of("llama") == (0, 0, 0))  # of those before, the pages go last
    before = served.metrics("llama")[GENERATED]

    async def crowd() -> list[bytes]:
        return await asyncio.gather(*(leave(served.ports[0], number) for number in range(CLIENTS)))

    seen = asyncio.run(crowd())
    assert sum(item.startswith(b"HTTP/1.1 200") for item in seen) >= 100
    answer = client.completions.create(model="llama", prompt="the river", max_tokens=8, temperature=0)
    assert answer.choices[0].text
    eventually(lambda: served.load_of("llama") == (0, 0, 0))
    # Had they been computed to their ends, it would be 80,000.
    assert served.metrics("llama")[GENERATED] - before < CLIENTS * LONG["max_tokens"] / 4


@pytest.mark.parametrize("with_schema", [False, True])
def test_a_client_who_leaves_before_its_whole_answer(served: Server, with_schema: bool) -> None:
    body: dict[str, Any] = {**LONG, "prompt": "the river", "stream": False, "n": 8}
    if with_schema:
        body["guided_regex"] = "[a-z ]{300,400}"
    before = served.metrics("llama")[GENERATED]

    def computes() -> bool:
        """Or has computed: who stands still for long may not see the rest."""
        return served.load_of("llama")[1] > 0 or served.metrics("llama")[GENERATED] > before

    async def impatient() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.ports[0])
        text = json.dumps(body).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
        await writer.drain()
        await eventually_async(computes)
        writer.close()

    asyncio.run(impatient())
    eventually(lambda: served.load_of("llama") == (0, 0, 0))
