# SPDX-License-Identifier: Apache-2.0
"""A server of OpenAI's protocol and v2 whose models echo the prompt, word by word.

with openai_server_with_models() as server:
    requests to 127.0.0.1:server.port; server.repeater.received are the requests its model got

The repeater repeats the prompt, or the last message that is the user's. Some words are commands: see `EchoModel`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import numpy as np

from headrace.api.openai.http import OpenAiHttp
from headrace.api.openai.response_store import ResponseStore
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.v2.http import V2Http
from headrace.backends.contract import Work
from headrace.core.dtypes import BOOL, BYTES, FP32, INT32
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.core.generation import Generation, GenerationRequest, PromptImage, PromptVideo, Sampling
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.telemetry.metrics import Registry
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.models.config.types import DynamicBatching, InputSpec, ModelConfig, OutputSpec
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.engines import config_of, plane_of
from support.serving import Serving, serving


def text_tensor(*texts: str) -> Tensor:
    array = np.empty(len(texts), dtype=object)
    array[:] = [text.encode() for text in texts]
    return Tensor("text_output", BYTES, array)


def words_of(text: str) -> list[str]:
    """Each with the white space before it."""
    return re.findall(r"\s*\S+|\s+\Z", text)


class EchoModel:
    """Repeats. FOREVER: goes on until cancelled. BREAK: fails there. REFUSE, BUSY: fails at once. CRASH: with a bug."""

    def __init__(self) -> None:
        self.received: list[Generation] = []
        self.running = 0
        self.cancelled = 0

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        for work in batch:
            asyncio.get_running_loop().call_soon(_EchoedReply(self, work).step)
        finished()

    def close(self) -> None:
        pass


class _EchoedReply:
    def __init__(self, repeater: EchoModel, work: Work) -> None:
        self._repeater = repeater
        self._work = work
        request = work.request
        if isinstance(request, GenerationRequest):
            self._generation = request.generation
        else:
            self._generation = _from_v2(request)
        repeater.received.append(self._generation)
        repeater.running += 1
        self._sampling = self._generation.sampling
        words = words_of(_prompt_text(self._generation))
        self._all = words
        most = self._sampling.max_tokens
        self._words = words if most is None else words[:most]
        self._reason = "stop" if len(self._words) == len(words) else "length"
        self._matched = ""
        for stop in self._sampling.stop:
            stops = [index for index, word in enumerate(self._words) if stop in word]
            if stops:
                self._words, self._reason, self._matched = self._words[: stops[0]], "stop", stop
        self._left = [list(self._words) for _ in range(self._sampling.n)]

    def step(self) -> None:
        work = self._work
        if work.cancelled:
            self._repeater.cancelled += 1
            self._repeater.running -= 1
            work.reply(None)
            return
        orders = {"REFUSE": InvalidArgument("no"), "BUSY": Unavailable("too many wait", retry_after_seconds=7)}
        for order, error in orders.items():
            if any(order in word for word in self._all):
                self._repeater.running -= 1
                work.reply(error)
                return
        if any("CRASH" in word for word in self._all):
            self._repeater.running -= 1
            work.reply([Tensor("nothing", BYTES, np.empty(1, dtype=object))])
            return
        if self._generation.task == "tokenize":
            # As many tokens as all messages have words.
            contents = " ".join(str(message["content"]) for message in self._generation.messages)
            self._repeater.running -= 1
            work.reply([text_tensor("")], parameters={"tokens": json.dumps(list(range(len(contents.split()))))})
            return
        has_more = self._say_next() if self._generation.stream else self._say_all()
        if has_more:
            asyncio.get_running_loop().call_soon(self.step)
        else:
            self._repeater.running -= 1

    def _say_next(self) -> bool:
        for index, left in enumerate(self._left):
            if not left:
                continue
            word = left.pop(0)
            if "BREAK" in word:
                self._work.reply(Unavailable("the model broke"))
                return False
            if "FOREVER" in word:
                left.append(word)
            last = not left
            final = last and index == len(self._left) - 1
            self._work.reply([text_tensor(word)], final=final, parameters=self._about(index, [word], last=last))
        if not self._words:
            for index in range(self._sampling.n):
                final = index == self._sampling.n - 1
                self._work.reply([text_tensor("")], final=final, parameters=self._about(index, [], last=True))
            return False
        return any(self._left)

    def _say_all(self) -> bool:
        if any("FOREVER" in word for word in self._words):
            return True
        text = "".join(self._words)
        if not isinstance(self._work.request, GenerationRequest):
            self._work.reply([text_tensor(*[text] * self._sampling.n)], parameters={"finish_reason": self._reason})
            return False
        for index in range(self._sampling.n):
            about = self._about(index, self._words, last=True)
            self._work.reply([text_tensor(text)], final=index == self._sampling.n - 1, parameters=about)
        return False

    def _about(self, index: int, words: Sequence[str], *, last: bool) -> dict[str, Any]:
        about: dict[str, Any] = {"index": index}
        if self._generation.prefill_only:
            about["ticket"] = "made.up"
        if last:
            about["finish_reason"] = self._reason
            about["prompt_tokens"] = len(self._all)
            about["cached_tokens"] = 1
            about["completion_tokens"] = len(self._words)
            if self._matched:
                about["matched_stop"] = self._matched
        if self._sampling.logprobs is not None:
            one = {"logprob": -0.5}
            tops = [{"token": f"t{i}", "bytes": [65], **one} for i in range(self._sampling.logprobs)]
            about["logprobs"] = json.dumps(
                [{"token": word, "bytes": list(word.encode()), **one, "top_logprobs": tops} for word in words]
            )
        return about


def _prompt_text(generation: Generation) -> str:
    if generation.prompt is not None:
        prompt = generation.prompt
        return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
    content = next(message["content"] for message in reversed(generation.messages) if message["role"] == "user")
    if isinstance(content, str):
        return content
    seen = iter(generation.media)
    return " ".join(item["text"] if item["type"] == "text" else _media_text(next(seen)) for item in content)


def _media_text(media: PromptImage | PromptVideo) -> str:
    shape = media.pixels.shape if isinstance(media, PromptImage) else media.frames.shape
    return f"<{type(media).__name__.lower()} {'x'.join(map(str, shape))}>"


def _from_v2(request: Any) -> Generation:
    by_name = {tensor.name: tensor.array for tensor in request.inputs}
    text = by_name["text_input"].item().decode()
    stream = bool(by_name["stream"].item()) if "stream" in by_name else False
    known = {name: request.parameters[name] for name in ("max_tokens", "n") if name in request.parameters}
    return Generation(prompt=text, stream=stream, sampling=Sampling(**known))


class Proxy:
    """Another engine, as `openai_proxy` shows it: says `what it was asked` in OpenAI's words."""

    def __init__(self) -> None:
        self.received: list[Generation] = []

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        for work in batch:
            asyncio.get_running_loop().call_soon(self._answer, work)
        finished()

    def _answer(self, work: Work) -> None:
        request = work.request
        assert isinstance(request, GenerationRequest)
        generation = request.generation
        self.received.append(generation)
        whole = {"id": "theirs", "object": "chat.completion", "created": 1, "model": "inner/name"}
        if generation.path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, 1.5]}]
            usage = {"prompt_tokens": 3, "total_tokens": 3}
            document = {**whole, "object": "list", "data": data, "usage": usage}
            work.reply([text_tensor("")], parameters={"openai": json.dumps(document)})
            return
        if not generation.stream:
            message = {"role": "assistant", "content": 'it said "model":"inner/name"', "extra": [1]}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            work.reply([text_tensor("")], parameters={"openai": json.dumps({**whole, "choices": choices})})
            return
        for number in range(3):
            delta = {"content": f'{number} "model":"inner/name" '}
            chunk = {**whole, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
            raw = json.dumps(chunk, separators=(",", ":")) if number else json.dumps(chunk)
            work.reply([text_tensor("")], final=number == 2, parameters={"openai": raw})

    def close(self) -> None:
        pass


class Letters:
    """Embeds a text as how often it has a, b, c and d; counts its words as tokens."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def compute(self, inputs: Mapping[str, Any], requested: Collection[str]) -> Mapping[str, Any]:
        texts = [row[0].decode() for row in inputs["text_input"]]
        self.rows.append(len(texts))
        if "refuse" in "".join(texts):
            raise InvalidArgument("a text is too long")
        vectors = [[text.count(letter) for letter in "abcd"] for text in texts]
        counts = [[len(text.split())] for text in texts]
        return {"embedding": np.array(vectors, np.float32), "token_count": np.array(counts, np.int32)}

    def close(self) -> None:
        pass


class Colours:
    """A reader of media: `data:WxH` is an image of that size, `wait` never comes."""

    def __init__(self) -> None:
        self.waiting = self.cancelled = 0

    async def picture(self, url: str) -> PromptImage:
        if url == "data:wait":
            self.waiting += 1
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        size = re.fullmatch(r"data:(\d+)x(\d+)", url)
        if size is None:
            raise InvalidArgument("this is not an image")
        return PromptImage(np.zeros((int(size[2]), int(size[1]), 3), np.uint8))

    async def clip(self, url: str) -> PromptVideo:
        return PromptVideo(np.zeros((2, 4, 4, 3), np.uint8), (0.0, 0.5), 2.0)


def generating(name: str, backend: str = "llm", **more: Any) -> ModelConfig:
    """As backends that generate complete their configurations."""
    inputs = (
        InputSpec("text_input", BYTES, (1,), optional=True),
        InputSpec("stream", BOOL, (1,), optional=True),
        InputSpec("sampling_parameters", BYTES, (1,), optional=True),
    )
    outputs = (OutputSpec("text_output", BYTES, (-1,)),)
    config = config_of(name, max_batch_size=0, inputs=inputs, outputs=outputs, scheduling=None, decoupled=True, **more)
    return replace(config, backend=backend)


class OpenAiServer:
    """A running server and its models."""

    def __init__(self, server: Serving, repeater: EchoModel, proxy: Proxy, letters: Letters, colours: Colours) -> None:
        self.server = server
        self.port = server.port
        self.repeater = repeater
        self.proxy = proxy
        self.letters = letters
        self.colours = colours

    def ask(self, path: str, body: Any, method: str = "POST", headers: Mapping[str, str] | None = None) -> Any:
        """Status and body of one request, and its head's fields."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, raw, dict(headers or {}))
            response = connection.getresponse()
            text = response.read()
            return response.status, json.loads(text) if text.startswith(b"{") else text, response.headers
        finally:
            connection.close()

    def chat(self, text: str, **more: Any) -> Any:
        """The same for a conversation of one message."""
        body = {"model": "repeater", "messages": [{"role": "user", "content": text}], **more}
        return self.ask("/v1/chat/completions", body)


@contextmanager
def openai_server_with_models(
    settings: OpenAiSettings | None = None,
    make_routes: Callable[[], Routes] = Routes,
    reader: Any = None,
    kv_transfer: KvTransferSettings | None = None,
    responses: ResponseStore | None = None,
    metrics: Registry | None = None,
    more: Callable[[DataPlane, Routes], None] = lambda plane, routes: None,
) -> Iterator[OpenAiServer]:
    """`reader` is one of media, in place of `Colours`. `more` adds routes."""
    repeater, proxy, letters, colours = EchoModel(), Proxy(), Letters(), Colours()
    known = {"max_model_len": "512", "adapters": "pirate=/adapters/pirate,poet=/adapters/poet"}
    embedding = config_of(
        "letters",
        max_batch_size=8,
        inputs=(InputSpec("text_input", BYTES, (1,)),),
        outputs=(OutputSpec("embedding", FP32, (4,)), OutputSpec("token_count", INT32, (1,))),
        scheduling=DynamicBatching(max_queue_delay_microseconds=1000),
    )
    models: list[tuple[ModelConfig, Any]] = [
        (generating("repeater", parameters=known), repeater),
        (generating("llama", parameters={"tool_format": "llama3"}), repeater),
        (generating("mistral", parameters={"tool_format": "mistral"}), repeater),
        (generating("thinker", parameters={"reasoning_format": "think"}), repeater),
        (generating("odd", parameters={"tool_format": "odd"}), repeater),
        (generating("elsewhere", "openai_proxy"), proxy),
        (embedding, letters),
        (config_of("numbers"), lambda inputs: {"OUTPUT0": inputs["INPUT0"]}),
    ]

    async def site() -> Site:
        plane = await plane_of(models)
        routes = make_routes()
        V2Http(plane).add_to(routes)
        OpenAiHttp(plane, settings, reader or colours, kv_transfer, responses, metrics).add_to(routes)
        more(plane, routes)
        return Site(routes)

    with serving(site) as server:
        yield OpenAiServer(server, repeater, proxy, letters, colours)
