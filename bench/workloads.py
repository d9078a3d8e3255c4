# SPDX-License-Identifier: Apache-2.0
"""The table of workloads, read by everything else in this folder: what is sent, to which model, by how many.

Each server gets the same numbers; only dialects.py knows how they are spelled as bytes.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Transport = Literal["http", "grpc"]
Encoding = Literal["json", "binary", "grpc"]


@dataclass(frozen=True)
class Workload:
    """One kind of request, repeated by a fixed number of connections with one request in flight on each."""

    name: str
    what: str
    transport: Transport
    encoding: Encoding
    model: str
    shape: tuple[int, ...]
    connections: int
    client_threads: int = 1

    def numbers(self) -> np.ndarray:
        """The input tensor: always the same numbers for the same shape."""
        return np.random.default_rng(1).random(self.shape, dtype=np.float32)

    def expected(self) -> np.ndarray:
        """What a correct server must answer, flattened."""
        flat = self.numbers().ravel()
        return flat[:1000] if self.model == "first1000" else flat


SMALL = (1, 16)
IMAGE = (1, 3, 224, 224)

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("json16", "16 floats as JSON", "http", "json", "identity", SMALL, 16),
        Workload("binary16", "16 floats as a binary tensor over HTTP", "http", "binary", "identity", SMALL, 16),
        Workload("grpc16", "16 floats over gRPC", "grpc", "grpc", "identity", SMALL, 16),
        Workload("binary600k", "a 602,112-byte binary tensor over HTTP", "http", "binary", "first1000", IMAGE, 8),
        Workload("grpc600k", "a 602,112-byte tensor over gRPC", "grpc", "grpc", "first1000", IMAGE, 8),
        # Wider than json16, so that the load generator, on the same cores, is a small part of the work.
        Workload(
            "processes", "2,048 floats as JSON, by 1 and by 2 processes", "http", "json", "identity", (1, 2048), 32, 1
        ),
    )
}
