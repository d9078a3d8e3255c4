# SPDX-License-Identifier: Apache-2.0
"""Verify a server before and after each measurement: one real request, whose numbers must be right.

h2load takes HTTP status 200 for success whatever grpc-status says, so without this a server that refuses
every request would look fast.
"""

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import numpy as np

from bench.dialects import GRPC_PATH, GRPC_PREFIX_BYTES, Request, request_for
from bench.errors import BenchError
from bench.workloads import Workload

REQUEST_TIMEOUT_SECONDS = 10
# Looser than exact because some servers print a float32 as a double with rounding of their own.
RELATIVE_TOLERANCE = 1e-6


def verified_response_bytes(workload: Workload, request: Request, port: int) -> int:
    """Send the request once, check every number of the answer, return the answer's size in bytes."""
    if workload.transport == "grpc":
        body, headers = _ask_grpc(request, port)
        size = len(body) + GRPC_PREFIX_BYTES
    else:
        body, headers = ask_http(request, port)
        size = len(body)
    check_answer(workload, request, body, headers)
    return size


def check_answer(workload: Workload, request: Request, body: bytes, headers: dict[str, str]) -> None:
    """Refuse an answer that cannot be read or has a wrong number."""
    try:
        numbers = request.decode(body, headers)
    except Exception as error:
        raise BenchError(f"the answer cannot be read: {error!r}; it begins {body[:200]!r}") from error
    check_numbers(workload, numbers)


def check_numbers(workload: Workload, numbers: np.ndarray) -> None:
    """Refuse wrong numbers."""
    expected = workload.expected()
    if numbers.shape != expected.shape:
        raise BenchError(f"the answer has {numbers.size} numbers instead of {expected.size}")
    if not np.allclose(numbers, expected, rtol=RELATIVE_TOLERANCE, atol=workload.tolerance):
        raise BenchError(f"the answer has wrong numbers: {numbers[:4]} instead of {expected[:4]}")


def verify_crowd(workload: Workload, dialect: str, port: int) -> None:
    """Send a different request on each connection, all at once: a batch cut apart wrongly mixes the answers up."""
    crowd = [replace(workload, seed=1000 + number) for number in range(workload.connections)]
    with ThreadPoolExecutor(len(crowd)) as threads:
        sizes = [
            threads.submit(verified_response_bytes, workload, request_for(workload, dialect), port)
            for workload in crowd
        ]
        for size in sizes:
            size.result()


def ask_http(request: Request, port: int) -> tuple[bytes, dict[str, str]]:
    """Send the request once; the body and the headers of the answer."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{request.path}", data=request.body, headers=request.headers, method="POST"
    )
    try:
        with urllib.request.urlopen(asked, timeout=REQUEST_TIMEOUT_SECONDS) as answer:
            return answer.read(), {name.lower(): value for name, value in answer.headers.items()}
    except urllib.error.HTTPError as error:
        raise BenchError(f"HTTP {error.code}: {error.read()[:300]!r}") from error
    except OSError as error:
        raise BenchError(f"no answer: {error}") from error


def _ask_grpc(request: Request, port: int) -> tuple[bytes, dict[str, str]]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(GRPC_PATH, request_serializer=None, response_deserializer=None)
        try:
            return call(request.body[GRPC_PREFIX_BYTES:], timeout=REQUEST_TIMEOUT_SECONDS), {}
        except grpc.RpcError as error:
            raise BenchError(f"gRPC {error.code().name}: {error.details()}") from error
