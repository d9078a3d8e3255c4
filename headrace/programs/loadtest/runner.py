# SPDX-License-Identifier: Apache-2.0
"""Run load on one model of a server: encode the request once, run the loops, read server statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import numpy as np

from headrace.client import NO_RETRY, AsyncClient
from headrace.client.grpc_codec import encode_inference as encode_grpc
from headrace.client.http import model_path, tls_context
from headrace.client.http1 import request_head
from headrace.client.http_codec import HEADER_LENGTH, encode_inference, to_json
from headrace.client.inference import Inference, build_inference
from headrace.client.sockets import Address
from headrace.client.transport import Options, check_options
from headrace.core.clock import SystemClock
from headrace.core.dtypes import BF16, BYTES, bf16_to_float32
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.telemetry.progress import Progress, Reporter, silent
from headrace.core.tensors import Tensor
from headrace.programs.loadtest.connections import GrpcTarget, HttpTarget, Target
from headrace.programs.loadtest.loops import Arrivals, ClosedLoop, OpenLoop, drive
from headrace.programs.loadtest.results import ClientCpu, Recording, RunResults, Statistics, run_results, server_view

ProtocolName = Literal["http", "grpc", "predict"]


def resolve_protocol(address: Address, requested: str) -> ProtocolName:
    """Return the protocol for an address and the one that was requested, "" for any."""
    if requested not in ("", "http", "grpc", "predict"):
        raise InvalidArgument(f"protocol {requested!a} is not known: it is http, grpc or predict")
    if address.is_grpc:
        if requested in ("http", "predict"):
            raise InvalidArgument(f"{address} is an address for gRPC: give http://HOST:8000 for protocol {requested}")
        return "grpc"
    if requested == "grpc":
        raise InvalidArgument(f"{address} is an address for HTTP: give --url grpc://HOST:8001 for protocol grpc")
    return "predict" if requested == "predict" else "http"


def build_target(
    address: Address, protocol: ProtocolName, inference: Inference, options: Options, batched: bool
) -> Target:
    """Return a target. `batched`: whether the first dimension of the model's inputs is the batch."""
    if protocol == "grpc":
        return GrpcTarget(address, encode_grpc(inference), options)
    tls = tls_context(options) if address.secure else None
    if protocol == "predict":
        body = to_json(_predict_body(inference, batched))
        path, fields = f"/predict/{quote(inference.model, safe='')}", [("content-type", "application/json")]
    else:
        length, buffers = encode_inference(inference)
        body = b"".join(buffers)
        path = model_path(inference.model, inference.version) + "/infer"
        fields = [("content-type", "application/octet-stream"), (HEADER_LENGTH, str(length))]
    headers = [("host", address.authority), *options.fields, *fields]
    head = request_head("POST", address.prefix + path, headers, len(body))
    return HttpTarget(address, head + body, tls)


def _predict_body(inference: Inference, batched: bool) -> dict[str, Any]:
    """Return the body of a request to `/predict`: one prediction, or a batch."""
    arrays = {tensor.name: _to_json_array(tensor) for tensor, _ in inference.inputs}
    body: dict[str, Any] = {"model_version": inference.version} if inference.version else {}
    if not batched:
        return body | {"inputs": _row(arrays)}
    rows = {len(array) for array in arrays.values()}
    if len(rows) != 1:
        raise InvalidArgument("the inputs have different numbers of rows: give all of them the same")
    inputs = [_row({name: array[row] for name, array in arrays.items()}) for row in range(rows.pop())]
    return body | ({"inputs": inputs[0]} if len(inputs) == 1 else {"batch": inputs})


def _row(arrays: Mapping[str, Any]) -> Any:
    values = {name: array.tolist() for name, array in arrays.items()}
    return next(iter(values.values())) if len(values) == 1 else values


def _to_json_array(tensor: Tensor) -> Any:
    """Return an array whose `tolist` is JSON."""
    if tensor.dtype is BF16:
        return bf16_to_float32(tensor.array)
    if tensor.dtype is BYTES:
        texts = [element.decode(errors="replace") for element in tensor.array.ravel()]
        return np.array(texts, object).reshape(tensor.shape)
    return tensor.array


@dataclass(frozen=True, slots=True)
class Access:
    """Headers and TLS of the connections to a server."""

    headers: Mapping[str, str]
    verify: str | bool = True
    cert: tuple[str, str] | str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: a closed loop of `concurrency` connections, or an open one of `rate` requests per second."""

    concurrency: int = 16
    rate: float | None = None
    uniform: bool = False
    """In an open loop: send at even intervals instead of randomly (Poisson)."""
    seconds: float = 10.0
    warm_up_seconds: float = 2.0
    timeout_seconds: float = 60.0
    """Longer requests count as failed."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.seconds <= 0 or self.warm_up_seconds < 0 or self.timeout_seconds <= 0:
            raise InvalidArgument("durations must be above 0, and the warm-up not negative")
        if self.rate is None and self.concurrency < 1:
            raise InvalidArgument("a closed loop needs a concurrency of 1 or more")

    @property
    def mode(self) -> Literal["closed", "open"]:
        """The kind of loop."""
        return "closed" if self.rate is None else "open"

    @property
    def name(self) -> str:
        """A name for the output."""
        if self.rate is None:
            return f"{self.concurrency} connection{'s' if self.concurrency != 1 else ''}"
        return f"{self.rate:g} requests/s"


