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
from headrace.programs.loadtest.chat.requests import CHAT, Prompts, RequestBodies
from headrace.programs.loadtest.connections import LOST, NO_CONNECTION, TIMED_OUT
from headrace.programs.loadtest.results import percentile
from headrace.programs.loadtest.runner import Access

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True)
class ChatRun:
    """The results of one scenario at one concurrency."""

    scenario: str
    concurrency: int
    seconds: float
    """From the first request to the end of the last."""
    answers: tuple[Answer, ...]
    """The successful answers."""
    errors: Mapping[str, int]
    examples: Mapping[str, str]

    @property
    def requests_per_second(self) -> float:
        """Successful requests per second."""
        return len(self.answers) / self.seconds if self.seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens per second, as the server counts them."""
        return sum(answer.prompt_tokens for answer in self.answers) / self.seconds if self.seconds else 0.0

    @property
    def answer_tokens_per_second(self) -> float:
        """Completion tokens per second of all answers together."""
        return sum(answer.answer_tokens for answer in self.answers) / self.seconds if self.seconds else 0.0

    def first_token_ms(self) -> list[float]:
        """Return the time from the request to the first token, for each answer."""
        return [(answer.times[0] - answer.began) * 1000 for answer in self.answers if answer.times]

    def token_ms(self) -> list[float]:
        """Return the mean time per token after the first, for each answer."""
        streamed = [answer for answer in self.answers if len(answer.times) > 1 and answer.answer_tokens > 1]
        return [(answer.times[-1] - answer.times[0]) / (answer.answer_tokens - 1) * 1000 for answer in streamed]

    def gap_ms(self) -> list[float]:
        """Return the times between two chunks of an answer, for all answers."""
        pairs = (
            (earlier, later)
            for answer in self.answers
            for earlier, later in zip(answer.times, answer.times[1:], strict=False)
        )
        return [(later - earlier) * 1000 for earlier, later in pairs]

    def latency_ms(self) -> list[float]:
        """Return the time from the request to the end of its answer, for each answer."""
        return [(answer.ended - answer.began) * 1000 for answer in self.answers]

    def warnings(self) -> list[str]:
        """Return warnings about the validity of the results."""
        warnings = []
        if self.answers and not any(answer.prompt_tokens for answer in self.answers):
            warnings.append("the server does not report prompt tokens, so prompt sizes are estimates")
        if 0 < len(self.answers) < 100:
            warnings.append(f"{len(self.answers)} answers are few for the highest percentiles: p99 is their maximum")
        return warnings

    def document(self) -> dict[str, Any]:
        """Return the results as JSON."""
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
            "prompt_tokens": _mean([answer.prompt_tokens for answer in self.answers]),
            "answer_tokens": _mean([answer.answer_tokens for answer in self.answers]),
            "first_token_ms": summarize_values(self.first_token_ms()),
            "token_ms": summarize_values(self.token_ms()),
            "gap_ms": summarize_values(self.gap_ms()),
            "latency_ms": summarize_values(self.latency_ms()),
            "warnings": self.warnings(),
        }


def summarize(scenario: str, concurrency: int, seconds: float, answers: Sequence[Answer]) -> ChatRun:
    """Summarize answers as one run."""
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for answer in answers:
        if answer.error:
            errors[answer.error] += 1
            examples.setdefault(answer.error, answer.error_text)
    good = tuple(answer for answer in answers if not answer.error)
    return ChatRun(scenario, concurrency, seconds, good, dict(errors.most_common()), examples)


def at(values: Callable[[], list[float]], share: float) -> float:
    """Return a percentile; NaN for no values."""
    return percentile(np.array(values(), np.float64), share)


def summarize_values(values: list[float]) -> dict[str, float | None]:
    """Return percentiles, mean, minimum and maximum."""
    ordered = np.array(values, np.float64)
    summary = {f"p{share:g}": percentile(ordered, share) for share in PERCENTILES}
    if len(ordered):
        summary |= {"mean": float(ordered.mean()), "min": float(ordered.min()), "max": float(ordered.max())}
    return {name: None if value != value else round(value, 4) for name, value in summary.items()}  # noqa: PLR0124 - NaN


def _mean(values: list[int]) -> float | None:
    return round(float(np.mean(values)), 2) if values else None


_CONNECT_SECONDS = 10.0
_TEXT_BYTES = 4096
_MOST_EVENT_BYTES = 64 * 1024 * 1024


@dataclass
class Answer:
    """The outcome of one request. Times are of `time.perf_counter`."""

    began: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each chunk with content arrived."""
    prompt_tokens: int = 0
    """As the server counts them; 0 if it does not report them."""
    answer_tokens: int = 0
    """As the server counts them; otherwise the number of chunks."""
    error: str = ""
    """The kind of error; "" for success."""
    error_text: str = ""


