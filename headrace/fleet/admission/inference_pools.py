# SPDX-License-Identifier: Apache-2.0
"""The annotations that make an InferencePool of a service: the policy of its endpoint picker, and objectives."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.fleet.documents import Problem
from headrace.fleet.names import INFERENCE_OBJECTIVES, INFERENCE_POOL
from headrace.platforms.kubernetes_client.objects import Document, annotations_of

DEFAULT_PICKER_POLICY = "cache_aware"
PICKER_POLICIES = ("cache_aware", "prefix_hash", "predicted_latency", "p2c", "least", "round-robin", "random")
"""Policies of `headrace router` that need no more than the pods: `kv_events` needs ports, `weighted` needs weights."""
_OBJECTIVE = re.compile(r"([a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?)\s*=\s*(-?[0-9]{1,6})")


def parse_objectives(text: str) -> dict[str, int]:
    """Parse `interactive=10, batch=-10`. Raises ValueError."""
    objectives: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _OBJECTIVE.fullmatch(part)
        if match is None or match[1] in objectives:
            raise ValueError(part)
        objectives[match[1]] = int(match[3])
    return objectives


def pool_annotation_problems(service: Document) -> Iterator[Problem]:
    """Yield problems of the annotations."""
    annotations = annotations_of(service)
    policy, objectives = annotations.get(INFERENCE_POOL), annotations.get(INFERENCE_OBJECTIVES)
    if policy is not None and policy not in ("true", *PICKER_POLICIES):
        message = f"takes a policy of its endpoint picker, not {policy[:40]!a}"
        fix = f'write one of {", ".join(PICKER_POLICIES)}, or "true" for {DEFAULT_PICKER_POLICY}'
        yield Problem(f"metadata.annotations[{INFERENCE_POOL}]", message, fix)
    if objectives is None:
        return
    place = f"metadata.annotations[{INFERENCE_OBJECTIVES}]"
    if policy is None:
        yield Problem(place, "is for a service with an InferencePool", f"add the annotation {INFERENCE_POOL}")
    try:
        parse_objectives(objectives)
    except ValueError as error:
        message = f"has {str(error)[:40]!a}, which is not a name with a priority, or a name that is there already"
        yield Problem(place, message, "write names with whole numbers, such as interactive=10,batch=-10")
