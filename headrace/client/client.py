# SPDX-License-Identifier: Apache-2.0
"""The blocking client: the coroutines of `AsyncClient` on blocking sockets. Any number of threads may share one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from headrace.client.aio import AsyncClient, ResultStream
from headrace.client.inference import Inference, Output, Parameters, Result, SequenceStep, build_inference
from headrace.client.retries import DEFAULT_RETRY, Retry
from headrace.client.sockets import BlockingNetwork, run_blocking

P = ParamSpec("P")
T = TypeVar("T")


class _Requests(AsyncClient):
    """An `AsyncClient` whose coroutines never suspend."""

    _network_type = BlockingNetwork

    def stream(self, inference: Inference, seconds: float | None) -> ResultStream:
        """Return the results of a request when the first has arrived."""
        return run_blocking(self._stream(inference, seconds))


def _blocking(
    request: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return a coroutine method of `AsyncClient` as a blocking method: the same arguments and documentation."""

    @functools.wraps(request)
    def run(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(request(self._requests, *args, **kwargs))

    return run


class Client:
    """A server at an address: `http://`, `https://`, `grpc://` or `grpcs://`.

    Every method may raise the classes of `headrace.core.errors`; see `infer`. A timeout is in seconds and covers all
    attempts of a request; `math.inf` means no limit, None the client's default.
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
        """Check the options; connect later.

        Args:
            url: Address of the server.
            timeout: Seconds for each request, all attempts together.
            retry: When a request is sent again; `NO_RETRY` for never.
            verify: For TLS: True for the system's certificate authorities, a path for those of a PEM file; over HTTP also
                False for no check, or an `ssl.SSLContext`.
            cert: For TLS: PEM files of the client's own certificate and its key.
            token: Sent as `Authorization: Bearer`.
            headers: More header fields, or metadata, for each request.
            compression: "gzip" or "deflate" for requests and responses; useful on slow networks only.
        """
        self._requests = _Requests(
            url,
            timeout=timeout,
            retry=retry,
            verify=verify,
            cert=cert,
            token=token,
            headers=headers,
            compression=compression,
        )

    infer = _blocking(AsyncClient.infer)
    live = _blocking(AsyncClient.live)
    ready = _blocking(AsyncClient.ready)
    metadata = _blocking(AsyncClient.metadata)
    config = _blocking(AsyncClient.config)
    statistics = _blocking(AsyncClient.statistics)
    models = _blocking(AsyncClient.models)
    load = _blocking(AsyncClient.load)
    unload = _blocking(AsyncClient.unload)
    close = _blocking(AsyncClient.close)

    def infer_stream(
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
    ) -> Results:
        """Run a request of a model that may return any number of results; iterate over them as they arrive.

        Arguments as in `infer`; the timeout covers the whole stream and is unlimited by default. Over HTTP, inputs and
        results are sent as JSON: text must be UTF-8. To stop early, close the results.
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
        return Results(self._requests.stream(inference, timeout))

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def __repr__(self) -> str:
        """Show the address."""
        return repr(self._requests).removeprefix("Async")


class Results:
    """An iterator of results. `close`, or the end of a `with`, stops the server's work on the request."""

    def __init__(self, results: ResultStream) -> None:
        self._results = results

    def __iter__(self) -> Self:
        """Return the iterator."""
        return self

    def __next__(self) -> Result:
        """Wait for the next result."""
        result = run_blocking(self._results.next())
        if result is None:
            raise StopIteration
        return result

    def close(self) -> None:
        """Stop the request."""
        self._results.close()

    def __enter__(self) -> Self:
        """Return the iterator."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the request."""
        self.close()

    def __del__(self) -> None:
        """Stop the request: its results are no longer used."""
        results = getattr(self, "_results", None)
        if results is not None:
            results.close()
