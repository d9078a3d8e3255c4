# SPDX-License-Identifier: Apache-2.0
"""The responses of decoupled models, counted by their place: the first response to each request, the second, and so on.

Written through a `ResponseWatch` by those who pass responses on (`execution.request_runner`, `ensembles`), in the loop's
thread; read by the protocols' statistics. Other models have none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from headrace.core.errors import HeadraceError
from headrace.core.tensors import Tensor

MOST_PLACES = 1000
"""Responses from this place on are counted together: a stream may be endless."""


class ResponseStats:
    """Responses of one place; of times, what went by since the response before."""

    __slots__ = (
        "cancel",
        "cancel_ns",
        "empty",
        "empty_ns",
        "fail",
        "fail_ns",
        "infer_ns",
        "output_ns",
        "success",
        "success_ns",
    )

    def __init__(self) -> None:
        self.success = self.success_ns = self.fail = self.fail_ns = 0
        self.empty = self.empty_ns = self.cancel = self.cancel_ns = 0
        self.infer_ns = self.output_ns = 0


ByPlace = dict[int, ResponseStats]


def place_text(place: int) -> str:
    """What a place is called in statistics."""
    return f"{MOST_PLACES}+" if place >= MOST_PLACES else str(place)


class ResponseWatch:
    """The responses to one request."""

    __slots__ = ("_by_place", "_place", "_since_ns")

    def __init__(self, by_place: ByPlace, started_ns: int) -> None:
        self._by_place = by_place
        self._place = 0
        self._since_ns = started_ns

    def given(self, answer: Sequence[Tensor] | HeadraceError | None, given_ns: int, *, cancelled: bool) -> None:
        """The model gave a response at that time, and what it gave has been looked at; None for an empty last one."""
        now_ns = monotonic_ns()
        infer_ns, output_ns = given_ns - self._since_ns, now_ns - given_ns
        stats = self._by_place.get(self._place)
        if stats is None:
            stats = self._by_place[self._place] = ResponseStats()
        if cancelled:
            stats.cancel += 1
            stats.cancel_ns += infer_ns + output_ns
        elif answer is None:
            stats.infer_ns += infer_ns
            stats.empty += 1
            stats.empty_ns += infer_ns
        else:
            stats.infer_ns += infer_ns
            stats.output_ns += output_ns
            if isinstance(answer, HeadraceError):
                stats.fail += 1
                stats.fail_ns += infer_ns + output_ns
            else:
                stats.success += 1
                stats.success_ns += infer_ns + output_ns
        self._since_ns = now_ns
        self._place = min(self._place + 1, MOST_PLACES)
