# SPDX-License-Identifier: Apache-2.0
"""Whether the autoscaler of a component works: the condition of its HorizontalPodAutoscaler or KEDA ScaledObject."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.fleet.documents import resource_version
from headrace.fleet.names import COMPONENT_LABEL
from headrace.fleet.status.conditions import Condition, Observed, condition_of, copy_condition, of_kinds
from headrace.platforms.kubernetes_client.objects import Document, get_str, kind_of, labels_of, name_of

_SUSPENDED = "ScalingDisabled"
"""Reason of a HorizontalPodAutoscaler whose workload has no replicas: nothing is wrong."""


def scaling_condition(
    service: Document, component: str, objects: Sequence[Document], observed: Observed
) -> Condition | None:
    """Return the condition `EngineScalingActive`; None without an autoscaler, or before it says anything.

    Its severity is Info: a component serves without its autoscaler, but stays at its size.
    """
    kind = f"{component.capitalize()}ScalingActive"
    result: Condition | None = None
    for planned in of_kinds(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        if labels_of(planned).get(COMPONENT_LABEL) != component:
            continue
        live = observed.live(planned)
        # Only an API server gives objects a version. A local fleet scales by itself, and writes the condition.
        if live is None or not resource_version(live):
            before = condition_of(service, kind)
            result = copy_condition(kind, before, informs=True) if before is not None else result
            continue
        condition = _keda(kind, live) if kind_of(live) == "ScaledObject" else _hpa(kind, live)
        if result is None or (condition is not None and condition.status != "True"):
            result = condition
    return result


def _hpa(kind: str, live: Document) -> Condition | None:
    for name in ("AbleToScale", "ScalingActive"):
        record = condition_of(live, name)
        reason = get_str(record, "reason")
        if get_str(record, "status") == "False" and reason != _SUSPENDED:
            return Condition(kind, "False", reason, _message(live, record), informs=True)
    return Condition(kind, "True", informs=True) if condition_of(live, "ScalingActive") is not None else None


def _keda(kind: str, live: Document) -> Condition:
    record = condition_of(live, "Ready")
    if record is None:
        message = f"KEDA's operator has not handled ScaledObject {name_of(live)}: is it running?"
        return Condition(kind, "Unknown", "WaitingForKeda", message, informs=True)
    if get_str(record, "status") == "True":
        return Condition(kind, "True", informs=True)
    status = get_str(record, "status")
    reason = get_str(record, "reason") or "NotReady"
    return Condition(kind, "False" if status == "False" else "Unknown", reason, _message(live, record), informs=True)


def _message(live: Document, record: Document | None) -> str:
    return f"{kind_of(live)} {name_of(live)}: {get_str(record, 'message') or get_str(record, 'reason')}"
