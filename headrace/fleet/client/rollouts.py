# SPDX-License-Identifier: Apache-2.0
"""Canary rollouts from the user's side: their state, and the change of the service that promotes or rolls back.

The share of the newest revision is `canaryTrafficPercent`: 100 promotes it, 0 gives all requests to the previous one. For a
service with steps, the controller changes the share, and an annotation has the user's command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.fleet.client.tables import components_of
from headrace.fleet.names import SERVERLESS
from headrace.fleet.rollouts.history import Revision, changes, merge_patch, read_history, revised_spec
from headrace.fleet.rollouts.policy import COMMAND, PAUSED, PROMOTE, RETRY, STEPPED, UNDO, parse_policy
from headrace.fleet.rollouts.state import PROMOTED, ROLLED_BACK, RolloutState, read_state
from headrace.fleet.status.conditions import get_mappings
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_mapping,
    get_str,
    name_of,
)


@dataclass(frozen=True)
class Share:
    """A revision and its share of the requests."""

    revision: str
    percent: int
    latest: bool


@dataclass(frozen=True)
class ComponentRollout:
    """The rollout of one component."""

    component: str
    mode: str
    requested_percent: int | None
    """`canaryTrafficPercent`."""
    shares: tuple[Share, ...]
    latest_ready: str
    latest_created: str
    previous: str
    """The revision that had all requests before."""
    steps: tuple[int, ...] = ()
    """Shares of the steps, in percent, for a rollout by steps."""
    rollout: RolloutState | None = None
    """State of the rollout by steps."""
    paused: bool = False

    @property
    def two(self) -> bool:
        """Whether there are two revisions."""
        return len(self.shares) > 1

    @property
    def new_percent(self) -> int:
        """The share of the newest revision."""
        return sum(share.percent for share in self.shares if share.latest)

    @property
    def state(self) -> str:
        """The state for tables."""
        if self.rollout is not None and self.rollout.phase == ROLLED_BACK and self.two:
            return "rolled back"
        if self.rollout is not None and self.steps and not self.rollout.over:
            position = f"step {self.rollout.step + 1} of {len(self.steps)} at {self.new_percent}%"
            return f"{position}, paused" if self.paused else position
        if self.two:
            return (
                "undone"
                if self.requested_percent == 0
                else f"canary at {self.new_percent}% of {self.requested_percent}%"
            )
        if self.latest_created and self.latest_created != self.latest_ready:
            return "rolling out"
        return "rolled out" if self.shares else "not yet"


def rollouts_of(service: Document) -> list[ComponentRollout]:
    """Return the rollouts of all components, from the status."""
    policy = parse_policy(annotations_of(service))
    return [
        ComponentRollout(
            name,
            get_str(status, "mode"),
            get_int(service, "spec", name, "canaryTrafficPercent"),
            tuple(
                Share(
                    get_str(record, "revisionName"),
                    get_int(record, "percent") or 0,
                    record.get("latestRevision") is True,
                )
                for record in get_mappings(status, "traffic")
            ),
            get_str(status, "latestReadyRevision"),
            get_str(status, "latestCreatedRevision"),
            get_str(status, "previousRolledoutRevision"),
            policy.steps if policy is not None and name in STEPPED else (),
            read_state(status),
            policy is not None and policy.paused,
        )
        for name, status in components_of(service).items()
    ]


def promotion(service: Document, component: str = "") -> Document:
    """Return the change that gives the newest revision all requests. Raises FailedPrecondition without a canary."""
    rollouts = [rollout for rollout in _selected(service, component) if rollout.two]
    if not rollouts:
        raise FailedPrecondition(f"{name_of(service)} has no canary: {_no_canary_reason(service)}")
    if _stepped(rollouts):
        return _command(service, PROMOTE, component)
    return _traffic_change(service, rollouts, 100)


def rollback(service: Document, component: str = "", to_revision: int = 0) -> Document:
    """Return the change that gives all requests to the previous revision. Raises FailedPrecondition without one.

    After a promotion, the pods of the previous revision are gone: its spec is restored from the history. So is that of
    `to_revision`, in any case.
    """
    if to_revision:
        return _restored(service, component, to_revision)
    rollouts = [rollout for rollout in _selected(service, component) if rollout.two]
    if rollouts and all(rollout.requested_percent == 0 or _is_in_phase(rollout, ROLLED_BACK) for rollout in rollouts):
        raise FailedPrecondition(f"{name_of(service)} is undone already: apply its earlier file to remove the new pods")
    if _stepped(rollouts):
        return _command(service, UNDO, component)
    if not rollouts:
        # Knative keeps the previous revision. In other modes its pods are gone.
        rollouts = [
            rollout
            for rollout in _selected(service, component)
            if rollout.mode == SERVERLESS and rollout.previous and rollout.previous != rollout.latest_ready
        ]
    if not rollouts:
        return _restored(service, component, 0)
    return _traffic_change(service, rollouts, 0)


@dataclass(frozen=True)
class HistoryRow:
    """One revision of a service, for a table."""

    revision: int
    time: str
    model: str
    change: str
    """What it changed of the revision before; "" if that one is not known."""
    state: str


def history_rows(service: Document) -> list[HistoryRow]:
    """Return the revisions of a service, oldest first."""
    revisions = read_history(service)
    states = ", ".join(dict.fromkeys(rollout.state for rollout in rollouts_of(service)))
    two = any(rollout.two for rollout in rollouts_of(service))
    rows = []
    for index, revision in enumerate(revisions):
        before = revisions[index - 1] if index else None
        newer = len(revisions) - 1 - index
        state = states if not newer else "serves the rest" if newer == 1 and two else ""
        change = changes(before.spec, revision.spec) if before is not None else ""
        rows.append(HistoryRow(revision.number, revision.time, _model_of(revision.spec), change, state))
    return rows


def target_revision(service: Document, to_revision: int = 0) -> Revision:
    """Return the revision that an undo restores: the newest other than the current one, or the one of this number.

    Raises FailedPrecondition if there is none.
    """
    current = revised_spec(service)
    others = [revision for revision in read_history(service) if revision.spec != current]
    if to_revision:
        matches = [revision for revision in others if revision.number == to_revision]
        if not matches:
            numbers = ", ".join(str(revision.number) for revision in others) or "none"
            raise FailedPrecondition(
                f"{name_of(service)} has no other revision {to_revision}: there are {numbers}; see "
                f"`headrace rollout history {name_of(service)}`"
            )
        return matches[0]
    if not others:
        raise FailedPrecondition(
            f"{name_of(service)} has no earlier revision to return to: apply its earlier file instead"
        )
    return others[-1]


def _restored(service: Document, component: str, to_revision: int) -> Document:
    """Return the change that restores the spec of an earlier revision, for all requests."""
    _selected(service, component)
    target = target_revision(service, to_revision)
    spec = merge_patch(revised_spec(service), target.spec)
    if component:
        spec = {component: spec[component]} if component in spec else {}
        if not spec:
            raise FailedPrecondition(f"{component} of {name_of(service)} is the same in revision {target.number}")
    for rollout in _selected(service, component):
        if (
            rollout.requested_percent is not None
            and rollout.requested_percent < 100
            and spec.get(rollout.component, {}) is not None
        ):
            spec[rollout.component] = {**spec.get(rollout.component, {}), "canaryTrafficPercent": 100}
    return {"metadata": {"resourceVersion": get_str(service, "metadata", "resourceVersion")}, "spec": spec}


def _model_of(spec: Mapping[str, Any]) -> str:
    return get_str(spec, "model", "name") or "-"


def pause(service: Document, component: str = "") -> Document:
    """Return the change that pauses a rollout at its step. Raises FailedPrecondition without steps."""
    _selected(service, component)
    _require_steps(service)
    return _annotated(service, {PAUSED: "true"})


def resume(service: Document, component: str = "") -> Document:
    """Return the change that resumes a rollout; one that was rolled back starts again. Raises FailedPrecondition."""
    rollouts = _selected(service, component)
    _require_steps(service)
    if any(_is_in_phase(rollout, ROLLED_BACK) for rollout in rollouts):
        return _command(service, RETRY, component, {PAUSED: None})
    if annotations_of(service).get(PAUSED) != "true":
        raise FailedPrecondition(f"{name_of(service)} is not paused")
    return _annotated(service, {PAUSED: None})


def _require_steps(service: Document) -> None:
    if parse_policy(annotations_of(service)) is None:
        raise FailedPrecondition(
            f'{name_of(service)} has no steps: give it the annotation ome.io/rollout-steps, such as "10,25,50"'
        )


def _is_in_phase(rollout: ComponentRollout, phase: str) -> bool:
    return rollout.rollout is not None and rollout.rollout.phase == phase


def _stepped(rollouts: list[ComponentRollout]) -> bool:
    return bool(rollouts) and all(rollout.steps and not _is_in_phase(rollout, PROMOTED) for rollout in rollouts)


def _command(service: Document, verb: str, component: str, more: dict[str, Any] | None = None) -> Document:
    """Return the change with a command. The time makes it differ from the last command."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    words = [word for word in (verb, component, now) if word]
    return _annotated(service, {COMMAND: " ".join(words), **(more or {})})


