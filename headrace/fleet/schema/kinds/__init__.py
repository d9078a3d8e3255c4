# SPDX-License-Identifier: Apache-2.0
"""Every kind of `ome.io/v1beta1` as a table, and the list of them."""

from __future__ import annotations

from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds.accelerators import ACCELERATOR_CLASS
from headrace.fleet.schema.kinds.benchmarks import BENCHMARK_JOB
from headrace.fleet.schema.kinds.inference_service import INFERENCE_SERVICE
from headrace.fleet.schema.kinds.models import BASE_MODEL, CLUSTER_BASE_MODEL, FINE_TUNED_WEIGHT
from headrace.fleet.schema.kinds.runtimes import CLUSTER_SERVING_RUNTIME, SERVING_RUNTIME

KINDS: tuple[Kind, ...] = (
    INFERENCE_SERVICE,
    BASE_MODEL,
    CLUSTER_BASE_MODEL,
    SERVING_RUNTIME,
    CLUSTER_SERVING_RUNTIME,
    FINE_TUNED_WEIGHT,
    ACCELERATOR_CLASS,
    BENCHMARK_JOB,
)

_BY_NAME = {kind.name: kind for kind in KINDS}


def find_kind(name: str) -> Kind | None:
    """Return our kind of that name; None if there is none."""
    return _BY_NAME.get(name)
