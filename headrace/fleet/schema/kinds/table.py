# SPDX-License-Identifier: Apache-2.0
"""All kinds by name."""

from __future__ import annotations

from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds.accelerators import ACCELERATOR_CLASS
from headrace.fleet.schema.kinds.benchmarks import BENCHMARK_JOB
from headrace.fleet.schema.kinds.inference_service import INFERENCE_SERVICE
from headrace.fleet.schema.kinds.models import BASE_MODEL, CLUSTER_BASE_MODEL
from headrace.fleet.schema.kinds.runtimes import CLUSTER_SERVING_RUNTIME, SERVING_RUNTIME
from headrace.fleet.schema.kinds.weights import FINE_TUNED_WEIGHT

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
    """The kind of that name, if it is ours."""
    return _BY_NAME.get(name)
