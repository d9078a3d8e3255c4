# SPDX-License-Identifier: Apache-2.0
"""A server with `/v1/files` and `/v1/batches` over the models of `openai_server`, whose clock a test moves.

with batches_served(tmp_path) as served:
    served.client().files.create(...)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types import Batch
from openai_server import OpenAiServer, openai_server_with_models

from headrace.api.openai.settings import OpenAiSettings
from headrace.core.clock import ManualClock
from headrace.core.limits import BatchLimits
from headrace.engine.dataplane import DataPlane
from headrace.net.http.routes import Routes
from headrace.programs.serve.openai_batches import OpenAiBatches
from support.waiting import eventually

CHAT = "/v1/chat/completions"
POLL_SECONDS = 0.02


class Served:
    """The server, its clock and its folder."""

    def __init__(self, openai_server: OpenAiServer, batches: OpenAiBatches, clock: ManualClock, folder: Path) -> None:
        self.openai_server = openai_server
        self.batches = batches
        self.clock = clock
        self.folder = folder
        self.ask = openai_server.ask
        self._clients: dict[str, OpenAI] = {}

    def client(self, key: str = "none") -> OpenAI:
        """The client of a key, which is closed with the server."""
        if key not in self._clients:
            url = f"http://127.0.0.1:{self.openai_server.port}/v1"
            self._clients[key] = OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)
        return self._clients[key]

    def upload(self, lines: Sequence[Any], key: str = "none") -> str:
        return self.client(key).files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch").id

    def begin(self, lines: Sequence[Any], endpoint: Any = CHAT, key: str = "none", **more: Any) -> Batch:
        file_id = self.upload(lines, key)
        create = self.client(key).batches.create
        return create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **more)

    def batch(self, id: str, key: str = "none") -> Batch:
        return self.client(key).batches.retrieve(id)

    def ended(self, id: str, key: str = "none") -> Batch:
        """The batch, when it is finished."""
        eventually(lambda: self.batch(id, key).status in ("completed", "failed", "expired", "cancelled"))
        return self.batch(id, key)

    def lines_of(self, file_id: str | None, key: str = "none") -> list[Any]:
        if file_id is None:
            return []
        return [json.loads(line) for line in self.client(key).files.content(file_id).text.splitlines()]

    def close(self) -> None:
        self.stop()
        for client in self._clients.values():
            client.close()

    def stop(self) -> None:
        """As a server that drains."""
        self.openai_server.server.call(self.batches.close)


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def line(number: int, text: str = "", url: str = CHAT, **more: Any) -> dict[str, Any]:
    """A line that the repeater answers by its own words."""
    text = text or f"words {number}"
    own: dict[str, Any] = {
        "/v1/completions": {"prompt": text},
        "/v1/embeddings": {"input": text},
        "/v1/responses": {"input": text},
    }.get(url, {"messages": [{"role": "user", "content": text}]})
    model = "letters" if url == "/v1/embeddings" else "repeater"
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": {"model": model, **own, **more}}


@contextmanager
def batches_served(
    folder: Path,
    *,
    limits: BatchLimits | None = None,
    batch_lines: int = 4,
    clock: ManualClock | None = None,
    make_routes: Callable[[], Routes] = Routes,
    wrap: Callable[[DataPlane], DataPlane] = lambda plane: plane,
) -> Iterator[Served]:
    clock = clock or ManualClock()
    settings = OpenAiSettings(batch_folder=folder, batch_lines=batch_lines, batch_limits=limits or BatchLimits())
    made: list[OpenAiBatches] = []

    def more(plane: DataPlane, routes: Routes) -> None:
        made.append(OpenAiBatches(wrap(plane), settings, clock=clock, poll_seconds=POLL_SECONDS))
        made[0].add_to(routes)
        made[0].start()

    with openai_server_with_models(settings, make_routes, more=more) as openai_server:
        served = Served(openai_server, made[0], clock, folder)
        try:
            yield served
        finally:
            served.close()
