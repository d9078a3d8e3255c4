# SPDX-License-Identifier: Apache-2.0
"""What both clients share: requests with their deadlines and retries. Knows no protocol and no socket."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from headrace.client.errors import is_from_server, with_request_id
from headrace.client.inference import Inference, Result, check_model_name
from headrace.client.retries import AttemptFailed, Deadline, Retry
from headrace.client.sockets import Address, Network
from headrace.client.transport import Call, Options, Stream, Transport, request_id_for
from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidArgument, Unavailable

T = TypeVar("T")

LOAD_SECONDS = 3600.0
"""Large models take long to load."""


class Session:
    """One server over one transport. `seconds` of None is the client's timeout."""

    def __init__(self, address: Address, transport: Transport, network: Network, options: Options) -> None:
        self._address = address
        self._transport = transport
        self._network = network
        self._options = options
        self._chance = random.Random()  # noqa: S311 - spreads clients over time, hides nothing

    async def infer(self, inference: Inference, seconds: float | None) -> Result:
        """Run one request."""
        call = self._call(seconds, f"model '{inference.model}'", inference.id)
        return await self._with_retries(call, lambda: self._transport.infer(inference, call), repeatable=False)

    async def stream(self, inference: Inference, seconds: float | None) -> Results:
        """Run a request with any number of results; returns when the first has come."""
        call = self._call(math.inf if seconds is None else seconds, f"model '{inference.model}'", inference.id)

        async def begin() -> Results:
            stream = await self._transport.stream(inference, call)
            try:
                return Results(stream, call, await stream.next())
            except BaseException:
                stream.close()
                raise

        return await self._with_retries(call, begin, repeatable=False)

    async def live(self, seconds: float | None) -> bool:
        """Return whether the server answers."""
        return await self._check(seconds, self._transport.live)

    async def ready(self, model: str, version: int | str, seconds: float | None) -> bool:
        """Return whether the server, or a model, is ready."""
        return await self._check(seconds, lambda call: self._transport.ready(call, model, str(version)))

    async def metadata(self, model: str, version: int | str, seconds: float | None) -> dict[str, Any]:
        """Return the metadata of a model, or of the server."""
        return await self._request(seconds, lambda call: self._transport.metadata(call, model, str(version)))

    async def config(self, model: str, version: int | str, seconds: float | None) -> dict[str, Any]:
        """Return a model's configuration."""
        name = check_model_name(model)
        return await self._request(seconds, lambda call: self._transport.config(call, name, str(version)))

    async def statistics(self, model: str, version: int | str, seconds: float | None) -> list[dict[str, Any]]:
        """Return the statistics of each version."""
        return await self._request(seconds, lambda call: self._transport.statistics(call, model, str(version)))

    async def models(self, ready: bool, seconds: float | None) -> list[dict[str, str]]:
        """Return the repository's index."""
        return await self._request(seconds, lambda call: self._transport.index(call, ready))

    async def load(
        self,
        model: str,
        config: Mapping[str, Any] | str | None,
        files: Mapping[str, bytes] | None,
        seconds: float | None,
    ) -> None:
        """Load a model."""
        name = check_model_name(model)
        if files and config is None:
            raise InvalidArgument("files need a config with them: load(model, config={...}, files={...})")
        text = config if config is None or isinstance(config, str) else json.dumps(dict(config))
        patience = LOAD_SECONDS if seconds is None else seconds
        await self._request(patience, lambda call: self._transport.load(call, name, text, files or {}))

    async def unload(self, model: str, dependents: bool, seconds: float | None) -> None:
        """Unload a model."""
        name = check_model_name(model)
        patience = LOAD_SECONDS if seconds is None else seconds
        await self._request(patience, lambda call: self._transport.unload(call, name, dependents))

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def _request(self, seconds: float | None, ask: Callable[[Call], Awaitable[T]]) -> T:
        call = self._call(seconds, str(self._address))
        return await self._with_retries(call, lambda: ask(call), repeatable=True)

    async def _check(self, seconds: float | None, ask: Callable[[Call], Awaitable[bool]]) -> bool:
        call = self._call(seconds, str(self._address))
        try:
            return await self._with_retries(call, lambda: ask(call), repeatable=True, retry=Retry(attempts=1))
        except (Unavailable, DeadlineExceeded) as error:
            if is_from_server(error):
                raise
            return False

    def _call(self, seconds: float | None, what: str, request_id: str = "") -> Call:
        given = self._options.timeout if seconds is None else seconds
        return Call(Deadline(given, what), request_id_for(request_id), self._options.fields)

    async def _with_retries(
        self, call: Call, work: Callable[[], Awaitable[T]], *, repeatable: bool, retry: Retry | None = None
    ) -> T:
        """Try until the work succeeds, fails for good, or the deadline passes."""
        rule = retry or self._options.retry
        tried = 0
        while True:
            tried += 1
            try:
                return await work()
            except AttemptFailed as failed:
                error = failed.error
                wait = rule.wait_seconds(tried, error.retry_after_seconds, self._chance.random())
                again = tried < rule.attempts and rule.should_retry(failed.failure, repeatable=repeatable)
                if not again or not call.deadline.covers(wait):
                    raise with_request_id(error, call.id) from None
            except HeadraceError as error:
                with_request_id(error, call.id)
                raise
            await self._network.sleep(wait)


class Results:
    """The results of one request. A stream is never sent again once its first result has come."""

    def __init__(self, stream: Stream, call: Call, first: Result | None) -> None:
        self._stream = stream
        self._call = call
        self._first = first
        self._over = first is None

    async def next(self) -> Result | None:
        """Return the next result; None at the end."""
        if self._over:
            return None
        result, self._first = self._first, None
        if result is None:
            try:
                result = await self._stream.next()
            except AttemptFailed as failed:
                self.close()
                raise with_request_id(failed.error, self._call.id) from None
            except HeadraceError as error:
                self.close()
                with_request_id(error, self._call.id)
                raise
            except BaseException:
                self.close()
                raise
        self._over = result is None
        return result

    def close(self) -> None:
        """Stop the request."""
        self._over = True
        self._stream.close()
