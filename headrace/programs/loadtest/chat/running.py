# SPDX-License-Identifier: Apache-2.0
"""A model behind OpenAI's API under load. The one door to this room for programs.

test = ChatTest(url, model, task="text-to-text")
await test.prepare()
run = await test.run(parse_scenario("D(100,100)", test.task), concurrency=4, limits=Limits(60, 100))
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.client import NO_RETRY
from headrace.client.addresses import Address
from headrace.client.http_connections import tls_context
from headrace.client.transport import options_of
from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.core.telemetry.progress import Progress, Reporter, silent
from headrace.fleet.benchmarks.scenarios import Scenario, Sizes
from headrace.programs.loadtest.chat.bodies import CHAT, Bodies
from headrace.programs.loadtest.chat.measured import ChatRun, chat_run
from headrace.programs.loadtest.chat.prompts import Prompts
from headrace.programs.loadtest.chat.streams import Answer, Stream
from headrace.programs.loadtest.running import Access

_ANSWERING = 8
_SAMPLES = (1, 52)
"""Words of the two prompts that tell how a server counts: next to none, and all that there are."""
_REFUSED = ("HTTP 400", "HTTP 422")


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends: whichever comes first."""

    seconds: float
    requests: int
    timeout_seconds: float = 600.0
    """A request that takes longer has failed."""


class ChatTest:
    """A model to ask. Belongs to the loop that it is used in."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        task: str = "text-to-text",
        parameters: Mapping[str, Any] | None = None,
        texts: Sequence[str] = (),
        access: Access | None = None,
        seed: int | None = None,
        progress: Progress = silent,
    ) -> None:
        """Connect to nothing yet. `texts` are prompts of a data set; without `seed` each test asks other things."""
        self._address = Address.parse(url)
        if self._address.is_grpc:
            raise InvalidArgument(f"{url} is an address for gRPC: OpenAI's API is at http:// or https://")
        reach = access or Access({})
        options = options_of(
            timeout=60.0, retry=NO_RETRY, verify=reach.verify, cert=reach.cert, token="", headers=reach.headers,
            compression=None,
        )  # fmt: skip
        self._fields = list(options.fields)
        self._tls = tls_context(options) if self._address.secure else None
        self._chance = random.Random(seed)  # noqa: S311 - of sizes and words
        self.bodies = Bodies(model, task, Prompts(self._chance, texts), dict(parameters or {}))
        self.task = task
        self._progress = progress

    def _stream(self) -> Stream:
        return Stream(self._address, self._fields, self._tls)

    async def prepare(self, timeout_seconds: float = 600.0) -> None:
        """Find the model, ask it once or twice, and learn how it counts tokens. Raises what tells what is wrong."""
        stream = self._stream()
        try:
            if not self.bodies.model:
                self.bodies.model = _only_model(await stream.fetch("/v1/models", 30), str(self._address))
            first = await self._first(stream, timeout_seconds)
            if self.bodies.path == CHAT and not self.task.startswith("image"):
                await self._learn(stream, first, timeout_seconds)
        finally:
            stream.close()

    async def _first(self, stream: Stream, timeout_seconds: float) -> Answer:
        sizes = Sizes(16, _ANSWERING, 64, 64, 1) if self.task.startswith("image") else Sizes(16, _ANSWERING)
        answer = await stream.ask(self.bodies.path, self.bodies.make(sizes), timeout_seconds)
        for what in ("ignore_eos", "usage"):
            # Neither is everybody's. A server that refuses for another reason refuses again, and is believed then.
            if answer.error in _REFUSED:
                setattr(self.bodies, what, False)
                answer = await stream.ask(self.bodies.path, self.bodies.make(sizes), timeout_seconds)
        if answer.error:
            raise _failure(self._address, self.bodies.model, answer)
        return answer

    async def _learn(self, stream: Stream, first: Answer, timeout_seconds: float) -> None:
        if not first.prompt_tokens:
            return
        samples = []
        prompts = self.bodies.prompts
        for words in _SAMPLES:
            asked = prompts.overhead + words * prompts.tokens_per_word
            body = self.bodies.make(Sizes(round(asked), 1))
            answer = await stream.ask(self.bodies.path, body, timeout_seconds)
            if answer.error or not answer.prompt_tokens:
                return
            samples.append((words, answer.prompt_tokens))
        prompts.learn(samples)

    async def run(self, scenario: Scenario, concurrency: int, limits: Limits) -> ChatRun:
        """Ask in so many conversations at a time until a limit is reached, and wait for the last answers."""
        began = time.perf_counter()
        left = iter(range(limits.requests))
        answers: list[Answer] = []
        name = f"{scenario.said}, {concurrency} at a time"
        with Reporter(self._progress, SystemClock(), name, total=limits.requests) as reporter:

            async def worker() -> None:
                stream = self._stream()
                try:
                    while time.perf_counter() - began < limits.seconds and next(left, None) is not None:
                        body = self.bodies.make(scenario.draw(self._chance))
                        answer = await stream.ask(self.bodies.path, body, limits.timeout_seconds)
                        answers.append(answer)
                        reporter.update(done=len(answers), message="asking")
                        if answer.error:
                            await asyncio.sleep(0.05)  # what is gone need not be asked in a hurry
                finally:
                    stream.close()

            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, limits.requests)):
                    group.create_task(worker())
        seconds = max((each.ended for each in answers), default=began) - began
        return chat_run(scenario.said, concurrency, seconds, answers)


def _only_model(listed: Any, where: str) -> str:
    names = [str(each.get("id")) for each in (listed or {}).get("data") or () if isinstance(each, dict)]
    if len(names) == 1:
        return names[0]
    if not names:
        raise NotFound(f"{where}/v1/models lists no model: give its name, and see whether the address is right")
    raise InvalidArgument(f"{where} has {len(names)} models: give the name of one, such as {names[0]}")


def _failure(address: Address, model: str, answer: Answer) -> HeadraceError:
    said = f"{address} does not answer for model '{model}': {answer.error}: {answer.told}"
    kind = NotFound if answer.error == "HTTP 404" else InvalidArgument if answer.error in _REFUSED else Unavailable
    return kind(said)
