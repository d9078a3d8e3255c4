# SPDX-License-Identifier: Apache-2.0
"""What the routers of this machine see of a workload's pods: requests at once, and requests that came. For `keeping`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.fleet.local.commands import ADDRESS

_Seen = tuple[str, str]
"""A router, and a backend of it."""


@dataclass(frozen=True)
class Load:
    """Of one workload at one moment."""

    at_once: int
    arrived: int
    """Since somebody counts; never fewer than before."""
    routed: bool
    """Whether some router knows any of its pods."""


class Arrivals:
    """Counts on, whatever becomes of pods and routers."""

    def __init__(self) -> None:
        self._known: dict[_Seen, int] = {}
        self._total = 0
        self._begun = False

    def look(self, told: Mapping[str, Mapping[str, Any] | None], ports: Collection[int]) -> Load:
        """told: what routers tell, by their names; None of one that does not answer. ports: of the pods."""
        urls = {f"http://{ADDRESS}:{each}" for each in ports}
        at_once, routed = 0, False
        known: dict[_Seen, int] = {}
        for router, status in told.items():
            if status is None:
                known |= {seen: count for seen, count in self._known.items() if seen[0] == router}
                continue
            all_ = _mappings(status.get("backends"))
            mine = [each for each in all_ if each.get("url") in urls]
            routed = routed or bool(mine)
            for each in mine:
                count = _number(each, "requests") - _number(each, "retries")
                seen = (router, str(each["url"]))
                # One that was not there before has all its requests since; what fell has begun anew.
                before = self._known.get(seen, 0 if self._begun else count)
                self._total += count - before if count >= before else count
                known[seen] = count
                at_once += _number(each, "outstanding")
            leaving = [each for each in _mappings(status.get("leaving")) if each.get("url") in urls]
            at_once += sum(_number(each, "outstanding") for each in leaving)
            if mine:
                # Those that wait for room wait for all of them alike.
                at_once += round(_number(status, "queued") * len(mine) / len(all_))
        self._known, self._begun = known, True
        return Load(at_once, self._total, routed)


def _mappings(found: Any) -> Sequence[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _number(told: Mapping[str, Any], name: str) -> int:
    found = told.get(name)
    return found if isinstance(found, int) else 0
