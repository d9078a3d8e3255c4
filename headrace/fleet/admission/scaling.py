# SPDX-License-Identifier: Apache-2.0
"""Rules of scaling: replicas, HPA and KEDA, disruption budgets. For services and for the components of runtimes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from headrace.fleet.names import (
    AUTOSCALER_CLASS,
    AUTOSCALER_METRICS,
    COMPONENTS,
    KEDA_OPERATOR,
    KEDA_SERVER_ADDRESS,
    KEDA_THRESHOLD,
    TARGET_UTILIZATION,
)
from headrace.fleet.schema.kinds.components import OPERATORS
from headrace.fleet.words import Document, Problem, annotations_of, part, text, whole

CLASSES = ("hpa", "keda", "external")
METRICS = ("cpu", "memory")
AUTH_MODES = ("basic", "tls", "bearer", "custom")


def scaling_problems(service: Document) -> Iterator[Problem]:
    """What is wrong with how a service scales."""
    yield from _annotations(annotations_of(service))
    yield from keda_problems("spec.kedaConfig", part(service, "spec", "kedaConfig"))
    for name in COMPONENTS:
        yield from component_problems(f"spec.{name}", part(service, "spec", name))


def component_problems(place: str, component: Document) -> Iterator[Problem]:
    """What is wrong with how one component scales."""
    least, most = whole(component, "minReplicas"), whole(component, "maxReplicas")
    if least is not None and most is not None and least > most:
        yield Problem(
            f"{place}.minReplicas", f"{least} is above maxReplicas, {most}", "lower minReplicas or raise maxReplicas"
        )
    if component.get("minAvailable") is not None and component.get("maxUnavailable") is not None:
        said = "a disruption budget has minAvailable or maxUnavailable, not both"
        yield Problem(f"{place}.minAvailable", said, "remove one of them")
    strategy = part(component, "deploymentStrategy")
    if text(strategy, "type") == "Recreate" and part(strategy, "rollingUpdate"):
        said = "goes with type: RollingUpdate alone"
        yield Problem(f"{place}.deploymentStrategy.rollingUpdate", said, "remove it, or write type: RollingUpdate")
    rolling = part(strategy, "rollingUpdate")
    if rolling.get("maxSurge") in (0, "0%") and rolling.get("maxUnavailable") in (0, "0%"):
        said = "with both at 0 no pod can ever be replaced"
        yield Problem(f"{place}.deploymentStrategy.rollingUpdate", said, "raise maxSurge or maxUnavailable")
    yield from keda_problems(f"{place}.kedaConfig", part(component, "kedaConfig"))


def keda_problems(place: str, keda: Document) -> Iterator[Problem]:
    """What is wrong with a KedaConfig beyond its table."""
    modes = text(keda, "authModes")
    if modes:
        for mode in modes.split(","):
            if mode.strip() not in AUTH_MODES:
                said = f"has {mode.strip()[:40]!a}, which is not a way to authenticate"
                yield Problem(f"{place}.authModes", said, f"write a comma list of {', '.join(AUTH_MODES)}")
                break


def _annotations(annotations: dict[str, str]) -> Iterator[Problem]:
    chosen = annotations.get(AUTOSCALER_CLASS, "hpa")
    if chosen not in CLASSES:
        yield _one_of(AUTOSCALER_CLASS, chosen, CLASSES)
    metrics = annotations.get(AUTOSCALER_METRICS)
    if metrics is not None and chosen == "hpa" and metrics not in METRICS:
        yield _one_of(AUTOSCALER_METRICS, metrics, METRICS)
    share = annotations.get(TARGET_UTILIZATION)
    if share is not None and not (re.fullmatch(r"[0-9]{1,3}", share) and 1 <= int(share) <= 100):
        said = f"takes a whole number from 1 to 100, not {share[:40]!a}"
        yield Problem(f"metadata.annotations[{TARGET_UTILIZATION}]", said, 'write percent in quotes, "80"')
    operator = annotations.get(KEDA_OPERATOR)
    if operator is not None and operator not in OPERATORS:
        yield _one_of(KEDA_OPERATOR, operator, OPERATORS)
    threshold = annotations.get(KEDA_THRESHOLD)
    if threshold is not None and not _is_number(threshold):
        said = f"takes a number in quotes, not {threshold[:40]!a}"
        yield Problem(f"metadata.annotations[{KEDA_THRESHOLD}]", said, 'write a number such as "10" or "0.5"')
    address = annotations.get(KEDA_SERVER_ADDRESS)
    if address is not None and re.fullmatch(r"https?://[^\s/]+.*", address) is None:
        said = f"takes a URL, not {address[:40]!a}"
        yield Problem(f"metadata.annotations[{KEDA_SERVER_ADDRESS}]", said, "write http://host:port")


def _one_of(name: str, value: str, words: tuple[str, ...]) -> Problem:
    said = f"takes one of {', '.join(words)}, not {value[:40]!a}"
    return Problem(f"metadata.annotations[{name}]", said, f"write one of {', '.join(words)}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
