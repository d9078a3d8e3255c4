# SPDX-License-Identifier: Apache-2.0
"""Requests over gRPC by grpcio, as bytes that are encoded once. Made by `targets`.

Lanes share connections above a number: HTTP/2 carries many requests on one, but a server of several processes gives each
connection to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from typing import Any

from headrace.client.addresses import Address
from headrace.client.transport import Options
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.programs.loadtest.lanes import NO_CONNECTION, TIMED_OUT, Done

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_MOST_CHANNELS = 64
_AGAIN_SECONDS = 0.05
_CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A connection for each channel, not one for all that are configured alike.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class GrpcTarget:
    """See `lanes.Target`. `message` is a ModelInferRequest."""

    def __init__(self, address: Address, message: bytes, options: Options) -> None:
        try:
            self.grpc: Any = importlib.import_module("grpc")
        except ImportError:
            raise FailedPrecondition(
                "gRPC needs grpcio, which is not installed: pip install 'headrace[grpc]', or use http://"
            ) from None
        self.message = message
        self.metadata = options.fields
        self._address = address
        self._credentials = _credentials(self.grpc, options) if address.secure else None
        self._channels: list[Any] = []
        self._lanes: list[GrpcLane] = []

    def lane(self) -> GrpcLane:
        """See `Target.lane`."""
        if len(self._channels) < _MOST_CHANNELS:
            self._channels.append(self._channel())
        channel = self._channels[len(self._lanes) % len(self._channels)]
        self._lanes.append(GrpcLane(self, channel.unary_unary(_METHOD)))
        return self._lanes[-1]

    def _channel(self) -> Any:
        target, options = self._address.authority, list(_CHANNEL)
        if self._credentials is not None:
            return self.grpc.aio.secure_channel(target, self._credentials, options=options)
        return self.grpc.aio.insecure_channel(target, options=options)

    async def close(self) -> None:
        """See `Target.close`."""
        tasks = [lane.task for lane in self._lanes if lane.task is not None]
        for lane in self._lanes:
            lane.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


class GrpcLane:
    """See `lanes.Lane`."""

    def __init__(self, target: GrpcTarget, method: Any) -> None:
        self._target = target
        self._method = method
        self._loop = asyncio.get_running_loop()
        self._done: Done | None = None
        self._sent = 0.0
        self.task: asyncio.Task[None] | None = None
        """The request under way."""

    def ask(self, done: Done) -> None:
        """See `Lane.ask`."""
        self._done = done
        self._sent = time.perf_counter()
        self.task = self._loop.create_task(self._work())

    def expire(self, before: float) -> None:
        """See `Lane.expire`."""
        if self._done is not None and self._sent < before:
            done = self._done
            self.close()
            done(TIMED_OUT, "no answer came in time")

    def close(self) -> None:
        """See `Lane.close`."""
        self._done = None
        task, self.task = self.task, None
        if task is not None:
            task.cancel()

    async def _work(self) -> None:
        kind = text = ""
        try:
            await self._method(self._target.message, metadata=self._target.metadata)
        except self._target.grpc.RpcError as error:
            kind, text = f"gRPC {error.code().name}", error.details() or ""
            if kind == "gRPC UNAVAILABLE" and "connect" in text.lower():
                kind = NO_CONNECTION
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(_AGAIN_SECONDS)
        done, self._done = self._done, None
        if done is not None:
            done(kind, text)


def _credentials(grpc: Any, options: Options) -> Any:
    if isinstance(options.cert, str):
        raise InvalidArgument("gRPC needs both --cert and --key")
    try:
        authority = _content(options.verify) if isinstance(options.verify, str) else None
        chain, key = (None, None) if options.cert is None else map(_content, options.cert)
    except OSError as error:
        raise InvalidArgument(f"{error.filename}: {error.strerror}; see --ca, --cert and --key") from None
    return grpc.ssl_channel_credentials(authority, key, chain)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
