# SPDX-License-Identifier: Apache-2.0
"""Revisions and traffic of a component: which were made, which are ready, which had all requests last.

Where Knative runs the component the names are its own. Elsewhere a revision is a digest of its pods, and gets a number here,
in the order in which they came: `llama-chat-engine-00001`. `status.components.engine.revisions` remembers which is which.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.fleet.status.observed import records
from headrace.fleet.words import Document, text, whole

if TYPE_CHECKING:
    from headrace.fleet.planning import Rollout

_SHARE = {"revisionName": str, "configurationName": str, "percent": int, "latestRevision": bool, "tag": str, "url": str}
_REMEMBERED = 10
_DIGITS = 5


@dataclass(frozen=True)
class Share:
    """A revision and its part of the requests."""

    digest: str
    percent: int
    latest: bool = False


def shares_of(rollout: Rollout) -> list[Share]:
    """The revisions of a component outside Knative, the latest first."""
    if rollout.latest == rollout.stable:
        return [Share(rollout.latest, 100, latest=True)]
    return [Share(rollout.latest, rollout.percent, latest=True), Share(rollout.stable, 100 - rollout.percent)]


def knative_revisions(live: Document | None, before: Document) -> dict[str, Any]:
    """What a Knative Service tells of its revisions."""
    created, latest = text(live, "status", "latestCreatedRevisionName"), text(live, "status", "latestReadyRevisionName")
    traffic = [
        {name: each[name] for name, kind in _SHARE.items() if type(each.get(name)) is kind}
        for each in records(live, "status", "traffic")
    ]
    return _with_rollout(created, latest, traffic, before)


def planned_revisions(
    name: str, shares: Sequence[Share], made: Collection[str], ready: Collection[str], before: Document
) -> dict[str, Any]:
    """The revisions of `llama-chat-engine`, given the digests of those that exist and of those that are ready."""
    known = _numbered(name, [each.digest for each in reversed(shares) if each.digest in made], before)
    names = {each["digest"]: each["name"] for each in known}
    latest = [each.digest for each in shares if each.latest]
    created = next((names[each] for each in latest if each in made), text(before, "latestCreatedRevision"))
    shown = next((names[each] for each in latest if each in ready), text(before, "latestReadyRevision"))
    traffic: list[dict[str, Any]] = []
    for each in shares:
        if each.digest not in made or (each.percent == 0 and not each.latest):
            continue
        share: dict[str, Any] = {"revisionName": names[each.digest], "percent": each.percent}
        traffic.append(share | ({"latestRevision": True} if each.latest else {"latestRevision": False, "tag": "prev"}))
    told = _with_rollout(created, shown, traffic, before)
    return told | ({"revisions": known} if known else {})


def _numbered(name: str, digests: Sequence[str], before: Document) -> list[dict[str, str]]:
    """The revisions that are remembered, and those that are new, each with the number after the last."""
    known = [
        {"name": text(each, "name"), "digest": text(each, "digest")}
        for each in records(before, "revisions")
        if text(each, "name") and text(each, "digest")
    ]
    for digest in digests:
        if all(each["digest"] != digest for each in known):
            last = known[-1]["name"].rpartition("-")[2] if known else "0"
            number = int(last) + 1 if last.isdecimal() and last.isascii() and len(last) < 10 else 1
            known.append({"name": f"{name}-{number:0{_DIGITS}}", "digest": digest})
    kept = [each for each in known if each["digest"] in digests]
    return [each for each in known if each in kept or each in known[-_REMEMBERED:]]


def _with_rollout(created: str, ready: str, traffic: list[dict[str, Any]], before: Document) -> dict[str, Any]:
    last, earlier = rolled_out_revisions(created, ready, traffic, before)
    told: dict[str, Any] = {
        "latestReadyRevision": ready,
        "latestCreatedRevision": created,
        "previousRolledoutRevision": earlier,
        "latestRolledoutRevision": last,
        "traffic": traffic,
    }
    return {name: value for name, value in told.items() if value}


def rolled_out_revisions(created: str, ready: str, traffic: Sequence[Document], before: Document) -> tuple[str, str]:
    """The revision that last had all requests, and the one before it.

    A revision that is rolled out and then given less than all while nothing else answers is taken back: the one before it
    counts as rolled out again, so that the next plan sends the rest of the requests there.
    """
    last, earlier = text(before, "latestRolledoutRevision"), text(before, "previousRolledoutRevision")
    share = next(
        (each for each in traffic if text(each, "revisionName") == ready and each.get("latestRevision") is True), None
    )
    percent = whole(share, "percent")
    if not ready or percent is None:
        return last, earlier
    if last != ready:
        return (ready, last) if percent == 100 else (last, earlier)
    all_of_it = sum(whole(each, "percent") or 0 for each in traffic if text(each, "revisionName") == ready)
    if ready == created and percent < 100 and all_of_it == 100 and earlier:
        return earlier, earlier
    return last, earlier
