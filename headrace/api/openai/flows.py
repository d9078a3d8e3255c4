# SPDX-License-Identifier: Apache-2.0
"""Requests of one exchange on their way through the data plane, and what every writer of answers has to know of them.

Begun by `chat`, `completions` and `embeddings`; a `Writer` makes of the answers what the client gets. Ends with its client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from headrace.api.openai.errors import about
from headrace.core.generation import TEXT_OUTPUT, GenerationRequest
from headrace.core.messages import InferResponse, Parameters
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending import Pending
from headrace.net.http.exchange import Exchange


class Writer(Protocol):
    """Turns answers into a response."""

    def add(self, request: int, response: InferResponse) -> None:
        """One answer to one of the requests."""

    def end(self) -> None:
        """All of them have had their last answer."""

    def failed(self, error: BaseException) -> None:
        """There will be no more."""


class Flow:
    """All requests of one exchange."""

    def __init__(
        self,
        plane: DataPlane,
        exchange: Exchange,
        writer: Writer,
        names: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        """`names`: what the client calls the fields of one of the requests, for errors about them."""
        self._plane = plane
        self._exchange = exchange
        self._writer = writer
        self._names = names
        self._pendings: list[Pending] = []
        self._left = 0
        self._over = False

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Send them. Raises at once if one of them is wrong; then none is computed."""
        self._left = len(requests)
        try:
            for number, request in enumerate(requests):
                self._pendings.append(self._plane.infer_stream(request, partial(self._answered, number)))
        except Exception:
            self.cancel()
            raise
        self._exchange.on_disconnect = self.cancel

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._over = True
        pendings, self._pendings = self._pendings, []
        for pending in pendings:
            pending.cancel()

    def _answered(self, number: int, result: InferResponse | BaseException | None, final: bool) -> None:
        if self._over:
            return
        if isinstance(result, BaseException):
            self.cancel()
            self._writer.failed(about(result, self._names(number)))
            return
        try:
            if result is not None:
                self._writer.add(number, result)
            if final:
                self._left -= 1
                if not self._left:
                    self._over = True
                    self._pendings = []
                    self._writer.end()
        except Exception as error:
            self.cancel()
            self._writer.failed(error)


class Usage:
    """Tokens of all requests: a prompt counts once, however many choices it has."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0

    def add(self, request: int, parameters: Parameters) -> None:
        """A choice has had its last answer."""
        self._prompts[request] = (int(parameters.get("prompt_tokens", 0)), int(parameters.get("cached_tokens", 0)))
        self._completion += int(parameters.get("completion_tokens", 0))

    def shown(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(tokens for _, tokens in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def text_of(response: InferResponse) -> str:
    """The text that is new."""
    output = response.outputs[0]
    if output.name != TEXT_OUTPUT:
        output = next(each for each in response.outputs if each.name == TEXT_OUTPUT)
    text = output.array.item()
    return text.decode() if type(text) is bytes else text
