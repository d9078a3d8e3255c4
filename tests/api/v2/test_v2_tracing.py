# SPDX-License-Identifier: Apache-2.0
"""The span of an infer request says how its batch came about, however the request went through the engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from headrace.api.v2.trace import infer_traced
from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.telemetry.tracing import Tracer
from headrace.core.tensors import Tensor
from headrace.models.config.types import DynamicBatching, InputSpec, OutputSpec
from headrace.net.http.heads import RequestHead
from support.engines import RecordingCaller, config_of, serving_plane


class RecordedSpan:
    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.ends: list[str] = []

    def set(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def end(self, failure: str = "") -> None:
        self.ends.append(failure)


class RecordingTracer:
    enabled = True

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def start(self, name: str, parent: Any = None) -> RecordedSpan:
        self.spans.append(RecordedSpan())
        return self.spans[-1]


class NoHeaders:
    def get(self, name: bytes) -> None:
        return None


def traced(plane: Any, request: InferRequest) -> tuple[RecordedSpan, RecordingCaller]:
    tracer, asked = RecordingTracer(), RecordingCaller()
    infer_traced(plane, cast("Tracer", tracer), cast("RequestHead", NoHeaders()), request, asked)
    return tracer.spans[0], asked


@pytest.mark.parametrize(
    ("scheduling", "reason"), [(None, "one at a time"), (DynamicBatching(), "idle instance")], ids=["alone", "batching"]
)
def test_the_span_describes_the_batch(scheduling: DynamicBatching | None, reason: str) -> None:
    config = config_of(
        "model",
        inputs=(InputSpec("INPUT0", FP32, (2,)),),
        outputs=(OutputSpec("OUTPUT0", FP32, (2,)),),
        scheduling=scheduling,
    )

    async def main() -> None:
        async with serving_plane([(config, lambda inputs: {"OUTPUT0": inputs["INPUT0"]})]) as plane:
            request = InferRequest("model", [Tensor.of("INPUT0", np.zeros((1, 2), np.float32))], id="7")
            span, asked = traced(plane, request)
            assert isinstance(await asked.answer(), InferResponse)
            assert f"1 row(s) of 1 request(s) on model_0_cpu: {reason}" in span.facts.pop("batch")
            assert span.facts == {"model": "model", "request_id": "7", "version": "1"}
            assert span.ends == [""]

    asyncio.run(main())


def test_the_span_of_a_refused_request_ends_with_the_reason() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("model"), lambda inputs: inputs)]) as plane:
            tracer = RecordingTracer()
            with pytest.raises(InvalidArgument):
                infer_traced(
                    plane,
                    cast("Tracer", tracer),
                    cast("RequestHead", NoHeaders()),
                    InferRequest("model", []),
                    lambda _: None,
                )
            assert tracer.spans[0].ends == ["InvalidArgument"]

    asyncio.run(main())
