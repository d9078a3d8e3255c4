# SPDX-License-Identifier: Apache-2.0
"""The retry budget: limits retries to a share of the requests, so that retries do not overload slow backends. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.fleet.router.settings import RetrySettings


class RetryBudget:
    """Each request earns a fraction of a retry; unused credit is kept, up to the reserve."""

    __slots__ = ("_credit", "_earned", "_reserve", "below_reserve", "refused", "spent")

    def __init__(self, settings: RetrySettings) -> None:
        self._earned = settings.budget
        self._reserve = float(settings.reserve)
        self._credit = self._reserve
        self.below_reserve = False
        """Whether the credit is below the reserve, so that requests earn credit."""
        self.spent = 0
        """Retries so far."""
        self.refused = 0
        """Retries refused for lack of budget."""

    def update(self, settings: RetrySettings) -> None:
        """Apply new settings; keep the credit, up to the reserve."""
        self._earned = settings.budget
        self._reserve = float(settings.reserve)
        self._credit = min(self._credit, self._reserve)
        self.below_reserve = self._credit < self._reserve

    def earn(self) -> None:
        """Add the credit of one request."""
        if self.below_reserve:
            self._credit += self._earned
            self.below_reserve = self._credit < self._reserve

    def spend(self) -> bool:
        """Take one retry from the budget. Returns False if there is none left."""
        if self._credit < 1.0:
            self.refused += 1
            return False
        self._credit -= 1.0
        self.below_reserve = True
        self.spent += 1
        return True
