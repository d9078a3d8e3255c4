# SPDX-License-Identifier: Apache-2.0
"""The v2 protocol over gRPC, on grpcio, blocking or with asyncio.

grpcio is imported when a client needs it. A blocking channel may be used from any thread; an asyncio channel belongs to its
event loop, so it is opened by the first call.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import threading
from collections.abc import Mapping
from typing import Any

from headrace.client.errors import connection_error, grpc_error, retry_after_seconds
from headrace.client.grpc_codec import decode_result, encode_inference, message, message_to_dict, parse
from headrace.client.inference import Inference, Result
from headrace.client.retries import AttemptFailed, Failure
from headrace.client.sockets import Address
from headrace.client.transport import Call, Options
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unimplemented
from headrace.core.extras import MissingExtra
from headrace.core.names import REQUEST_ID_FIELD

_SERVICE = "/inference.GRPCInferenceService/"
_STATUS_METADATA = ("triton_grpc_error", "true")
"""Metadata that requests stream errors as a gRPC status; without it they are texts only."""
_NO_CONNECTION = re.compile("failed to connect|DNS resolution failed|Name resolution failure", re.IGNORECASE)
_BROKEN = re.compile(
    "socket closed|connection reset|broken pipe|recvmsg|sendmsg|stream removed|goaway|endpoint clos|transport clos",
    re.IGNORECASE,
)
_METADATA_NAME = re.compile(r"[a-z0-9_.-]+(?<!-bin)")
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*")
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # The client retries by itself: during grpcio's back-off its attempts would fail without a connection attempt.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection of its own, not one shared by all clients of the process with the same options.
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcTransport:
    """Sends requests over gRPC. Methods raise `AttemptFailed`, or a `HeadraceError` that is final."""

    def __init__(self, address: Address, options: Options, *, is_async: bool) -> None:
        _check_metadata(options)
        self._grpc = import_grpc()
        self._address = address
        self._options = options
        self._is_async = is_async
        self._credentials = channel_credentials(self._grpc, address, options)
        self._current: Any = None
        self._loop: Any = None
        self._lock = threading.Lock()
        self._closed = False

    async def infer(self, inference: Inference, call: Call) -> Result:
        """Run a request."""
        response = await self._send("ModelInfer", encode_inference(inference), call)
        return decode_result(response, inference.id or call.id)

    async def stream(self, inference: Inference, call: Call) -> GrpcStream:
        """Run a request with any number of results."""
        request = encode_inference(inference)
        method = self._channel().stream_stream(_SERVICE + "ModelStreamInfer")
        options = self._call_options(call)
        options["metadata"] = (*options["metadata"], _STATUS_METADATA)
        if not self._is_async:
            return GrpcStream(self, method(iter((request,)), **options), inference, call)
        rpc = method(**options)
        stream = GrpcStream(self, rpc, inference, call)
        try:
            await rpc.write(request)
            await rpc.done_writing()
        except self._grpc.RpcError as error:
            raise self.error_for(error, call) from None
        except self._grpc.aio.UsageError:
            pass  # The call ended before it was read; reading raises the reason.
        except BaseException:
            stream.close()
            raise
        return stream

    async def live(self, call: Call) -> bool:
        """Return whether the server responds."""
        return bool((await self._request("ServerLive", call)).live)

    async def ready(self, call: Call, model: str, version: str) -> bool:
        """Return whether the server, or a model, is ready."""
        if not model:
            return bool((await self._request("ServerReady", call)).ready)
        return bool((await self._request("ModelReady", call, name=model, version=version)).ready)

    async def metadata(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Return the metadata of a model, or of the server."""
        if not model:
            return message_to_dict(await self._request("ServerMetadata", call))
        return message_to_dict(await self._request("ModelMetadata", call, name=model, version=version))

    async def config(self, call: Call, model: str, version: str) -> dict[str, Any]:
        """Return a model's configuration."""
        return message_to_dict((await self._request("ModelConfig", call, name=model, version=version)).config)

    async def statistics(self, call: Call, model: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of each version."""
        response = await self._request("ModelStatistics", call, name=model, version=version)
        return [message_to_dict(statistics) for statistics in response.model_stats]

    async def index(self, call: Call, ready: bool) -> list[dict[str, str]]:
        """Return the models of the repository."""
        return [message_to_dict(entry) for entry in (await self._request("RepositoryIndex", call, ready=ready)).models]

    async def load(self, call: Call, model: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model."""
        request = message("RepositoryModelLoadRequest")(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = config
        for path, content in files.items():
            request.parameters[f"file:{path}"].bytes_param = content
        await self._send("RepositoryModelLoad", request.SerializeToString(), call)

    async def unload(self, call: Call, model: str, dependents: bool) -> None:
        """Unload a model."""
        request = message("RepositoryModelUnloadRequest")(model_name=model)
        request.parameters["unload_dependents"].bool_param = dependents
        await self._send("RepositoryModelUnload", request.SerializeToString(), call)

    async def close(self) -> None:
        """Close the channel."""
        with self._lock:
            self._closed = True
            channel, self._current = self._current, None
        if channel is not None:
            closed = channel.close()
            if self._is_async:
                await closed

    async def _request(self, method: str, call: Call, **fields: Any) -> Any:
        return await self._send(method, message(f"{method}Request")(**fields).SerializeToString(), call)

    async def _send(self, method: str, request: bytes, call: Call) -> Any:
        try:
            response = self._channel().unary_unary(_SERVICE + method)(request, **self._call_options(call))
            if self._is_async:
                response = await response
        except self._grpc.RpcError as error:
            raise self.error_for(error, call) from None
        return parse(f"{method}Response", response)

    def _channel(self) -> Any:
        with self._lock:
            if self._closed:
                raise FailedPrecondition("this client is closed: make a new one")
            loop = asyncio.get_running_loop() if self._is_async else None
            if self._current is None or self._loop is not loop:
                self._loop = loop
                module = self._grpc.aio if self._is_async else self._grpc
                self._current = open_channel(module, self._address, self._credentials)
            return self._current

    def _call_options(self, call: Call) -> dict[str, Any]:
        compression = self._grpc.Compression
        algorithms = {"gzip": compression.Gzip, "deflate": compression.Deflate}
        return {
            "timeout": call.deadline.left(),
            "metadata": (*call.fields, (REQUEST_ID_FIELD, call.id)),
            "compression": algorithms.get(self._options.compression),
        }

    def error_for(self, error: Any, call: Call) -> HeadraceError | AttemptFailed:
        """Return the error of a failed call."""
        code, text = error.code().name, error.details() or ""
        if code == "DEADLINE_EXCEEDED":
            try:
                call.deadline.left()
            except HeadraceError as deadline_error:
                return deadline_error
        trailers = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
        request_id = trailers.get(REQUEST_ID_FIELD) or call.id
        if code == "UNAVAILABLE" and _NO_CONNECTION.search(text):
            return AttemptFailed(connection_error(self._address, OSError(text), connecting=True), Failure.UNSENT)
        if code in ("UNAVAILABLE", "INTERNAL") and _BROKEN.search(text):
            return AttemptFailed(connection_error(self._address, OSError(text)), Failure.LOST)
        retry_after = retry_after_seconds(trailers.get("retry-after"))
        failure = grpc_error(code, text or f"the server ends the call with {code}", request_id, retry_after)
        if code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and retry_after is not None:
            return AttemptFailed(failure, Failure.RETRY_LATER)
        return failure

    async def read(self, rpc: Any, call: Call) -> bytes | None:
        """Return the next message of a stream; None at its end."""
        try:
            if not self._is_async:
                message_bytes: bytes | None = next(rpc, None)
                return message_bytes
            data = await rpc.read()
        except self._grpc.RpcError as error:
            raise self.error_for(error, call) from None
        return None if data is self._grpc.aio.EOF else data


class GrpcStream:
    """The results of a streaming call."""

    def __init__(self, transport: GrpcTransport, rpc: Any, inference: Inference, call: Call) -> None:
        self._transport = transport
        self._rpc = rpc
        self._inference = inference
        self._call = call

    async def next(self) -> Result | None:
        """Return the next result; None at the end."""
        data = await self._transport.read(self._rpc, self._call)
        if data is None:
            return None
        response = parse("ModelStreamInferResponse", data)
        if response.error_message:
            raise grpc_error("UNKNOWN", response.error_message, self._call.id)
        return decode_result(response.infer_response, self._inference.id or self._call.id)

    def close(self) -> None:
        """Cancel the call."""
        self._rpc.cancel()


def import_grpc() -> Any:
    """Import grpcio."""
    try:
        return importlib.import_module("grpc")
    except ImportError:
        raise MissingExtra("grpc://", "grpc", "use http://") from None


def _check_metadata(options: Options) -> None:
    for name, value in options.fields:
        if not _METADATA_NAME.fullmatch(name) or name.startswith("grpc-") or not _METADATA_VALUE.fullmatch(value):
            raise InvalidArgument(f"header {name!a} has a name or value that gRPC cannot carry")


def open_channel(module: Any, address: Address, credentials: Any) -> Any:
    """Open a channel of `grpc` or `grpc.aio`; `credentials` come from `channel_credentials`."""
    if credentials is None:
        return module.insecure_channel(address.authority, options=_CHANNEL_OPTIONS)
    return module.secure_channel(address.authority, credentials, options=_CHANNEL_OPTIONS)


def channel_credentials(grpc: Any, address: Address, options: Options) -> Any:
    """Return the credentials for TLS; None for an address without TLS."""
    if not address.secure:
        return None
    if options.verify is not True and not isinstance(options.verify, str):
        raise Unimplemented("gRPC always checks the server's certificate: give its authority with verify='ca.pem'")
    if isinstance(options.cert, str):
        raise InvalidArgument("gRPC needs cert=('cert.pem', 'key.pem')")
    try:
        authority = _read_file(options.verify) if isinstance(options.verify, str) else None
        chain, key = (None, None) if options.cert is None else map(_read_file, options.cert)
    except OSError as error:
        raise InvalidArgument(f"{error.filename}: {error.strerror}; see verify= and cert=") from None
    return grpc.ssl_channel_credentials(authority, key, chain)


def _read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
