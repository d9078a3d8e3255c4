# SPDX-License-Identifier: Apache-2.0
"""What is written into a status stands in its table: a CRD that does not know a field has API servers drop it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.fleet.documents import cluster_facts
from headrace.fleet.explain import shipped_runtimes
from headrace.fleet.planning import plan
from headrace.fleet.schema.fields import Field
from headrace.fleet.schema.kinds.inference_service import INFERENCE_SERVICE
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import build_status

SAMPLES = sorted((Path(__file__).parents[2] / "headrace" / "fleet" / "samples").glob("*.yaml"))
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def strange(value: Any, row: Field, at: str) -> Iterator[str]:
    """Fields that the table has no row for."""
    if row.type == "record" and row.fields and isinstance(value, Mapping):
        known = {field.name: field for field in row.fields}
        for name, inner in value.items():
            if name not in known:
                yield f"{at}.{name}"
            else:
                yield from strange(inner, known[name], f"{at}.{name}")
    elif row.type == "map" and row.item is not None and isinstance(value, Mapping):
        for name, inner in value.items():
            yield from strange(inner, row.item, f"{at}.{name}")
    elif row.type == "list" and row.item is not None:
        for inner in value:
            yield from strange(inner, row.item, f"{at}[]")


def observe_all(objects: list[Any]) -> Observed:
    """All objects of a plan, as if they ran."""
    up = {
        "conditions": [
            {"type": condition_type, "status": "True"} for condition_type in ("Available", "Ready", "RoutesReady")
        ]
    }
    up |= {"readyReplicas": 1, "updatedReplicas": 1, "replicas": 1, "availableReplicas": 1, "url": "http://x"}
    return Observed(tuple({**manifest, "status": up} for manifest in objects), ())


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_field_of_a_status_is_in_its_table(path: Path) -> None:
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    facts = cluster_facts([*documents, *shipped_runtimes()])
    for service in (document for document in documents if document["kind"] == "InferenceService"):
        planned = plan({**service, "metadata": {**service["metadata"], "generation": 1}}, facts)
        for observed in (Observed(), observe_all(list(planned.objects))):
            status = build_status(planned.service, planned, observed, NOW)
            assert INFERENCE_SERVICE.status is not None
            assert list(strange(status, INFERENCE_SERVICE.status, "status")) == []
