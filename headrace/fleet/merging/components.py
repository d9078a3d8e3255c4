# SPDX-License-Identifier: Apache-2.0
"""The components of a service: runtime and service merged, the mode of each, and its pods with all that they need.

Called by planning with a service whose defaults are in, and with the runtime that selection chose. A component exists only
if the service names it, be it `{}`; what a runtime has for another stays unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.fleet.merging.accelerating import add_accelerator, add_parallelism
from headrace.fleet.merging.drafts import PodDraft
from headrace.fleet.merging.metadata import annotations_for, labels_for
from headrace.fleet.merging.models import add_model, claim_problem
from headrace.fleet.merging.modes import Mode, mode_of
from headrace.fleet.merging.origins import Origins, Sources
from headrace.fleet.merging.parts import Component
from headrace.fleet.merging.placeholders import Placeholders, unknown
from headrace.fleet.merging.sides import base_of, extension_of, patch_of, pod_of
from headrace.fleet.merging.strategic import merged
from headrace.fleet.merging.tables import COMPONENT
from headrace.fleet.names import COMPONENTS, MAIN_CONTAINER, MULTI_NODE, MULTI_NODE_RAY, ROUTER, ROUTER_CONTAINER
from headrace.fleet.selection.accelerators import Choice, choose
from headrace.fleet.selection.runtimes import matching_entry
from headrace.fleet.words import NOTHING, ClusterFacts, Document, Problem, items, namespace_of, part, text, whole


@dataclass(frozen=True)
class _Case:
    """What the components of one service have in common."""

    service: Document
    runtime: Document | None
    model: Document | None
    weights: Sequence[Document]
    facts: ClusterFacts
    placeholders: Placeholders

    @property
    def upstream(self) -> bool:
        return self.facts.settings.upstream_selection


@dataclass(frozen=True)
class _Sides:
    """A component as the runtime has it, as the service has it, and as it is."""

    name: str
    base: Document
    patch: Document
    both: Document

    @property
    def default_main(self) -> str:
        return ROUTER_CONTAINER if self.name == ROUTER else MAIN_CONTAINER


def components(
    service: Document,
    runtime: Document | None,
    model: Document | None,
    weights: Sequence[Document],
    facts: ClusterFacts,
) -> dict[str, Component]:
    """The components that the service names, by name, in the order they are made."""
    case = _Case(service, runtime, model, weights, facts, Placeholders(service))
    named = part(service, "spec")
    return {name: _component(name, case) for name in COMPONENTS if isinstance(named.get(name), Mapping)}


def _component(name: str, case: _Case) -> Component:
    base, patch = base_of(case.runtime, name), patch_of(case.service, name)
    sides = _Sides(name, base, patch, merged(base, patch, COMPONENT))
    mode = mode_of(name, sides.both, case.service, case.facts)
    layout = _layout(sides.both, mode)
    workers = _workers(sides.both, layout)
    choice = choose(case.service, case.runtime, name, case.facts) if name != ROUTER else Choice()
    noted = annotations_for(sides.both, case.service, case.runtime, case.model, case.weights)
    drafts = {role: _drafted(sides, path, case, choice, workers, noted) for role, path in layout.items()}
    first = drafts.get("pod") or drafts["leader"]
    return Component(
        name=name,
        mode=mode.mode,
        rule=mode.rule,
        pod=first.pod,
        leader=drafts["leader"].pod if "leader" in drafts else None,
        worker=drafts["worker"].pod if "worker" in drafts else None,
        worker_size=workers,
        extension=extension_of(sides.base, sides.both, case.service, name),
        labels=labels_for(name, sides.both, case.service, case.runtime, case.model, case.weights),
        annotations=noted,
        origins=Origins(lambda: _sources(sides, layout, drafts)),
        config={key: value for key, value in part(sides.both, "config").items() if isinstance(value, str)},
        accelerator=choice.name,
        accelerator_reason=choice.reason,
        problems=tuple(_problems(sides, drafts, case, choice)),
    )


def _layout(both: Document, mode: Mode) -> dict[str, tuple[str, ...]]:
    """The pods of a component, and where in it each is described. A leader that is not described is the component's pod."""
    if mode.mode not in (MULTI_NODE, MULTI_NODE_RAY):
        return {"pod": ()}
    leader = part(both, "leader")
    described = bool(part(leader, "runner") or items(leader, "containers"))
    layout: dict[str, tuple[str, ...]] = {"leader": ("leader",) if described else ()}
    if isinstance(both.get("worker"), Mapping):
        layout["worker"] = ("worker",)
    return layout


def _workers(both: Document, layout: Mapping[str, Any]) -> int:
    if "worker" not in layout:
        return 0
    size = whole(both, "worker", "size")
    # Who describes a worker and does not count it means one; OME makes a group of a leader alone.
    return 1 if size is None else max(0, size)


def _drafted(
    sides: _Sides, path: tuple[str, ...], case: _Case, choice: Choice, workers: int, noted: Mapping[str, str]
) -> PodDraft:
    """One pod with its model, its accelerator and its variables."""
    main = text(part(sides.both, *path), "runner", "name") or sides.default_main
    draft = PodDraft(pod_of(sides.both, path, main), main, pod_of(sides.patch, path, main))
    serves = sides.name != ROUTER
    if not serves:
        # Sorted: an order that changes with each reconcile would roll the pods out each time.
        config = part(sides.both, "config")
        for key in sorted(config):
            if isinstance(config[key], str):
                draft.set_variable(key, config[key], keep=True)
    add_model(draft, case.model, case.weights, noted, serves=serves, pinning=case.facts.settings.node_pinning)
    if serves:
        if choice.accelerator is not None:
            entry = None
            if case.runtime is not None and case.model is not None:
                entry = matching_entry(case.runtime, case.model, case.facts)
            add_accelerator(draft, choice.accelerator, entry, upstream=case.upstream)
        add_parallelism(draft, choice.accelerator, workers, upstream=case.upstream)
    if draft.main is not None:
        filled = case.placeholders.filled(draft.main)
        if filled is not draft.main:
            draft.main.update(filled)
    return draft


def _sources(
    sides: _Sides, layout: Mapping[str, tuple[str, ...]], drafts: Mapping[str, PodDraft]
) -> dict[str, Sources]:
    made = {}
    for role, path in layout.items():
        draft = drafts[role]
        main = text(part(sides.both, *path), "runner", "name") or sides.default_main
        made[role] = Sources(draft.pod, draft.service, pod_of(sides.base, path, main), tuple(draft.accelerated))
    return made


def _problems(sides: _Sides, drafts: Mapping[str, PodDraft], case: _Case, choice: Choice) -> list[Problem]:
    found = [each for each in (choice.problem, claim_problem(case.model, namespace_of(case.service))) if each]
    if case.upstream:
        for draft in drafts.values():
            left = unknown(draft.main if draft.main is not None else NOTHING)
            if left:
                said = f"OME takes {left[:60]!a} for a placeholder of its own and fails"
                found.append(Problem(f"spec.{sides.name}.runner", said, "remove it, or set upstream_selection: false"))
    return found
