# SPDX-License-Identifier: Apache-2.0
"""Run load on an OpenAI-compatible API: send chats, time each token, compute the numbers."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools
import numpy as np
import orjson

from headrace.client import NO_RETRY
from headrace.client.http import tls_context
from headrace.client.http1 import request_head
from headrace.client.sockets import Address
from headrace.client.transport import check_options
from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.core.telemetry.progress import Progress, Reporter, silent
from headrace.fleet.benchmarks.scenarios import RequestSizes, Scenario
from headrace.programs.loadtest.chat.requests import CHAT, Bodies, Prompts
from headrace.programs.loadtest.connections import LOST, NO_CONNECTION, TIMED_OUT
from headrace.programs.loadtest.results import percentile
from headrace.programs.loadtest.runner import Access

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True)
class ChatRun:
    """One scenario at one number of requests at a time."""

    scenario: str
    concurrency: int
    seconds: float
    """From the first request to the end of the last."""
    answers: tuple[Answer, ...]
    """Those that were answered well."""
    errors: Mapping[str, int]
    examples: Mapping[str, str]

    @property
    def requests_per_second(self) -> float:
        """Answered well."""
        return len(self.answers) / self.seconds if self.seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """As the server counts them."""
        return sum(each.prompt_tokens for each in self.answers) / self.seconds if self.seconds else 0.0

    @property
    def answer_tokens_per_second(self) -> float:
        """Of all answers together."""
        return sum(each.answer_tokens for each in self.answers) / self.seconds if self.seconds else 0.0

    def first_token_ms(self) -> list[float]:
        """Of each answer: from the request to the first token."""
        return [(each.times[0] - each.began) * 1000 for each in self.answers if each.times]

    def token_ms(self) -> list[float]:
        """Of each answer: the mean time of a token after the first."""
        told = [each for each in self.answers if len(each.times) > 1 and each.answer_tokens > 1]
        return [(each.times[-1] - each.times[0]) / (each.answer_tokens - 1) * 1000 for each in told]

    def gap_ms(self) -> list[float]:
        """Between one piece of an answer and the next: what a reader sees stall."""
        pairs = ((one, other) for each in self.answers for one, other in zip(each.times, each.times[1:], strict=False))
        return [(other - one) * 1000 for one, other in pairs]

    def whole_ms(self) -> list[float]:
        """Of each answer: from the request to its end."""
        return [(each.ended - each.began) * 1000 for each in self.answers]

    def warnings(self) -> list[str]:
        """What a reader should know before believing the numbers."""
        found = []
        if self.answers and not any(each.prompt_tokens for each in self.answers):
            found.append("the server does not tell how many tokens a prompt has, so sizes are guesses")
        if 0 < len(self.answers) < 100:
            found.append(f"{len(self.answers)} answers are few for the highest percentiles: p99 is their maximum")
        return found

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "scenario": self.scenario,
            "concurrency": self.concurrency,
            "seconds": round(self.seconds, 3),
            "requests": len(self.answers) + sum(self.errors.values()),
            "answered": len(self.answers),
            "errors": dict(self.errors),
            "error_texts": dict(self.examples),
            "requests_per_second": round(self.requests_per_second, 3),
            "prompt_tokens_per_second": round(self.prompt_tokens_per_second, 3),
            "answer_tokens_per_second": round(self.answer_tokens_per_second, 3),
            "prompt_tokens": _mean([each.prompt_tokens for each in self.answers]),
            "answer_tokens": _mean([each.answer_tokens for each in self.answers]),
            "first_token_ms": summed(self.first_token_ms()),
            "token_ms": summed(self.token_ms()),
            "gap_ms": summed(self.gap_ms()),
            "latency_ms": summed(self.whole_ms()),
            "warnings": self.warnings(),
        }


def chat_run(scenario: str, concurrency: int, seconds: float, answers: Sequence[Answer]) -> ChatRun:
    """Sum answers up."""
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for each in answers:
        if each.error:
            errors[each.error] += 1
            examples.setdefault(each.error, each.told)
    good = tuple(each for each in answers if not each.error)
    return ChatRun(scenario, concurrency, seconds, good, dict(errors.most_common()), examples)


def at(values: Callable[[], list[float]], share: float) -> float:
    """A percentile; NaN for none."""
    return percentile(np.array(values(), np.float64), share)


def summed(values: list[float]) -> dict[str, float | None]:
    """Percentiles, mean and the extremes of what was measured."""
    ordered = np.array(values, np.float64)
    told = {f"p{share:g}": percentile(ordered, share) for share in PERCENTILES}
    if len(ordered):
        told |= {"mean": float(ordered.mean()), "min": float(ordered.min()), "max": float(ordered.max())}
    return {name: None if value != value else round(value, 4) for name, value in told.items()}  # noqa: PLR0124 - NaN


def _mean(values: list[int]) -> float | None:
    return round(float(np.mean(values)), 2) if values else None


_CONNECT_SECONDS = 10.0
_TEXT_BYTES = 4096
_MOST_EVENT_BYTES = 64 * 1024 * 1024


@dataclass
class Answer:
    """What came of one request. Times are of `time.perf_counter`."""

    began: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """Of each piece of the answer that had something in it."""
    prompt_tokens: int = 0
    """As the server counts them; 0 if it does not tell."""
    answer_tokens: int = 0
    """As the server counts them, else the pieces that came."""
    error: str = ""
    """The kind; "" if it was answered well."""
    told: str = ""


class Stream:
    """One connection to a server; opened when it is needed."""

    def __init__(self, address: Address, fields: Sequence[tuple[str, str]], tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._fields = [("host", address.authority), *fields]
        self._tls = tls
        self._lines: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: bytes, timeout_seconds: float) -> Answer:
        """Send a request and read its answer to the end. Errors are in the answer."""
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ask("POST", path, body, answer)
        except TimeoutError:
            self._fail(answer, TIMED_OUT, "no end of the answer came in time")
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            self._fail(answer, LOST, "the connection ended before the answer did")
        except OSError as error:
            self._fail(answer, NO_CONNECTION, error.strerror or type(error).__name__)
        except httptools.HttpParserError:
            self._fail(answer, "no HTTP", "what answers there does not speak HTTP/1.1")
        if not answer.ended:
            answer.ended = time.perf_counter()
        return answer

    async def fetch(self, path: str, timeout_seconds: float) -> Any:
        """The JSON behind a path; None if there is none."""
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(timeout_seconds):
                reading = await self._ask("GET", path, b"", answer)
            return orjson.loads(reading.body) if not answer.error else None
        except (OSError, TimeoutError, httptools.HttpParserError, orjson.JSONDecodeError):
            self.close()
            return None

    def close(self) -> None:
        """End the connection."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines[1].transport.abort()

    def _fail(self, answer: Answer, kind: str, text: str) -> None:
        answer.error, answer.told = kind, text
        self.close()

    async def _ask(self, method: str, path: str, body: bytes, answer: Answer) -> _Reading:
        if self._lines is None:
            async with asyncio.timeout(_CONNECT_SECONDS):
                host = self._address.host if self._tls is not None else None
                self._lines = await asyncio.open_connection(
                    self._address.host, self._address.port, ssl=self._tls, server_hostname=host
                )
        reader, writer = self._lines
        kind = [("content-type", "application/json")] if body else []
        target = self._address.prefix + path
        writer.write(request_head(method, target, [*self._fields, *kind], len(body) if body else -1) + body)
        reading = _Reading(answer)
        while not reading.complete:
            data = await reader.read(65536)
            if not data:
                raise ConnectionResetError
            reading.feed(data)
        answer.ended = time.perf_counter()
        reading.conclude()
        if not reading.keeps:
            self.close()
        return reading


