# SPDX-License-Identifier: Apache-2.0
"""A canary as its user moves it: how far it is, and what to write into the service to promote it or to take it back. Pure.

The share of the newest revision is `canaryTrafficPercent`: 100 promotes it, 0 gives all requests to what ran before. Where a
service has steps, the controller moves the share, and is asked by an annotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.fleet.client.summaries import components_of
from headrace.fleet.names import SERVERLESS
from headrace.fleet.rollouts.policy import COMMAND, PAUSED, PROMOTE, RETRY, STEPPED, UNDO, policy_of
from headrace.fleet.rollouts.state import PROMOTED, ROLLED_BACK, State, state_of
from headrace.fleet.status.observed import records
from headrace.fleet.words import Document, annotations_of, name_of, part, text, whole


@dataclass(frozen=True)
class Share:
    """A revision, and its part of the requests."""

    revision: str
    percent: int
    latest: bool


@dataclass(frozen=True)
class ComponentRollout:
    """One component."""

    component: str
    mode: str
    asked: int | None
    """`canaryTrafficPercent`."""
    shares: tuple[Share, ...]
    latest_ready: str
    latest_created: str
    previous: str
    """The revision that had all requests before the one that has them now."""
    steps: tuple[int, ...] = ()
    """Where it goes by steps: the shares, in percent."""
    rollout: State | None = None
    """How far it is in these."""
    paused: bool = False

    @property
    def two(self) -> bool:
        """Whether two revisions are there."""
        return len(self.shares) > 1

    @property
    def new_percent(self) -> int:
        """What the newest gets."""
        return sum(each.percent for each in self.shares if each.latest)

    @property
    def state(self) -> str:
        """In words."""
        if self.rollout is not None and self.rollout.phase == ROLLED_BACK and self.two:
            return "rolled back"
        if self.rollout is not None and self.steps and not self.rollout.over:
            at = f"step {self.rollout.step + 1} of {len(self.steps)} at {self.new_percent}%"
            return f"{at}, paused" if self.paused else at
        if self.two:
            return "undone" if self.asked == 0 else f"canary at {self.new_percent}% of {self.asked}%"
        if self.latest_created and self.latest_created != self.latest_ready:
            return "rolling out"
        return "rolled out" if self.shares else "not yet"


def rollouts_of(service: Document) -> list[ComponentRollout]:
    """What the status tells."""
    policy = policy_of(annotations_of(service))
    return [
        ComponentRollout(
            name,
            text(told, "mode"),
            whole(service, "spec", name, "canaryTrafficPercent"),
            tuple(
                Share(text(each, "revisionName"), whole(each, "percent") or 0, each.get("latestRevision") is True)
                for each in records(told, "traffic")
            ),
            text(told, "latestReadyRevision"),
            text(told, "latestCreatedRevision"),
            text(told, "previousRolledoutRevision"),
            policy.steps if policy is not None and name in STEPPED else (),
            state_of(told),
            policy is not None and policy.paused,
        )
        for name, told in components_of(service).items()
    ]


def promotion(service: Document, component: str = "") -> Document:
    """The change that gives the newest revision all requests. Raises FailedPrecondition where there is no canary."""
    found = [each for each in _meant(service, component) if each.two]
    if not found:
        raise FailedPrecondition(f"{name_of(service)} has no canary: {_why_none(service)}")
    if _stepped(found):
        return _command(service, PROMOTE, component)
    return _change(service, found, 100)


def rollback(service: Document, component: str = "") -> Document:
    """The change that gives all requests to the revision before. Raises FailedPrecondition where there is none."""
    found = [each for each in _meant(service, component) if each.two]
    if found and all(each.asked == 0 or _is(each, ROLLED_BACK) for each in found):
        raise FailedPrecondition(f"{name_of(service)} is undone already: apply its earlier file to remove the new pods")
    if _stepped(found):
        return _command(service, UNDO, component)
    if not found:
        # Knative keeps the revision before. Elsewhere its pods are gone, and nobody has their spec any more.
        found = [
            each
            for each in _meant(service, component)
            if each.mode == SERVERLESS and each.previous and each.previous != each.latest_ready
        ]
    if not found:
        raise FailedPrecondition(f"{name_of(service)} has no canary to take back: apply its earlier file instead")
    return _change(service, found, 0)


def pause(service: Document, component: str = "") -> Document:
    """The change that keeps a rollout at its step. Raises FailedPrecondition where there are no steps."""
    _meant(service, component)
    _with_steps(service)
    return _annotated(service, {PAUSED: "true"})


def resume(service: Document, component: str = "") -> Document:
    """The change that lets a rollout go on; one that was taken back begins anew. Raises FailedPrecondition."""
    found = _meant(service, component)
    _with_steps(service)
    if any(_is(each, ROLLED_BACK) for each in found):
        return _command(service, RETRY, component, {PAUSED: None})
    if annotations_of(service).get(PAUSED) != "true":
        raise FailedPrecondition(f"{name_of(service)} is not paused")
    return _annotated(service, {PAUSED: None})


def _with_steps(service: Document) -> None:
    if policy_of(annotations_of(service)) is None:
        raise FailedPrecondition(
            f'{name_of(service)} has no steps: give it the annotation ome.io/rollout-steps, such as "10,25,50"'
        )


def _is(rollout: ComponentRollout, phase: str) -> bool:
    return rollout.rollout is not None and rollout.rollout.phase == phase


def _stepped(found: list[ComponentRollout]) -> bool:
    return bool(found) and all(each.steps and not _is(each, PROMOTED) for each in found)


def _command(service: Document, verb: str, component: str, more: dict[str, Any] | None = None) -> Document:
    """The time makes it another command than the last."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    words = [each for each in (verb, component, now) if each]
    return _annotated(service, {COMMAND: " ".join(words), **(more or {})})


def _annotated(service: Document, annotations: dict[str, Any]) -> Document:
    version = text(service, "metadata", "resourceVersion")
    return {"metadata": {"resourceVersion": version, "annotations": annotations}}


def _meant(service: Document, component: str) -> list[ComponentRollout]:
    found = rollouts_of(service)
    if not component:
        return found
    if component not in (each.component for each in found):
        there = ", ".join(each.component for each in found) or "none yet"
        raise InvalidArgument(f"{name_of(service)} has no component {component}: there are {there}")
    return [each for each in found if each.component == component]


def _why_none(service: Document) -> str:
    asked = [each.asked for each in rollouts_of(service) if each.asked is not None and each.asked < 100]
    if asked:
        return "its pods are all the same; change them, and the new ones get their share"
    return "give a component canaryTrafficPercent and change its pods, and there is one"


def _change(service: Document, components: list[ComponentRollout], percent: int) -> Document:
    spec: dict[str, Any] = {}
    for each in components:
        if part(service, "spec").get(each.component) is not None:
            spec[each.component] = {"canaryTrafficPercent": percent}
    # Of the service as it was looked at: an edit in between would be promoted unseen.
    return {"metadata": {"resourceVersion": text(service, "metadata", "resourceVersion")}, "spec": spec}
