# SPDX-License-Identifier: Apache-2.0
"""`modelStatus`: how far the model is, over all components that load it. The one that is least far counts.

`activeModelState` is what answers requests now, `targetModelState` what was asked for last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.fleet.names import ROUTER
from headrace.fleet.status.conditions import shortened
from headrace.fleet.status.pods import FAILED, LOADED, LOADING, PENDING, STANDBY, PodState, state_of
from headrace.fleet.words import Document, items, labels_of, name_of, text

WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
_HASHES = ("pod-template-hash", "serving.knative.dev/revision", "leaderworkerset.sigs.k8s.io/template-revision-hash")
_WORST = (FAILED, PENDING, LOADING, STANDBY, LOADED)

UP_TO_DATE, IN_PROGRESS, BLOCKED, INVALID = "UpToDate", "InProgress", "BlockedByFailedLoad", "InvalidSpec"


@dataclass(frozen=True)
class Copies:
    """A component's copies of the model."""

    target: str
    active: str
    total: int = 0
    failed: int = 0
    failure: PodState | None = None
    revision: str = ""


def copies_of(
    pods: Sequence[Document], latest: Sequence[Document], *, asleep: bool, current: bool, revision: str
) -> Copies:
    """What the pods of a component tell; `latest` are those of the revision that was asked for last.

    Asleep: it is scaled to zero. Current: the workload runs nothing but what was asked for last.
    """
    if not pods:
        state = STANDBY if asleep else PENDING
        return Copies(state, state, revision=revision)
    states = [state_of(each) for each in pods if _answers(each)]
    newest = [state_of(each) for each in _newest(latest)]
    failures = [each for each in (state_of(pod) for pod in pods) if each.state == FAILED]
    if current and any(each.state == LOADED for each in states):
        target = LOADED
    else:
        target = next((each for each in (LOADED, FAILED, LOADING) if any(one.state == each for one in newest)), PENDING)
    active = LOADED if any(each.state == LOADED for each in states) else STANDBY if asleep else PENDING
    return Copies(target, active, len(states), len(failures), failures[-1] if failures else None, revision)


def model_status(components: Mapping[str, Copies], model: Document | None) -> dict[str, Any]:
    """The model's state over its components. Routers have none."""
    copies = [each for name, each in components.items() if name != ROUTER]
    target = min((each.target for each in copies), key=_WORST.index, default=PENDING)
    active = min((each.active for each in copies), key=_WORST.index, default=PENDING)
    made: dict[str, Any] = {
        "transitionStatus": BLOCKED if target == FAILED else UP_TO_DATE if target in (LOADED, STANDBY) else IN_PROGRESS,
        "modelRevisionStates": {"activeModelState": active, "targetModelState": target},
    }
    failed = next((each for each in copies if each.failure is not None), None)
    if failed is not None and failed.failure is not None:
        made["lastFailureInfo"] = _failure(failed.failure, failed.revision)
    elif target == PENDING and not _on_a_node(model):
        made["lastFailureInfo"] = {"reason": "BaseModelNotReady", "message": _where(model)}
        if text(model, "status", "state") == "Failed":
            made["transitionStatus"] = BLOCKED
    total = sum(each.total for each in copies)
    if total:
        made["modelCopies"] = {"failedCopies": sum(each.failed for each in copies), "totalCopies": total}
    return made


def _failure(failed: PodState, revision: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "location": failed.pod,
        "reason": failed.failure,
        "message": shortened(failed.message),
        "modelRevisionName": revision,
        "time": failed.time,
        "exitCode": failed.exit_code,
    }
    return {name: value for name, value in made.items() if value not in ("", None)}


def _answers(pod: Document) -> bool:
    """Whether the pod holds a copy that answers: of a group of nodes, the leader does."""
    return labels_of(pod).get(WORKER_INDEX, "0") == "0"


def _newest(pods: Sequence[Document]) -> list[Document]:
    """The pods of the template that came last; when an older one grows meanwhile, its new pods do not count."""
    groups: dict[tuple[str, ...], list[Document]] = {}
    for each in pods:
        groups.setdefault(tuple(labels_of(each).get(name, "") for name in _HASHES), []).append(each)
    if not groups:
        return []
    found = max(groups.values(), key=lambda group: min(text(each, "metadata", "creationTimestamp") for each in group))
    leaders = [each for each in found if _answers(each)]
    failed = [each for each in found if not _answers(each) and state_of(each).state == FAILED]
    return leaders + failed


def _on_a_node(model: Document | None) -> bool:
    """Whether some node has the model, or nobody keeps account of it."""
    return model is None or text(model, "status", "state") in ("", "Ready")


def _where(model: Document | None) -> str:
    state, name = text(model, "status", "state"), name_of(model or {})
    failed = [each for each in items(model, "status", "nodesFailed") if isinstance(each, str)]
    where = f", failed on {', '.join(failed[:8])}" if failed else ""
    return f"no node has the model {name} yet: it is {state}{where}"
