# SPDX-License-Identifier: Apache-2.0
"""What both clients do, written once: a caller's wish, its deadline, and its tries. Knows no protocol and no socket."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from headrace.client.addresses import Address
from headrace.client.failures import marked, was_answered
from headrace.client.lines import Lines
from headrace.client.requests import Inference, model_named
from headrace.client.results import Result
from headrace.client.retrying import Deadline, Failed, Retry
from headrace.client.transport import Call, Options, Stream, Transport, call_id
from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidArgument, Unavailable

T = TypeVar("T")

LOAD_SECONDS = 3600.0
"""Large models take their time to load."""


class Session:
    """One server, asked in one protocol. `seconds` of None are the client's own timeout."""

    def __init__(self, address: Address, transport: Transport, lines: Lines, options: Options) -> None:
        self._address = address
        self._transport = transport
        self._lines = lines
        self._options = options
        self._chance = random.Random()  # noqa: S311 - spreads clients over time, hides nothing

    async def infer(self, inference: Inference, seconds: float | None) -> Result:
        """Compute one request."""
        call = self._call(seconds, f"model '{inference.model}'", inference.id)
        return await self._tried(call, lambda: self._transport.infer(inference, call), repeatable=False)

    async def stream(self, inference: Inference, seconds: float | None) -> Results:
        """Compute a request with any number of results; the first one has come when this returns."""
        call = self._call(math.inf if seconds is None else seconds, f"model '{inference.model}'", inference.id)

        async def begin() -> Results:
            stream = await self._transport.stream(inference, call)
            try:
                return Results(stream, call, await stream.next())
            except BaseException:
                stream.close()
                raise

        return await self._tried(call, begin, repeatable=False)

    async def live(self, seconds: float | None) -> bool:
        """Whether the server answers at all."""
        return await self._whether(seconds, self._transport.live)

    async def ready(self, model: str, version: int | str, seconds: float | None) -> bool:
        """Whether the server, or a model, would serve requests now."""
        return await self._whether(seconds, lambda call: self._transport.ready(call, model, str(version)))

    async def metadata(self, model: str, version: int | str, seconds: float | None) -> dict[str, Any]:
        """What a model takes and gives."""
        return await self._asked(seconds, lambda call: self._transport.metadata(call, model, str(version)))

    async def config(self, model: str, version: int | str, seconds: float | None) -> dict[str, Any]:
        """How a model is configured."""
        name = model_named(model)
        return await self._asked(seconds, lambda call: self._transport.config(call, name, str(version)))

    async def statistics(self, model: str, version: int | str, seconds: float | None) -> list[dict[str, Any]]:
        """What the versions have done."""
        return await self._asked(seconds, lambda call: self._transport.statistics(call, model, str(version)))

    async def models(self, ready: bool, seconds: float | None) -> list[dict[str, str]]:
        """The repository's index."""
        return await self._asked(seconds, lambda call: self._transport.index(call, ready))

    async def load(
        self,
        model: str,
        config: Mapping[str, Any] | str | None,
        files: Mapping[str, bytes] | None,
        seconds: float | None,
    ) -> None:
        """Load a model."""
        name = model_named(model)
        if files and config is None:
            raise InvalidArgument("files need a config with them: load(model, config={...}, files={...})")
        text = config if config is None or isinstance(config, str) else json.dumps(dict(config))
        patience = LOAD_SECONDS if seconds is None else seconds
        await self._asked(patience, lambda call: self._transport.load(call, name, text, files or {}))

    async def unload(self, model: str, dependents: bool, seconds: float | None) -> None:
        """Unload a model."""
        name = model_named(model)
        patience = LOAD_SECONDS if seconds is None else seconds
        await self._asked(patience, lambda call: self._transport.unload(call, name, dependents))

    async def close(self) -> None:
        """End all connections."""
        await self._transport.close()

    async def _asked(self, seconds: float | None, ask: Callable[[Call], Awaitable[T]]) -> T:
        call = self._call(seconds, str(self._address))
        return await self._tried(call, lambda: ask(call), repeatable=True)

    async def _whether(self, seconds: float | None, ask: Callable[[Call], Awaitable[bool]]) -> bool:
        call = self._call(seconds, str(self._address))
        try:
            return await self._tried(call, lambda: ask(call), repeatable=True, retry=Retry(attempts=1))
        except (Unavailable, DeadlineExceeded) as error:
            if was_answered(error):
                raise
            return False

    def _call(self, seconds: float | None, what: str, request_id: str = "") -> Call:
        given = self._options.timeout if seconds is None else seconds
        return Call(Deadline(given, what), call_id(request_id), self._options.fields)

    async def _tried(
        self, call: Call, work: Callable[[], Awaitable[T]], *, repeatable: bool, retry: Retry | None = None
    ) -> T:
        """Do something until it succeeds, cannot, or the time is over."""
        rule = retry or self._options.retry
        tried = 0
        while True:
            tried += 1
            try:
                return await work()
            except Failed as failed:
                error = failed.error
                wait = rule.wait_seconds(tried, error.retry_after_seconds, self._chance.random())
                again = tried < rule.attempts and rule.again(failed.fate, repeatable=repeatable)
                if not again or not call.deadline.covers(wait):
                    raise marked(error, call.id) from None
            except HeadraceError as error:
                marked(error, call.id)
                raise
            await self._lines.sleep(wait)


class Results:
    """The results of one request, one by one; no result is asked for twice."""

    def __init__(self, stream: Stream, call: Call, first: Result | None) -> None:
        self._stream = stream
        self._call = call
        self._first = first
        self._over = first is None

    async def next(self) -> Result | None:
        """The next one; None at the end."""
        if self._over:
            return None
        result, self._first = self._first, None
        if result is None:
            try:
                result = await self._stream.next()
            except Failed as failed:
                self.close()
                raise marked(failed.error, self._call.id) from None
            except HeadraceError as error:
                self.close()
                marked(error, self._call.id)
                raise
            except BaseException:
                self.close()
                raise
        self._over = result is None
        return result

    def close(self) -> None:
        """Leave it; the server stops."""
        self._over = True
        self._stream.close()
