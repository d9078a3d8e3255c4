# SPDX-License-Identifier: Apache-2.0
"""The blocking client. One may be shared by any number of threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.client import session
from headrace.client.addresses import Address
from headrace.client.blocking import BlockingLines, to_end
from headrace.client.requests import Output, Parameters, SequenceStep, inference_of
from headrace.client.results import Result
from headrace.client.retrying import DEFAULT_RETRY, Retry
from headrace.client.session import Session
from headrace.client.transport import Options, Transport, options_of


class Client:
    """A server at an address: `http://`, `https://`, `grpc://` or `grpcs://`.

    Every method may raise the classes of `headrace.core.errors`; see `infer`. A timeout is in seconds and is for all
    tries together; `math.inf` is no limit, None the client's own.
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
        """Connect to nothing yet.

        Args:
            url: Where the server is.
            timeout: Seconds for each request, all its tries together.
            retry: When a request is sent again; `NO_RETRY` for never.
            verify: For TLS: True for the system's authorities, a path for those of a PEM file; over HTTP also False for
                no check, or an `ssl.SSLContext`.
            cert: For TLS: PEM files of the client's own certificate and its key.
            token: Sent as `Authorization: Bearer`.
            headers: More header fields, or metadata, for each request.
            compression: "gzip" or "deflate" for requests and answers; worth it on slow networks only.
        """
        options = options_of(
            timeout=timeout,
            retry=retry,
            verify=verify,
            cert=cert,
            token=token,
            headers=headers,
            compression=compression,
        )
        self._address = Address.parse(url)
        lines = BlockingLines()
        self._session = Session(self._address, _transport(self._address, lines, options), lines, options)

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
        """Compute one request.

        Args:
            model: Name of the model.
            inputs: Arrays by name. Text is lists of str or bytes; `Input` says what an array cannot.
            outputs: Names of the outputs that are wanted, or `Output` for classes; none for all.
            version: One version; the newest unless told.
            parameters: For the model and the scheduler.
            timeout: Seconds for this request, all its tries together.
            request_id: Comes back with the result, and is in the server's log.
            sequence: Which sequence this request belongs to, for models with a memory.
            priority: For models with levels of priority; 1 is the highest.

        Raises:
            InvalidArgument: The request is wrong; the message says how.
            NotFound: There is no such model or version.
            DeadlineExceeded: The timeout passed.
            Unavailable: Nothing answers there, or the model is not ready.
            HeadraceError: Base of these and of all others. `request_id` and `status` say where it came from.
        """
        inference = inference_of(
            model,
            inputs,
            outputs=outputs,
            version=version,
            parameters=parameters,
            request_id=request_id,
            sequence=sequence,
            priority=priority,
        )
        return to_end(self._session.infer(inference, timeout))

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
        """Compute a request of a model that may give any number of results; iterate over them as they come.

        Arguments as in `infer`; the timeout is for the whole stream, with no limit unless given. Over HTTP, inputs and
        results travel as JSON: text must be UTF-8. Leaving early: close the results, or let go of them.
        """
        inference = inference_of(
            model,
            inputs,
            outputs=outputs,
            version=version,
            parameters=parameters,
            request_id=request_id,
            sequence=sequence,
            priority=priority,
        )
        return Results(to_end(self._session.stream(inference, timeout)))

    def live(self, *, timeout: float | None = None) -> bool:
        """Whether a server answers. False, and no error, when nothing does."""
        return to_end(self._session.live(timeout))

    def ready(self, model: str = "", *, version: int | str = "", timeout: float | None = None) -> bool:
        """Whether the server, or one model of it, would serve requests now. False when nothing answers."""
        return to_end(self._session.ready(model, version, timeout))

    def metadata(self, model: str = "", *, version: int | str = "", timeout: float | None = None) -> dict[str, Any]:
        """Names, types and shapes of a model's inputs and outputs; without a model, what the server is."""
        return to_end(self._session.metadata(model, version, timeout))

    def config(self, model: str, *, version: int | str = "", timeout: float | None = None) -> dict[str, Any]:
        """A model's configuration, completed by the server."""
        return to_end(self._session.config(model, version, timeout))

    def statistics(
        self, model: str = "", *, version: int | str = "", timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """What each version of a model, or of all models, has done."""
        return to_end(self._session.statistics(model, version, timeout))

    def models(self, *, ready: bool = False, timeout: float | None = None) -> list[dict[str, str]]:
        """Every model of the repository: name, version, state and reason; with `ready`, only those that serve."""
        return to_end(self._session.models(ready, timeout))

    def load(
        self,
        model: str,
        *,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Load a model, or load it anew; returns when it serves.

        Args:
            model: Name of the model.
            config: Use this configuration instead of the repository's.
            files: Use these files instead, by their path below the model: {"1/model.onnx": content}.
            timeout: Seconds; an hour unless told.
        """
        to_end(self._session.load(model, config, files, timeout))

    def unload(self, model: str, *, dependents: bool = False, timeout: float | None = None) -> None:
        """Stop serving a model; with `dependents`, also the models that an ensemble uses and nobody else does."""
        to_end(self._session.unload(model, dependents, timeout))

    def close(self) -> None:
        """End all connections. The client is of no use afterwards."""
        to_end(self._session.close())

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Where it points."""
        return f"Client('{self._address}')"


class Results:
    """Results as they come: an iterator. `close`, or the end of a `with`, stops the server's work on it."""

    def __init__(self, results: session.Results) -> None:
        self._results = results

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def __next__(self) -> Result:
        """Wait for the next one."""
        result = to_end(self._results.next())
        if result is None:
            raise StopIteration
        return result

    def close(self) -> None:
        """Leave the rest."""
        self._results.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def __del__(self) -> None:
        """Who lets go of it wants no more."""
        results = getattr(self, "_results", None)
        if results is not None:
            results.close()


def _transport(address: Address, lines: BlockingLines, options: Options) -> Transport:
    if address.is_grpc:
        from headrace.client.grpc import GrpcTransport

        return GrpcTransport(address, options, with_loop=False)
    from headrace.client.http import HttpTransport

    return HttpTransport(address, lines, options)
