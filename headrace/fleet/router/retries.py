# SPDX-License-Identifier: Apache-2.0
"""How many retries there may be. Asked by every proxy of a router before it tries again.

A backend that is slow because it has too much to do is not helped by having everything twice. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.fleet.router.settings import RetrySettings


class RetryBudget:
    """Each request earns a part of a retry; what is not used is kept, up to the reserve."""

    __slots__ = ("_credit", "_earned", "_reserve", "refused", "short", "spent")

    def __init__(self, settings: RetrySettings) -> None:
        self._earned = settings.budget
        self._reserve = float(settings.reserve)
        self._credit = self._reserve
        self.short = False
        """Whether some of the reserve is used up: else there is nothing to earn."""
        self.spent = 0
        """Retries so far."""
        self.refused = 0
        """Retries that there was no budget for."""

    def renew(self, settings: RetrySettings) -> None:
        """Other settings; what there is of the budget is kept, up to the reserve."""
        self._earned = settings.budget
        self._reserve = float(settings.reserve)
        self._credit = min(self._credit, self._reserve)
        self.short = self._credit < self._reserve

    def earn(self) -> None:
        """A request has come."""
        if self.short:
            self._credit += self._earned
            self.short = self._credit < self._reserve

    def spend(self) -> bool:
        """Whether there may be one more retry; if so, it counts."""
        if self._credit < 1.0:
            self.refused += 1
            return False
        self._credit -= 1.0
        self.short = True
        self.spent += 1
        return True
