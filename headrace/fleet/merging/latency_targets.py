# SPDX-License-Identifier: Apache-2.0
"""The section `slo` of a service: latency targets that its components are scaled by. Our extension of OME."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.fleet.names import DECODER, ENGINE, SLO
from headrace.platforms.kubernetes_client.objects import Document, annotations_of, get_mapping

FIRST_TOKEN, NEXT_TOKEN, PERCENTILE = "ttftMilliseconds", "tpotMilliseconds", "percentile"
DEFAULT_PERCENTILE = 95


def service_targets(service: Document) -> Any:
    """Return `spec.slo`, else the JSON value of the annotation, of any type. Raises ValueError if it is not JSON."""
    text = annotations_of(service).get(SLO)
    section = get_mapping(service, "spec").get("slo")
    return section if section is not None or text is None else json.loads(text)


def component_targets(service: Document, base: Document, name: str) -> Document:
    """Return the targets of a component; empty without any.

    The component's own targets override those of the service, which override the runtime's. With a decoder, the engine
    computes first tokens and the decoder all others.
    """
    if name not in (ENGINE, DECODER):
        return {}
    spec = get_mapping(service, "spec")
    try:
        common = service_targets(service)
    except ValueError:
        common = None  # admission has reported it
    targets: dict[str, Any] = {}
    for section in (get_mapping(base, "slo"), common, get_mapping(spec, name, "slo")):
        if isinstance(section, Mapping):
            targets |= {key: value for key, value in section.items() if value is not None}
    if DECODER in spec:
        targets.pop(NEXT_TOKEN if name == ENGINE else FIRST_TOKEN, None)
    if not targets.get(FIRST_TOKEN) and not targets.get(NEXT_TOKEN):
        return {}
    return {PERCENTILE: DEFAULT_PERCENTILE, **targets}


def describe_targets(targets: Document) -> str:
    """Return the targets of a component as a text: `p95 of the first token 1000 ms, of each further token 40 ms`."""
    parts = [
        f"of {name} {targets[key]:g} ms"
        for key, name in ((FIRST_TOKEN, "the first token"), (NEXT_TOKEN, "each further token"))
        if targets.get(key)
    ]
    return f"p{targets[PERCENTILE]:g} {', '.join(parts)}" if parts else ""
