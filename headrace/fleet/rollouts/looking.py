# SPDX-License-Identifier: Apache-2.0
"""One look at the rollouts of a service, for the controllers: a plan and what routers counted, to the next states. Pure.

Called after a plan was carried out and before the status is told: `status` takes over what stands in the service's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headrace.fleet.rollouts.advancing import Look, Note, advance
from headrace.fleet.rollouts.counts import Counted
from headrace.fleet.rollouts.policy import STEPPED
from headrace.fleet.rollouts.state import state_of, told_of
from headrace.fleet.words import Document, part

if TYPE_CHECKING:
    from headrace.fleet.planning import Plan


def rolled_on(service: Document, plan: Plan, counted: Counted | None, now: datetime) -> tuple[Document, Sequence[Note]]:
    """The service with the next states of its rollouts in its status, and the events. The same object if nothing changed."""
    told = part(service, "status", "components")
    changed: dict[str, Any] = {}
    notes: list[Note] = []
    for name in STEPPED:
        roll = plan.rollouts.get(name)
        if roll is None:
            continue
        before = part(told, name)
        ready = roll.percent > 0 or roll.settled
        seen = name in plan.counted
        look = Look(name, roll.latest, roll.stable, roll.judged, ready, roll.settled, roll.stuck, seen, counted)
        state, said = advance(roll.policy, state_of(before), look, now)
        notes += said
        after = {key: value for key, value in before.items() if key != "rollout"}
        if state is not None:
            after["rollout"] = told_of(state, roll.policy)
        if after != before:
            changed[name] = after
    if not changed:
        return service, notes
    return {**service, "status": {**part(service, "status"), "components": {**told, **changed}}}, notes


def under_way(service: Document) -> bool:
    """Whether some rollout of a service is to be looked at again before anything else changes."""
    found = (state_of(part(service, "status", "components", name)) for name in STEPPED)
    return any(each is not None and not each.over for each in found)
