# SPDX-License-Identifier: Apache-2.0
"""Which versions a scrape tells of, and what they have counted in all.

Read by `collector` at every scrape. What has been told may not be taken back, because Prometheus reads a counter that
falls as a restart from zero:

- A version that is loaded anew goes on counting from where the copy before it is, or ends up: that one may still have
  requests in flight.
- A version that is unloaded is told of for five more minutes, as long as Prometheus looks back, so that its last numbers
  are seen; if it comes back in that time it goes on counting. Then its series end, and begin at zero if it comes later.

Keeps statistics and no version: a model that was unloaded must not stay in memory because it was once scraped.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.api.metrics.columns import Row, row_of, rows_added
from headrace.core.clock import Clock
from headrace.engine.dataplane import ServingVersion
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import ModelConfig

KEPT_SECONDS = 300.0

Key = tuple[str, int]
"""A model and the number of a version."""


class Account:
    """What one version of a model has counted, whichever copies of it there were."""

    def __init__(self, version: ServingVersion) -> None:
        self.name = version.name
        self.version = version.version
        self.version_text = version.version_text
        self.config: ModelConfig = version.config
        self.gone_since: float | None = None
        self._statistics: VersionStatistics = version.statistics
        self._retiring: list[tuple[VersionStatistics, bool]] = []
        self._before: Row | None = None
        """Of copies that will count no more."""

    @property
    def _cached(self) -> bool:
        return self.config.response_cache

    def serves(self, version: ServingVersion) -> None:
        """This copy serves now."""
        self.gone_since = None
        if version.statistics is not self._statistics:
            self._retiring.append((self._statistics, self._cached))
            self._statistics, self.config = version.statistics, version.config

    def row(self) -> Row:
        """All that was counted so far."""
        self._close_books()
        row = row_of(self._statistics, cached=self._cached)
        for statistics, cached in self._retiring:
            row = rows_added(row, row_of(statistics, cached=cached))
        return row if self._before is None else rows_added(row, self._before)

    def _close_books(self) -> None:
        for copy in list(self._retiring):
            statistics, cached = copy
            if not statistics.in_flight:
                self._retiring.remove(copy)
                row = row_of(statistics, cached=cached)
                self._before = row if self._before is None else rows_added(self._before, row)


class Ledger:
    """The accounts of all versions."""

    def __init__(self, clock: Clock, kept_seconds: float = KEPT_SECONDS) -> None:
        self._clock = clock
        self._kept_seconds = kept_seconds
        self._accounts: dict[Key, Account] = {}

    def review(self, versions: Iterable[ServingVersion]) -> list[tuple[Account, ServingVersion | None]]:
        """The versions to tell of when these serve, and the copies that do; None for one that has gone."""
        accounts = self._accounts
        told: dict[Key, tuple[Account, ServingVersion | None]] = {}
        for version in versions:
            key = (version.name, version.version)
            account = accounts.get(key) or accounts.setdefault(key, Account(version))
            account.serves(version)
            told[key] = account, version
        now = self._clock.monotonic()
        for key in [key for key in accounts if key not in told]:
            account = accounts[key]
            if account.gone_since is None:
                account.gone_since = now
            if now - account.gone_since > self._kept_seconds:
                del accounts[key]
            else:
                told[key] = account, None
        return list(told.values())
