# SPDX-License-Identifier: Apache-2.0
"""`modelStatus`: the state of the model over all components that load it. The least advanced component counts.

`activeModelState` is the state of the model that serves now, `targetModelState` that of the last change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.fleet.names import ROUTER
from headrace.fleet.status.conditions import truncate
from headrace.fleet.status.workloads import FAILED, LOADED, LOADING, PENDING, STANDBY, PodState, pod_state
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_str, labels_of, name_of

WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
_HASHES = ("pod-template-hash", "serving.knative.dev/revision", "leaderworkerset.sigs.k8s.io/template-revision-hash")
_WORST = (FAILED, PENDING, LOADING, STANDBY, LOADED)

UP_TO_DATE, IN_PROGRESS, BLOCKED, INVALID = "UpToDate", "InProgress", "BlockedByFailedLoad", "InvalidSpec"


@dataclass(frozen=True)
class ModelCopies:
    """The copies of the model in a component's pods."""

    target: str
    active: str
    total: int = 0
    failed: int = 0
    failure: PodState | None = None
    revision: str = ""


def count_copies(
    pods: Sequence[Document], latest: Sequence[Document], *, suspended: bool, current: bool, revision: str
) -> ModelCopies:
    """Count the copies in a component's pods. `latest`: the pods of the latest revision.

    suspended: scaled to zero. current: the workload runs only the latest revision.
    """
    if not pods:
        state = STANDBY if suspended else PENDING
        return ModelCopies(state, state, revision=revision)
    states = [pod_state(pod) for pod in pods if _is_leader(pod)]
    newest = [pod_state(pod) for pod in _newest(latest)]
    failures = [state for state in map(pod_state, pods) if state.state == FAILED]
    if current and any(pod.state == LOADED for pod in states):
        target = LOADED
    else:
        target = next((name for name in (LOADED, FAILED, LOADING) if any(pod.state == name for pod in newest)), PENDING)
    active = LOADED if any(pod.state == LOADED for pod in states) else STANDBY if suspended else PENDING
    return ModelCopies(target, active, len(states), len(failures), failures[-1] if failures else None, revision)


def model_status(components: Mapping[str, ModelCopies], model: Document | None) -> dict[str, Any]:
    """Return the model's state over all components but routers."""
    copies = [item for name, item in components.items() if name != ROUTER]
    target = min((copy.target for copy in copies), key=_WORST.index, default=PENDING)
    active = min((copy.active for copy in copies), key=_WORST.index, default=PENDING)
    status: dict[str, Any] = {
        "transitionStatus": BLOCKED if target == FAILED else UP_TO_DATE if target in (LOADED, STANDBY) else IN_PROGRESS,
        "modelRevisionStates": {"activeModelState": active, "targetModelState": target},
    }
    failed = next((copy for copy in copies if copy.failure is not None), None)
    if failed is not None and failed.failure is not None:
        status["lastFailureInfo"] = _failure(failed.failure, failed.revision)
    elif target == PENDING and not _is_on_a_node(model):
        status["lastFailureInfo"] = {"reason": "BaseModelNotReady", "message": _model_message(model)}
        if get_str(model, "status", "state") == "Failed":
            status["transitionStatus"] = BLOCKED
    total = sum(copy.total for copy in copies)
    if total:
        status["modelCopies"] = {"failedCopies": sum(copy.failed for copy in copies), "totalCopies": total}
    return status


def _failure(failed: PodState, revision: str) -> dict[str, Any]:
    info: dict[str, Any] = {
        "location": failed.pod,
        "reason": failed.failure,
        "message": truncate("\n".join(part for part in (failed.message, failed.output) if part)),
        "modelRevisionName": revision,
        "time": failed.time,
        "exitCode": failed.exit_code,
    }
    return {name: value for name, value in info.items() if value not in ("", None)}


def _is_leader(pod: Document) -> bool:
    """Whether a pod serves: of a multi-node group, only the leader does."""
    return labels_of(pod).get(WORKER_INDEX, "0") == "0"


def _newest(pods: Sequence[Document]) -> list[Document]:
    """Return the pods of the newest template; new pods of an older template do not count."""
    groups: dict[tuple[str, ...], list[Document]] = {}
    for pod in pods:
        groups.setdefault(tuple(labels_of(pod).get(name, "") for name in _HASHES), []).append(pod)
    if not groups:
        return []
    newest = max(groups.values(), key=lambda group: min(get_str(pod, "metadata", "creationTimestamp") for pod in group))
    leaders = [pod for pod in newest if _is_leader(pod)]
    failed = [pod for pod in newest if not _is_leader(pod) and pod_state(pod).state == FAILED]
    return leaders + failed


def _is_on_a_node(model: Document | None) -> bool:
    """Whether some node has the model, or no agent reports it."""
    return model is None or get_str(model, "status", "state") in ("", "Ready")


def _model_message(model: Document | None) -> str:
    state, name = get_str(model, "status", "state"), name_of(model or {})
    failed = [node for node in get_list(model, "status", "nodesFailed") if isinstance(node, str)]
    failures = f", failed on {', '.join(failed[:8])}" if failed else ""
    if get_str(model, "status", "message"):
        return f"no node has the model {name} yet: its download failed on {get_str(model, 'status', 'message')}"
    return f"no node has the model {name} yet: it is {state}{failures}"
