# SPDX-License-Identifier: Apache-2.0
"""The asyncio client. It belongs to the event loop that first uses it; any number of tasks may share it."""

# ruff: noqa: ASYNC109 - a timeout here covers all tries, and is the same argument as in `Client`

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.client.asyncio_sockets import AsyncNetwork
from headrace.client.inference import Output, Parameters, Result, SequenceStep, build_inference
from headrace.client.retries import DEFAULT_RETRY, Retry
from headrace.client.session import Session
from headrace.client.sockets import Address
from headrace.client.transport import Options, Transport, check_options


class AsyncClient:
    """`Client` with coroutines: the same arguments, results and errors.

    Cancelling a task cancels its request: the connection is closed, or the call cancelled, and the server stops working
    on it.
    """

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
        """See `Client`. Connects to nothing yet."""
        options = check_options(
            timeout=timeout,
            retry=retry,
            verify=verify,
            cert=cert,
            token=token,
            headers=headers,
            compression=compression,
        )
        self._address = Address.parse(url)
        network = AsyncNetwork()
        self._session = Session(self._address, _transport(self._address, network, options), network, options)

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
        """Run one request; see `Client.infer`."""
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
        return await self._session.infer(inference, timeout)

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
        results = await self._session.stream(inference, timeout)
        try:
            while (result := await results.next()) is not None:
                yield result
        finally:
            results.close()

    async def live(self, *, timeout: float | None = None) -> bool:
        """See `Client.live`."""
        return await self._session.live(timeout)

    async def ready(self, model: str = "", *, version: int | str = "", timeout: float | None = None) -> bool:
        """See `Client.ready`."""
        return await self._session.ready(model, version, timeout)

    async def metadata(
        self, model: str = "", *, version: int | str = "", timeout: float | None = None
    ) -> dict[str, Any]:
        """See `Client.metadata`."""
        return await self._session.metadata(model, version, timeout)

    async def config(self, model: str, *, version: int | str = "", timeout: float | None = None) -> dict[str, Any]:
        """See `Client.config`."""
        return await self._session.config(model, version, timeout)

    async def statistics(
        self, model: str = "", *, version: int | str = "", timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """See `Client.statistics`."""
        return await self._session.statistics(model, version, timeout)

    async def models(self, *, ready: bool = False, timeout: float | None = None) -> list[dict[str, str]]:
        """See `Client.models`."""
        return await self._session.models(ready, timeout)

    async def load(
        self,
        model: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """See `Client.load`."""
        await self._session.load(model, config, files, timeout)

    async def unload(self, model: str, *, dependents: bool = False, timeout: float | None = None) -> None:
        """See `Client.unload`."""
        await self._session.unload(model, dependents, timeout)

    async def close(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        await self._session.close()

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


def _transport(address: Address, network: AsyncNetwork, options: Options) -> Transport:
    if address.is_grpc:
        from headrace.client.grpc import GrpcTransport

        return GrpcTransport(address, options, is_async=True)
    from headrace.client.http import HttpTransport

    return HttpTransport(address, network, options)