class _Reading:
    """Reads one HTTP answer; of a stream of events, the time of each."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._events = False
        self._now = 0.0
        self.body = bytearray()
        self.complete = False
        self.keeps = False

    def feed(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._events = value.lower().startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        self.body += data
        if self._events and self._parser.get_status_code() == 200:
            while (end := self.body.find(b"\n")) >= 0:
                line = bytes(self.body[:end]).strip()
                del self.body[: end + 1]
                if line.startswith(b"data:"):
                    self._event(line[5:].strip())
        if len(self.body) > _MOST_EVENT_BYTES:
            raise ConnectionResetError

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.complete = True
            self.keeps = self._parser.should_keep_alive()

    def conclude(self) -> None:
        """Sum up: an error's text, or the tokens."""
        answer, status = self._answer, self._parser.get_status_code()
        if status != 200:
            answer.error, answer.told = f"HTTP {status}", _text(bytes(self.body[:_TEXT_BYTES]))
        elif not self._events:
            answer.times.append(self._now)
            self._count(_loaded(bytes(self.body)))
        if not answer.error and not answer.answer_tokens:
            answer.answer_tokens = len(answer.times) if self._events else 0

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = _loaded(data)
        if "error" in event:
            self._answer.error, self._answer.told = "error in the stream", _text(data)
        if any(_says(choice) for choice in event.get("choices") or ()):
            self._answer.times.append(self._now)
        self._count(event)

    def _count(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self._answer.answer_tokens = int(usage.get("completion_tokens") or 0)


def _says(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        return False
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _loaded(data: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(body: bytes) -> str:
    """What an error of OpenAI's form says, or of another."""
    found = _loaded(body)
    error = found.get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))[:300]
    return str(error or found.get("detail") or body[:200].decode(errors="replace"))[:300]


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
        options = check_options(
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
        sizes = (
            RequestSizes(16, _ANSWERING, 64, 64, 1) if self.task.startswith("image") else RequestSizes(16, _ANSWERING)
        )
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
            body = self.bodies.make(RequestSizes(round(asked), 1))
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
        name = f"{scenario.text}, {concurrency} at a time"
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
        return chat_run(scenario.text, concurrency, seconds, answers)


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