def _annotated(service: Document, annotations: dict[str, Any]) -> Document:
    version = get_str(service, "metadata", "resourceVersion")
    return {"metadata": {"resourceVersion": version, "annotations": annotations}}


def _selected(service: Document, component: str) -> list[ComponentRollout]:
    rollouts = rollouts_of(service)
    if not component:
        return rollouts
    if component not in (rollout.component for rollout in rollouts):
        components = ", ".join(rollout.component for rollout in rollouts) or "none yet"
        raise InvalidArgument(f"{name_of(service)} has no component {component}: there are {components}")
    return [rollout for rollout in rollouts if rollout.component == component]


def _no_canary_reason(service: Document) -> str:
    requested = [
        rollout.requested_percent
        for rollout in rollouts_of(service)
        if rollout.requested_percent is not None and rollout.requested_percent < 100
    ]
    if requested:
        return "its pods are all of one revision; change them, and the new ones get their share"
    return "give a component canaryTrafficPercent and change its pods to start one"


def _traffic_change(service: Document, components: list[ComponentRollout], percent: int) -> Document:
    spec: dict[str, Any] = {}
    for component in components:
        if get_mapping(service, "spec").get(component.component) is not None:
            spec[component.component] = {"canaryTrafficPercent": percent}
    # With the version that was read: an edit in between must not be promoted unseen.
    return {"metadata": {"resourceVersion": get_str(service, "metadata", "resourceVersion")}, "spec": spec}
