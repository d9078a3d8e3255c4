# SPDX-License-Identifier: Apache-2.0
"""Which nodes a model is for."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.fleet.agent.agent import matches_node

NODE = {"metadata": {"name": "gpu-1", "labels": {"zone": "a", "gpus": "8", "disk": "nvme"}}}


def model(**storage: Any) -> dict[str, Any]:
    return {"spec": {"storage": storage}}


def required(*terms: Any) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("storage", "wanted"),
    [
        ({}, True),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "a", "disk": "hdd"}}, False),
        ({"nodeSelector": {"absent": "x"}}, False),
        (required(expression("zone", "In", "a", "b")), True),
        (required(expression("zone", "In", "b")), False),
        (required(expression("zone", "NotIn", "b")), True),
        (required(expression("zone", "NotIn", "a")), False),
        # OME says no here.
        (required(expression("absent", "NotIn", "a")), True),
        (required(expression("disk", "Exists")), True),
        (required(expression("absent", "Exists")), False),
        (required(expression("absent", "DoesNotExist")), True),
        (required(expression("disk", "DoesNotExist")), False),
        (required(expression("gpus", "Gt", "4")), True),
        (required(expression("gpus", "Gt", "8")), False),
        (required(expression("gpus", "Lt", "9")), True),
        (required(expression("zone", "Lt", "9")), False),
        (required(expression("gpus", "Lt")), False),
        (required(expression("zone", "Resembles", "a")), False),
        # Terms are alternatives, and an empty one, or none at all, is for no node.
        (required(expression("zone", "In", "b"), expression("disk", "Exists")), True),
        (required({}), False),
        (required(), False),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-1"]}]}), True),
        (required({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-2"]}]}), False),
        ({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}, True),
        ({"nodeSelector": {"zone": "a"}, **required(expression("zone", "In", "b"))}, False),
    ],
)
def test_the_rules_are_those_of_kubernetes(storage: dict[str, Any], wanted: bool) -> None:
    assert matches_node(model(**storage), NODE) is wanted


@pytest.mark.parametrize("odd", [None, "x", 3, [], {"nodeSelector": "x"}, {"nodeAffinity": [1]}])
def test_nothing_that_is_written_there_raises(odd: Any) -> None:
    assert matches_node({"spec": {"storage": odd}}, NODE) is True
