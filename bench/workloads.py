# SPDX-License-Identifier: Apache-2.0
"""The table of workloads: what is sent, to which model, over how many connections.

Each server gets the same numbers; only dialects.py knows how they are spelled as bytes.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from bench import mlp, resnet50
from bench.formats import FOREST, FORESTS, FORMATS, RESNET50, Format
from bench.formats.files import forest_answer

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
    # By how much a right answer may differ beyond the rounding of its own text: for models that add numbers up.
    tolerance: float = 0.0
    # Whether different requests, sent at the same time, are checked to get each its own answer.
    checks_crowd: bool = False
    input_name: str = "INPUT0"
    # Whether an answer takes so long that only whole requests are counted; see steady.py.
    is_slow: bool = False
    # Whether it is measured for how long requests take: by h2load, which tells the time of each. wrk adds to its
    # percentiles requests that it never sent, for the time that it waited ("coordinated omission"), and the more of
    # them the quicker the server is otherwise.
    is_timed: bool = False
    # How much longer than the others this one is measured.
    times_longer: int = 1
    seed: int = 1

    def numbers(self) -> np.ndarray:
        """The input tensor: always the same numbers for the same shape and seed."""
        return _numbers(self.shape, self.seed)

    def expected(self) -> np.ndarray:
        """What a correct server must answer, flattened."""
        if self.model in NETWORKS:
            return mlp.answer(self.numbers(), NETWORKS[self.model]).ravel()
        if self.model == RESNET50:
            return _resnet50_answer(self.shape, self.seed)
        if self.model == FOREST:
            return _forest_answer(self.name)
        flat = self.numbers().ravel()
        return flat[:1000] if self.model == "first1000" else flat


SMALL = (1, 16)
IMAGE = (1, 3, 224, 224)
MLP_TOLERANCE = 1e-4  # the numbers are around 1, sums of 256 products in single precision
FOREST_TOLERANCE = 1e-4  # of a thousand numbers and more in single precision
RESNET50_TOLERANCE = 1e-3  # the numbers are around 3, and those of two images differ by 0.07
# Not a load but its absence; see idle.py and memory.py.
IDLE, IDLE_MEMORY = "idle", "idle-memory"
# The start of a process; see start.py.
START = "start"
# More than a server can do; see overload.py.
OVERLOAD = "overload"
# How many requests the overloaded server takes on at once before it refuses more.
MAX_IN_FLIGHT = 16
PREDICT_MODEL, SLOW_MODEL = "predict_mlp", "predict_slow"
NETWORKS = {"mlp": mlp.WIDTHS, PREDICT_MODEL: mlp.PREDICT_WIDTHS, SLOW_MODEL: mlp.SLOW_WIDTHS}


def _mlp(name: str, transport: Transport, encoding: Encoding, description: str) -> Workload:
    return Workload(
        name, description, transport, encoding, "mlp", SMALL, 64, tolerance=MLP_TOLERANCE, checks_crowd=True
    )


def _alone(name: str, transport: Transport, encoding: Encoding, description: str) -> Workload:
    return Workload(name, description, transport, encoding, "identity_one", SMALL, 16)


def _resnet50(name: str, kind: Format, connections: int, description: str, **more: Any) -> Workload:
    return Workload(
        name, f"{description} ({kind.name})", "http", "binary", RESNET50, (1, *kind.image), connections,
        tolerance=RESNET50_TOLERANCE, input_name=kind.input_name, is_slow=True, **more,
    )  # fmt: skip


def _forest(kind: Format) -> Workload:
    description = f"load 100 MB of trees that were checked before, and ask once ({kind.name})"
    return Workload(
        f"load-100mb-{kind.name}", description, "http", "binary", FOREST, (1, *kind.image), 1,
        tolerance=FOREST_TOLERANCE, input_name=kind.input_name,
    )  # fmt: skip


def _numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


# Takes seconds, and is asked for before and after each measurement.
@cache
def _resnet50_answer(shape: tuple[int, ...], seed: int) -> np.ndarray:
    images = _numbers(shape, seed)
    return resnet50.answer(images if shape == IMAGE else images.transpose(0, 3, 1, 2)).ravel()


@cache
def _forest_answer(loading: str) -> np.ndarray:
    return np.array([forest_answer(FORESTS[loading.rpartition("-")[2]])], dtype=np.float32)


_SIXTEEN = (
    Workload("json16", "16 floats as JSON", "http", "json", "identity", SMALL, 16),
    Workload("binary16", "16 floats as a binary tensor over HTTP", "http", "binary", "identity", SMALL, 16),
    Workload("grpc16", "16 floats over gRPC", "grpc", "grpc", "identity", SMALL, 16),
)
# The same by 1, 16 and 64 connections: how long the slowest wait when few ask, and when many.
CROWDS: dict[str, tuple[str, ...]] = {
    workload.name: (f"{workload.name}-by1", workload.name, f"{workload.name}-by64") for workload in _SIXTEEN
}
WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        *_SIXTEEN,
        *(
            replace(
                workload,
                name=f"{workload.name}-by{count}",
                what=f"{workload.what}, for its p99",
                connections=count,
                is_timed=True,
            )
            for workload in _SIXTEEN
            for count in (1, 64)
        ),
        Workload("binary600k", "a 602,112-byte binary tensor over HTTP", "http", "binary", "first1000", IMAGE, 8),
        Workload("grpc600k", "a 602,112-byte tensor over gRPC", "grpc", "grpc", "first1000", IMAGE, 8),
        # Wider than json16, so that the load generator, on the same cores, is a small part of the work.
        Workload(
            "processes", "2,048 floats as JSON, by 1 and by 2 processes", "http", "json", "identity", (1, 2048), 32, 1
        ),
        _mlp("mlp", "http", "binary", "one row to an ONNX network, as a binary tensor over HTTP, server on one core"),
        _mlp("mlp-grpc", "grpc", "grpc", "one row to an ONNX network over gRPC, server on one core"),
        _alone("overhead-binary", "http", "binary", "binary16 to a model that joins no requests, server on one core"),
        _alone("overhead-grpc", "grpc", "grpc", "grpc16 to a model that joins no requests, server on one core"),
        Workload(
            "predict",
            "16 floats to /predict, of a small TorchScript network",
            "http",
            "json",
            PREDICT_MODEL,
            SMALL,
            16,
            tolerance=MLP_TOLERANCE,
        ),
        Workload("router", "binary16 through a proxy", "http", "binary", "identity", SMALL, 16),
        *(
            _resnet50(f"resnet50-{kind.name}", kind, 1, "an image to ResNet-50, on one core", times_longer=2)
            for kind in FORMATS.values()
        ),
        *(
            _resnet50(
                f"two-instances-{kind.name}",
                kind,
                2,
                "an image to 1 and to 2 instances of ResNet-50",
                checks_crowd=True,
            )
            for kind in FORMATS.values()
        ),
    )
}
# What overload.py sends, and by how many at once when it looks for the most that the server can do.
OVERLOADING = Workload(
    OVERLOAD, "16 floats to /predict, of a model that takes milliseconds, at three times the rate that can be served",
    "http", "json", SLOW_MODEL, SMALL, 8, tolerance=MLP_TOLERANCE,
)  # fmt: skip
# Not a load either; see loading.py.
LOADINGS: dict[str, Workload] = {
    f"load-100mb-{name}": replace(
        WORKLOADS[f"resnet50-{name}"], name=f"load-100mb-{name}", what=f"load ResNet-50 and ask it once ({name})"
    )
    for name in FORMATS
} | {f"load-100mb-{kind.name}": _forest(kind) for kind in FORESTS.values()}
# What can be chosen on the command line, in the order of the report.
NAMES = (*WORKLOADS, OVERLOAD, *LOADINGS, START, IDLE, IDLE_MEMORY)