class ChatConnection:
    """One connection to a server, opened when it is first needed."""

    def __init__(self, address: Address, fields: Sequence[tuple[str, str]], tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._fields = [("host", address.authority), *fields]
        self._tls = tls
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes, timeout_seconds: float) -> Answer:
        """Send a request and read its answer to the end. Errors are in the answer."""
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._exchange("POST", path, body, answer)
        except TimeoutError:
            self._fail(answer, TIMED_OUT, "the answer did not end in time")
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            self._fail(answer, LOST, "the connection ended before the answer did")
        except OSError as error:
            self._fail(answer, NO_CONNECTION, error.strerror or type(error).__name__)
        except httptools.HttpParserError:
            self._fail(answer, "no HTTP", "the server does not speak HTTP/1.1")
        if not answer.ended:
            answer.ended = time.perf_counter()
        return answer

    async def fetch(self, path: str, timeout_seconds: float) -> Any:
        """Return the JSON at a path; None if there is none."""
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(timeout_seconds):
                reading = await self._exchange("GET", path, b"", answer)
            return orjson.loads(reading.body) if not answer.error else None
        except (OSError, TimeoutError, httptools.HttpParserError, orjson.JSONDecodeError):
            self.close()
            return None

    def close(self) -> None:
        """Close the connection."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()

    def _fail(self, answer: Answer, kind: str, text: str) -> None:
        answer.error, answer.error_text = kind, text
        self.close()

    async def _exchange(self, method: str, path: str, body: bytes, answer: Answer) -> _ResponseReader:
        if self._streams is None:
            async with asyncio.timeout(_CONNECT_SECONDS):
                host = self._address.host if self._tls is not None else None
                self._streams = await asyncio.open_connection(
                    self._address.host, self._address.port, ssl=self._tls, server_hostname=host
                )
        reader, writer = self._streams
        kind = [("content-type", "application/json")] if body else []
        target = self._address.prefix + path
        writer.write(request_head(method, target, [*self._fields, *kind], len(body) if body else -1) + body)
        reading = _ResponseReader(answer)
        while not reading.complete:
            data = await reader.read(65536)
            if not data:
                raise ConnectionResetError
            reading.feed(data)
        answer.ended = time.perf_counter()
        reading.finish()
        if not reading.keep_alive:
            self.close()
        return reading


class _ResponseReader:
    """Reads one HTTP response; for an event stream, with the time of each event."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser: Any = httptools.HttpResponseParser(self)
        self._events = False
        self._now = 0.0
        self.body = bytearray()
        self.complete = False
        self.keep_alive = False

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
            self.keep_alive = self._parser.should_keep_alive()

    def finish(self) -> None:
        """Set the error of the answer, or its token counts."""
        answer, status = self._answer, self._parser.get_status_code()
        if status != 200:
            answer.error, answer.error_text = f"HTTP {status}", _text(bytes(self.body[:_TEXT_BYTES]))
        elif not self._events:
            answer.times.append(self._now)
            self._count(_parse_json(bytes(self.body)))
        if not answer.error and not answer.answer_tokens:
            answer.answer_tokens = len(answer.times) if self._events else 0

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        event = _parse_json(data)
        if "error" in event:
            self._answer.error, self._answer.error_text = "error in the stream", _text(data)
        if any(_has_content(choice) for choice in event.get("choices") or ()):
            self._answer.times.append(self._now)
        self._count(event)

    def _count(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self._answer.answer_tokens = int(usage.get("completion_tokens") or 0)


def _has_content(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        return False
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _text(body: bytes) -> str:
    """Return the message of an error in OpenAI's format or another one."""
    document = _parse_json(body)
    error = document.get("error")
    if isinstance(error, dict):
        return str(error.get("message", ""))[:300]
    return str(error or document.get("detail") or body[:200].decode(errors="replace"))[:300]


_FIRST_ANSWER_TOKENS = 8
_SAMPLES = (1, 52)
"""Words of the two prompts that measure how a server counts tokens: almost none, and all words."""
_REFUSED = ("HTTP 400", "HTTP 422")


@dataclass(frozen=True, slots=True)
class Limits:
    """The end of a run: the first limit that is reached."""

    seconds: float
    requests: int
    timeout_seconds: float = 600.0
    """Longer requests count as failed."""


class ChatTest:
    """Runs load on one model of an OpenAI-compatible server. Belongs to one event loop."""

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
        """Prepare the test without connecting. `texts` are prompts of a data set; without `seed`, each test differs."""
        self._address = Address.parse(url)
        if self._address.is_grpc:
            raise InvalidArgument(f"{url} is an address for gRPC: OpenAI's API is at http:// or https://")
        access = access or Access({})
        options = check_options(
            timeout=60.0, retry=NO_RETRY, verify=access.verify, cert=access.cert, token="", headers=access.headers,
            compression=None,
        )  # fmt: skip
        self._fields = list(options.fields)
        self._tls = tls_context(options) if self._address.secure else None
        self._rng = random.Random(seed)  # noqa: S311 - for sizes and words
        self.bodies = RequestBodies(model, task, Prompts(self._rng, texts), dict(parameters or {}))
        self.task = task
        self._progress = progress

    def _open_connection(self) -> ChatConnection:
        return ChatConnection(self._address, self._fields, self._tls)

    async def prepare(self, timeout_seconds: float = 600.0) -> None:
        """Find the model, send one or two requests, and measure how it counts tokens. Raises HeadraceError."""
        connection = self._open_connection()
        try:
            if not self.bodies.model:
                self.bodies.model = _single_model(await connection.fetch("/v1/models", 30), str(self._address))
            first = await self._first_answer(connection, timeout_seconds)
            if self.bodies.path == CHAT and not self.task.startswith("image"):
                await self._calibrate(connection, first, timeout_seconds)
        finally:
            connection.close()

    async def _first_answer(self, connection: ChatConnection, timeout_seconds: float) -> Answer:
        sizes = RequestSizes(16, _FIRST_ANSWER_TOKENS)
        if self.task.startswith("image"):
            sizes = RequestSizes(16, _FIRST_ANSWER_TOKENS, 64, 64, 1)
        answer = await connection.post(self.bodies.path, self.bodies.build(sizes), timeout_seconds)
        for option in ("ignore_eos", "usage"):
            # Not every server supports these. A server that refuses for another reason refuses again.
            if answer.error in _REFUSED:
                setattr(self.bodies, option, False)
                answer = await connection.post(self.bodies.path, self.bodies.build(sizes), timeout_seconds)
        if answer.error:
            raise _failure(self._address, self.bodies.model, answer)
        return answer

    async def _calibrate(self, connection: ChatConnection, first: Answer, timeout_seconds: float) -> None:
        if not first.prompt_tokens:
            return
        samples = []
        prompts = self.bodies.prompts
        for words in _SAMPLES:
            prompt_tokens = prompts.overhead + words * prompts.tokens_per_word
            body = self.bodies.build(RequestSizes(round(prompt_tokens), 1))
            answer = await connection.post(self.bodies.path, body, timeout_seconds)
            if answer.error or not answer.prompt_tokens:
                return
            samples.append((words, answer.prompt_tokens))
        prompts.calibrate(samples)

    async def run(self, scenario: Scenario, concurrency: int, limits: Limits) -> ChatRun:
        """Send requests with this concurrency until a limit is reached, and wait for the last answers."""
        began = time.perf_counter()
        numbers = iter(range(limits.requests))
        answers: list[Answer] = []
        name = f"{scenario.text}, {concurrency} at a time"
        with Reporter(self._progress, SystemClock(), name, total=limits.requests) as reporter:

            async def worker() -> None:
                connection = self._open_connection()
                try:
                    while time.perf_counter() - began < limits.seconds and next(numbers, None) is not None:
                        body = self.bodies.build(scenario.draw(self._rng))
                        answer = await connection.post(self.bodies.path, body, limits.timeout_seconds)
                        answers.append(answer)
                        reporter.update(done=len(answers), message="sending")
                        if answer.error:
                            await asyncio.sleep(0.05)  # do not flood a server that is down
                finally:
                    connection.close()

            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, limits.requests)):
                    group.create_task(worker())
        seconds = max((answer.ended for answer in answers), default=began) - began
        return summarize(scenario.text, concurrency, seconds, answers)


def _single_model(listed: Any, address: str) -> str:
    names = [str(model.get("id")) for model in (listed or {}).get("data") or () if isinstance(model, dict)]
    if len(names) == 1:
        return names[0]
    if not names:
        raise NotFound(f"{address}/v1/models lists no model: give its name, and check the address")
    raise InvalidArgument(f"{address} has {len(names)} models: give the name of one, such as {names[0]}")


def _failure(address: Address, model: str, answer: Answer) -> HeadraceError:
    message = f"{address} does not answer for model '{model}': {answer.error}: {answer.error_text}"
    kind = NotFound if answer.error == "HTTP 404" else InvalidArgument if answer.error in _REFUSED else Unavailable
    return kind(message)
