# SPDX-License-Identifier: Apache-2.0
"""The Python client: numpy in and out, over HTTP or gRPC, blocking or with asyncio.

    from headrace.client import Client

    with Client("http://127.0.0.1:8000") as client:
        result = client.infer("resnet50", {"images": images})
        print(result["scores"].shape)

Everything that asks is written once, as coroutines over a `lines.Lines` or a gRPC channel: `client` drives them with
blocking sockets, `aio` with asyncio. `session` is what both share: deadlines and repeated tries. `http` and `grpc` speak
one protocol each. Knows `core` and nothing else of the server, so that it speaks to any server of the v2 protocol.
"""

from __future__ import annotations

from headrace.client.aio import AsyncClient
from headrace.client.client import Client, Results
from headrace.client.requests import Input, Output, SequenceStep
from headrace.client.results import ClassScore, Result
from headrace.client.retrying import NO_RETRY, Retry

__all__ = [
    "NO_RETRY",
    "AsyncClient",
    "ClassScore",
    "Client",
    "Input",
    "Output",
    "Result",
    "Results",
    "Retry",
    "SequenceStep",
]
