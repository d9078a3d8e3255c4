# SPDX-License-Identifier: Apache-2.0
"""The data plane and the accounts of one of several workers: what they tell is of all, what they do is done in all.

Stand in for `DataPlane` and `V1Accounts` where a server has several workers. The infer path is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headrace.api.v1.accounts import Tally, V1Accounts, V1Settings
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.engine.statistics import VersionStatistics
from headrace.programs.serve.gathering import Gathering
from headrace.programs.serve.loading import LoadEverywhere
from headrace.programs.serve.numbers import Numbers, added_up


class WorkersPlane(DataPlane):
    """One worker's models, with the numbers of all workers."""

    def __init__(self, own: DataPlane, gathering: Gathering, everywhere: LoadEverywhere) -> None:
        super().__init__(own._directory, own._control)
        self.strict_readiness = own.strict_readiness
        self._own = own
        self._gathering = gathering
        self._everywhere = everywhere

    def statistics(self, name: str = "", version: str = "") -> list[ServingVersion]:
        """See `DataPlane.statistics`; as of the last gathering."""
        return [self._of_all(each) for each in super().statistics(name, version)]

    def find(self, name: str, version: str = "") -> ServingVersion | None:
        """See `DataPlane.find`."""
        found = super().find(name, version)
        return self._of_all(found) if found is not None and self._gathering.showing else found

    async def load(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """See `DataPlane.load`; in all workers."""
        await self._everywhere.load(name, config_json, files)

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """See `DataPlane.unload`; in all workers."""
        await self._everywhere.unload(name, unload_dependents=unload_dependents)

    def _of_all(self, version: ServingVersion) -> ServingVersion:
        others = self._gathering.of_version(version.name, version.version_text)
        if not others:
            return version
        return cast("ServingVersion", _Everywhere(version, added_up(version.statistics, others)))


class _Everywhere:
    """A version to look at, whose statistics are those of all workers."""

    def __init__(self, version: ServingVersion, statistics: VersionStatistics) -> None:
        self._version = version
        self.statistics = statistics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._version, name)


class WorkersAccounts(V1Accounts):
    """The accounts of one worker; those it shows are of all."""

    def __init__(self, settings: V1Settings, gathering: Gathering, started: float) -> None:
        self._own: dict[str, Tally] = {}
        self._gathering = gathering
        super().__init__(settings)
        # The server's uptime is not that of a worker, which may be its successor's successor.
        self._started = started
        gathering.tell_also("v1", self._numbers)

    @property
    def tallies(self) -> dict[str, Tally]:
        """See `V1Accounts.tallies`; to be read."""
        made = {kind: _copied(tally) for kind, tally in self._own.items()}
        for numbers in self._gathering.others("v1"):
            for kind, (count, total_ns) in numbers["tallies"].items():
                tally = made.setdefault(kind, Tally())
                tally.count += count
                tally.total_ns += total_ns
        return made

    @tallies.setter
    def tallies(self, own: dict[str, Tally]) -> None:
        self._own = own

    def succeeded(self, kind: str, since: float) -> None:
        """See `V1Accounts.succeeded`."""
        tally = self._own[kind]
        tally.count += 1
        tally.total_ns += int((self.now() - since) * 1e9)

    def _numbers(self) -> Numbers:
        return {"tallies": {kind: [tally.count, tally.total_ns] for kind, tally in self._own.items()}}


def _copied(tally: Tally) -> Tally:
    made = Tally()
    made.count, made.total_ns = tally.count, tally.total_ns
    return made
