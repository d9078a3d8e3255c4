# SPDX-License-Identifier: Apache-2.0
"""The asyncio client, with deadlines and retries. `client` runs the same coroutines on blocking sockets.

A client belongs to the event loop that first uses it; any number of tasks may share it.
"""

# ruff: noqa: ASYNC109 - a timeout here covers all attempts of a request

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from headrace.client.asyncio_sockets import AsyncNetwork
from headrace.client.errors import is_from_server, with_request_id
from headrace.client.http import HttpStream, HttpTransport
from headrace.client.inference import (
    Inference,
    Output,
    Parameters,
    Result,
    SequenceStep,
    build_inference,
    check_model_name,
)
from headrace.client.retries import DEFAULT_RETRY, NO_RETRY, AttemptFailed, Deadline, Retry
from headrace.client.sockets import Address, Network
from headrace.client.transport import Call, check_options, request_id_for
from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidArgument, Unavailable

if TYPE_CHECKING:
    from headrace.client.grpc import GrpcStream, GrpcTransport

T = TypeVar("T")

LOAD_SECONDS = 3600.0
"""Large models take long to load."""


class AsyncClient:
    """`Client` with coroutines: the same arguments, results and errors.

    Cancelling a task cancels its request: the connection is closed, or the call cancelled, and the server stops working
    on it.
    """

    _network_type: ClassVar[type[Network]] = AsyncNetwork

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        timeout: float = 60.0,
        retry: Retry = DEFAULT_RETRY,
        verify: Any = True,
        cert: str | tuple[str, str] | None = None,
        token: str = "",
        headers: Mapping[str, str] | None = None,
        compression: str | None = None,
    ) -> None:
        """See `Client`. Does not connect yet."""
        self._options = check_options(
            timeout=timeout,
            retry=retry,
            verify=verify,
            cert=cert,
            token=token,
            headers=headers,
            compression=compression,
        )
        self._address = Address.parse(url)
        self._network = self._network_type()
        self._transport = self._make_transport()
        self._random = random.Random()  # noqa: S311 - jitter, not a secret

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str | Output] = (),
        version: int | str = "",
        parameters: Parameters | None = None,
        timeout: float | None = None,
        request_id: str = "",
        sequence: SequenceStep | None = None,
        priority: int | None = None,
    ) -> Result:
        """Run one request.

        Args:
            model: Name of the model.
            inputs: Arrays by name. Text is lists of str or bytes; `Input` sets a type or parameters.
            outputs: Names of the outputs to return, or `Output` for classes; none for all.
            version: A version; the default is the newest.
            parameters: For the model and the scheduler.
            timeout: Seconds for this request, all attempts together.
            request_id: Returned with the result, and logged by the server.
            sequence: The sequence of this request, for stateful models.
            priority: For models with priority levels; 1 is the highest.

        Raises:
            InvalidArgument: The request is wrong; the message says how.
            NotFound: There is no such model or version.
            DeadlineExceeded: The timeout passed.
            Unavailable: No server responds, or the model is not ready.
            HeadraceError: Base of these and of all others. `request_id` and `status` say where it came from.
        """
        inference = build_inference(
            model,
            inputs,
            outputs=outputs,
            version=version,
            parameters=parameters,
            request_id=request_id,
            sequence=sequence,
            priority=priority,
        )
        call = self._call(timeout, f"model '{inference.model}'", inference.id)
        return await self._with_retries(call, lambda: self._transport.infer(inference, call), repeatable=False)

    async def infer_stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str | Output] = (),
        version: int | str = "",
        parameters: Parameters | None = None,
        timeout: float | None = None,
        request_id: str = "",
        sequence: SequenceStep | None = None,
        priority: int | None = None,
    ) -> AsyncGenerator[Result, None]:
        """Run a request with any number of results: `async for result in client.infer_stream(...)`.

        See `Client.infer_stream`. The request is sent when the first result is awaited.
        """
        inference = build_inference(
            model,
            inputs,
            outputs=outputs,
            version=version,
            parameters=parameters,
            request_id=request_id,
            sequence=sequence,
            priority=priority,
        )
        results = await self._stream(inference, timeout)
        try:
            while (result := await results.next()) is not None:
                yield result
        finally:
            results.close()

    async def live(self, *, timeout: float | None = None) -> bool:
        """Return whether a server responds; False, not an error, if none does."""
        return await self._check(timeout, self._transport.live)

    async def ready(self, model: str = "", *, version: int | str = "", timeout: float | None = None) -> bool:
        """Return whether the server, or one of its models, is ready; False if no server responds."""
        return await self._check(timeout, lambda call: self._transport.ready(call, model, str(version)))

    async def metadata(
        self, model: str = "", *, version: int | str = "", timeout: float | None = None
    ) -> dict[str, Any]:
        """Return names, types and shapes of a model's inputs and outputs; without a model, the server's metadata."""
        return await self._request(timeout, lambda call: self._transport.metadata(call, model, str(version)))

    async def config(self, model: str, *, version: int | str = "", timeout: float | None = None) -> dict[str, Any]:
        """Return a model's configuration, completed by the server."""
        name = check_model_name(model)
        return await self._request(timeout, lambda call: self._transport.config(call, name, str(version)))

    async def statistics(
        self, model: str = "", *, version: int | str = "", timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the statistics of each version of a model, or of all models."""
        return await self._request(timeout, lambda call: self._transport.statistics(call, model, str(version)))

    async def models(self, *, ready: bool = False, timeout: float | None = None) -> list[dict[str, str]]:
        """Return every model of the repository: name, version, state and reason; with `ready`, only those that are ready."""
        return await self._request(timeout, lambda call: self._transport.index(call, ready))

    async def load(
        self,
        model: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Load a model, or reload it; return when it is ready.

        Args:
            model: Name of the model.
            config: Use this configuration instead of the repository's.
            files: Use these files instead, by their path below the model: {"1/model.onnx": content}.
            timeout: Seconds; an hour by default.
        """
        name = check_model_name(model)
        if files and config is None:
            raise InvalidArgument("files need a config with them: load(model, config={...}, files={...})")
        text = config if config is None or isinstance(config, str) else json.dumps(dict(config))
        seconds = LOAD_SECONDS if timeout is None else timeout
        await self._request(seconds, lambda call: self._transport.load(call, name, text, files or {}))

    async def unload(self, model: str, *, dependents: bool = False, timeout: float | None = None) -> None:
        """Unload a model; with `dependents`, also the models that only this ensemble uses."""
        name = check_model_name(model)
        seconds = LOAD_SECONDS if timeout is None else timeout
        await self._request(seconds, lambda call: self._transport.unload(call, name, dependents))

    async def close(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()

    def __repr__(self) -> str:
        """Show the address."""
        return f"AsyncClient('{self._address}')"

    def _make_transport(self) -> HttpTransport | GrpcTransport:
        if not self._address.is_grpc:
            return HttpTransport(self._address, self._network, self._options)
        from headrace.client.grpc import GrpcTransport

        return GrpcTransport(self._address, self._options, is_async=self._network_type is AsyncNetwork)

    async def _stream(self, inference: Inference, seconds: float | None) -> ResultStream:
        """Run a request with any number of results; return when the first has arrived."""
        call = self._call(math.inf if seconds is None else seconds, f"model '{inference.model}'", inference.id)

        async def begin() -> ResultStream:
            stream = await self._transport.stream(inference, call)
            try:
                return ResultStream(stream, call, await stream.next())
            except BaseException:
                stream.close()
                raise

        return await self._with_retries(call, begin, repeatable=False)

    async def _request(self, seconds: float | None, send: Callable[[Call], Awaitable[T]]) -> T:
        call = self._call(seconds, str(self._address))
        return await self._with_retries(call, lambda: send(call), repeatable=True)

    async def _check(self, seconds: float | None, send: Callable[[Call], Awaitable[bool]]) -> bool:
        call = self._call(seconds, str(self._address))
        try:
            return await self._with_retries(call, lambda: send(call), repeatable=True, retry=NO_RETRY)
        except (Unavailable, DeadlineExceeded) as error:
            if is_from_server(error):
                raise
            return False

    def _call(self, seconds: float | None, what: str, request_id: str = "") -> Call:
        timeout = self._options.timeout if seconds is None else seconds
        return Call(Deadline(timeout, what), request_id_for(request_id), self._options.fields)

    async def _with_retries(
        self, call: Call, attempt: Callable[[], Awaitable[T]], *, repeatable: bool, retry: Retry | None = None
    ) -> T:
        """Retry until an attempt succeeds, the failure is final, or the deadline passes."""
        policy = retry or self._options.retry
        attempts = 0
        while True:
            attempts += 1
            try:
                return await attempt()
            except AttemptFailed as failed:
                error = failed.error
                wait = policy.wait_seconds(attempts, error.retry_after_seconds, self._random.random())
                may_retry = attempts < policy.attempts and policy.should_retry(failed.failure, repeatable=repeatable)
                if not may_retry or not call.deadline.covers(wait):
                    raise with_request_id(error, call.id) from None
            except HeadraceError as error:
                with_request_id(error, call.id)
                raise
            await self._network.sleep(wait)


class ResultStream:
    """The results of one request. The request is never sent again once its first result has arrived."""

    def __init__(self, stream: HttpStream | GrpcStream, call: Call, first: Result | None) -> None:
        self._stream = stream
        self._call = call
        self._first = first
        self._ended = first is None

    async def next(self) -> Result | None:
        """Return the next result; None at the end."""
        if self._ended:
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
        self._ended = result is None
        return result

    def close(self) -> None:
        """Stop the request."""
        self._ended = True
        self._stream.close()