class LoadTest:
    """Sends the same request to one model. Belongs to one event loop."""

    def __init__(
        self,
        url: str,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        protocol: str = "",
        rows: int = 1,
        batched: bool = True,
        access: Access | None = None,
        progress: Progress = silent,
    ) -> None:
        """Encode the request, without connecting.

        Args:
            url: The server: http://, https://, grpc:// or grpcs://.
            model: Name of the model.
            inputs: As for `Client.infer`.
            version: The version; by default the server chooses.
            protocol: "http", "grpc" or "predict"; by default as the address says.
            rows: Number of rows of the inputs, for the report.
            batched: Whether the first dimension of the inputs is the batch; used for `/predict` only.
            access: Header fields and TLS.
            progress: Receives the progress of a run.
        """
        access = access or Access({})
        self._address = Address.parse(url)
        self._protocol = resolve_protocol(self._address, protocol)
        self._options = check_options(
            timeout=60.0,
            retry=NO_RETRY,
            verify=access.verify,
            cert=access.cert,
            token="",
            headers=access.headers,
            compression=None,
        )
        self._inputs = inputs
        self._inference = build_inference(model, inputs, version=version)
        self._batched = batched
        self._rows = rows
        self._progress = progress
        self._client = AsyncClient(
            url, timeout=30.0, verify=access.verify, cert=access.cert, headers=dict(access.headers), retry=NO_RETRY
        )

    @property
    def protocol(self) -> str:
        """The protocol of the requests."""
        return self._protocol

    async def check(self) -> None:
        """Send the request once with the client, whose error names the problem."""
        if self._protocol != "predict":
            await self._client.infer(self._inference.model, self._inputs, version=self._inference.version)

    async def run(self, plan: Plan) -> RunResults:
        """Warm up, measure, and read the server's statistics."""
        target = build_target(self._address, self._protocol, self._inference, self._options, self._batched)
        start_time = time.perf_counter()
        begins = start_time + plan.warm_up_seconds
        recording = Recording(begins, begins + plan.seconds)
        loop: ClosedLoop | OpenLoop
        if plan.rate is None:
            loop = ClosedLoop(target, plan.concurrency, recording)
        else:
            arrivals = Arrivals(plan.rate, uniform=plan.uniform, seed=plan.seed)
            loop = OpenLoop(target, arrivals, recording, start_time=start_time)
        sampler = _CpuSampler(recording)
        before: list[asyncio.Task[Statistics | None]] = []
        total = plan.warm_up_seconds + plan.seconds
        with Reporter(self._progress, SystemClock(), plan.name, total=total) as reporter:

            def on_tick(now: float) -> None:
                sampler.sample(now)
                if now >= begins and not before:
                    before.append(asyncio.create_task(self._statistics()))
                phase = "warming up" if now < begins else "measuring" if now < recording.ends else "last answers"
                reporter.update(done=min(now - start_time, total), message=phase)

            try:
                await drive(loop, recording, plan.timeout_seconds, on_tick)
            finally:
                await target.close()
        return run_results(
            recording,
            mode=plan.mode,
            load=plan.rate or plan.concurrency,
            rows=self._rows,
            cpu=sampler.cpu(),
            server=server_view((await before[0] if before else None) or (), await self._statistics() or ()),
        )

    async def _statistics(self) -> Statistics | None:
        """Return the model's statistics; None if the server has none."""
        try:
            return await self._client.statistics(self._inference.model, version=self._inference.version)
        except HeadraceError:
            return None

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        """Return the test itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the test."""
        await self.close()


class _CpuSampler:
    """Measures the CPU use of the load generator within the window."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._first: tuple[float, float, float] | None = None
        self._last: tuple[float, float, float] | None = None

    def sample(self, now: float) -> None:
        if self._recording.begins <= now:
            times = (now, time.process_time(), time.thread_time())
            self._first = self._first or times
            if now <= self._recording.ends or self._last is None:
                self._last = times

    def cpu(self) -> ClientCpu:
        if self._first is None or self._last is None or self._last[0] <= self._first[0]:
            return ClientCpu(0.0, 0.0)
        wall, process, thread = (after - before for before, after in zip(self._first, self._last, strict=True))
        return ClientCpu(process / wall, thread / wall)
