# SPDX-License-Identifier: Apache-2.0
"""The blocking client. Any number of threads may share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.client import session
from headrace.client.inference import Output, Parameters, Result, SequenceStep, build_inference
from headrace.client.retries import DEFAULT_RETRY, Retry
from headrace.client.session import Session
from headrace.client.sockets import Address, BlockingNetwork, run_blocking
from headrace.client.transport import Options, Transport, check_options


class Client:
    """A server at an address: `http://`, `https://`, `grpc://` or `grpcs://`.

    Every method may raise the classes of `headrace.core.errors`; see `infer`. A timeout is in seconds and covers all
    attempts of a request; `math.inf` is no limit, None the client's own.
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
            compression: "gzip" or "deflate" for requests and answers; useful on slow networks only.
        """
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
        network = BlockingNetwork()
        self._session = Session(self._address, _transport(self._address, network, options), network, options)

    def infer(
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
            Unavailable: No server answers, or the model is not ready.
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
        return run_blocking(self._session.infer(inference, timeout))

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
        return Results(run_blocking(self._session.stream(inference, timeout)))

    def live(self, *, timeout: float | None = None) -> bool:
        """Return whether a server answers. False, not an error, when none does."""
        return run_blocking(self._session.live(timeout))

    def ready(self, model: str = "", *, version: int | str = "", timeout: float | None = None) -> bool:
        """Return whether the server, or one of its models, is ready. False when no server answers."""
        return run_blocking(self._session.ready(model, version, timeout))

    def metadata(self, model: str = "", *, version: int | str = "", timeout: float | None = None) -> dict[str, Any]:
        """Return names, types and shapes of a model's inputs and outputs; without a model, the server's metadata."""
        return run_blocking(self._session.metadata(model, version, timeout))

    def config(self, model: str, *, version: int | str = "", timeout: float | None = None) -> dict[str, Any]:
        """Return a model's configuration, completed by the server."""
        return run_blocking(self._session.config(model, version, timeout))

    def statistics(
        self, model: str = "", *, version: int | str = "", timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the statistics of each version of a model, or of all models."""
        return run_blocking(self._session.statistics(model, version, timeout))

    def models(self, *, ready: bool = False, timeout: float | None = None) -> list[dict[str, str]]:
        """Return every model of the repository: name, version, state and reason; with `ready`, only those that serve."""
        return run_blocking(self._session.models(ready, timeout))

    def load(
        self,
        model: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Load a model, or reload it; return when it serves.

        Args:
            model: Name of the model.
            config: Use this configuration instead of the repository's.
            files: Use these files instead, by their path below the model: {"1/model.onnx": content}.
            timeout: Seconds; an hour by default.
        """
        run_blocking(self._session.load(model, config, files, timeout))

    def unload(self, model: str, *, dependents: bool = False, timeout: float | None = None) -> None:
        """Unload a model; with `dependents`, also the models that only this ensemble uses."""
        run_blocking(self._session.unload(model, dependents, timeout))

    def close(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        run_blocking(self._session.close())

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
        return f"Client('{self._address}')"


class Results:
    """An iterator of results. `close`, or the end of a `with`, stops the server's work on the request."""

    def __init__(self, results: session.Results) -> None:
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
        """Stop the request: nothing uses its results any more."""
        results = getattr(self, "_results", None)
        if results is not None:
            results.close()


def _transport(address: Address, network: BlockingNetwork, options: Options) -> Transport:
    if address.is_grpc:
        from headrace.client.grpc import GrpcTransport

        return GrpcTransport(address, options, is_async=False)
    from headrace.client.http import HttpTransport

    return HttpTransport(address, network, options)
