# SPDX-License-Identifier: Apache-2.0
"""The Python client: numpy in and out, over HTTP or gRPC, blocking or with asyncio.

    from headrace.client import Client

    with Client("http://127.0.0.1:8000") as client:
        result = client.infer("resnet50", {"images": images})
        print(result["scores"].shape)

Requests are written once, as coroutines over a `sockets.Network` or a gRPC channel: `aio` runs them on asyncio, `client` on
blocking sockets. Imports `core` and nothing else of the server, so that it works with any server of the v2 protocol.
"""

from __future__ import annotations

from headrace.client.aio import AsyncClient
from headrace.client.client import Client, Results
from headrace.client.inference import ClassScore, Input, Output, Result, SequenceStep
from headrace.client.retries import NO_RETRY, Retry

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
