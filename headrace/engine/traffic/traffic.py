# SPDX-License-Identifier: Apache-2.0
"""All splits of a server: set, removed and looked at while it runs.

Made by a composition root over the engine's data plane; told by the configuration, by `api.admin`, and in a server with
several workers by the others. Everything here is in the loop's thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import orjson

from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.core.names import check_name
from headrace.core.telemetry.registry import Registry
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.directory import ServedModel
from headrace.engine.traffic.accounts import Numbers
from headrace.engine.traffic.checking import check_split
from headrace.engine.traffic.choosing import Chance
from headrace.engine.traffic.entry import RolledBack, SplitEntry
from headrace.engine.traffic.keys import Headers, key_of
from headrace.engine.traffic.labels import labels_served, number_of
from headrace.engine.traffic.metrics import TrafficMetrics
from headrace.engine.traffic.parsing import split_tree
from headrace.engine.traffic.reporting import report_of, state_of
from headrace.engine.traffic.settings import Split, TrafficSettings

log = logging.getLogger("headrace.traffic")


class Traffic:
    """See the module."""

    def __init__(
        self,
        plane: DataPlane,
        registry: Registry,
        settings: TrafficSettings | None = None,
        *,
        clock: Clock | None = None,
        chance: Chance = random.random,
    ) -> None:
        self._plane = plane
        self._directory = plane.directory
        self._metrics = TrafficMetrics(registry)
        self._clock = clock or SystemClock()
        self._chance = chance
        self._entries: dict[str, SplitEntry] = {}
        self.sticky_fields: set[str] = set()
        """Fields of a body that a key is looked for in, of any split; always this set."""
        self.on_rollback: RolledBack | None = None
        """Told of a version that was rolled back here, for the other workers."""
        if settings is not None:
            self.replace(settings)

    def set(self, model: str, split: Split, *, must_exist: bool = True) -> None:
        """Share a model's traffic so from now on; counts begin anew, and rollbacks are lifted.

        Raises for a split that is wrong. Its versions must serve now, unless models are still to be loaded.
        """
        check_split(check_name(model), split)
        if must_exist:
            self._check_versions(model, split)
        entry = SplitEntry(
            model,
            split,
            clock=self._clock,
            metrics=self._metrics,
            chance=self._chance,
            started=lambda: self._plane.started,
            rolled_back=self._rolled_back,
        )
        before = self._entries.get(model)
        if before is not None:
            entry.take_over(before)
        self._entries[model] = entry
        self._look_for_fields()
        self._directory.lead(model, entry.apply)
        if before is not None:
            before.close()
        shares = " ".join(f"{version}={weight:g}" for version, weight in split.weights.items())
        log.info("model '%s': its traffic is shared: %s", model, shares)

    def remove(self, model: str) -> None:
        """Give all traffic of a model to its newest version again."""
        entry = self._entry(model)
        del self._entries[model]
        self._look_for_fields()
        self._directory.lead(model, None)
        entry.close()
        log.info("model '%s': its traffic goes to the newest version again", model)

    def replace(self, settings: TrafficSettings) -> None:
        """Have exactly these splits; one that stays the same goes on counting. Versions may be loaded later."""
        for model, split in settings.splits.items():
            check_split(check_name(model), split)
        for model in self._entries.keys() - settings.splits.keys():
            self.remove(model)
        for model, split in settings.splits.items():
            if model not in self._entries or self._entries[model].split != split:
                self.set(model, split, must_exist=False)

    def settled(self) -> None:
        """Models have been loaded: what is missing by now is told."""
        for model, entry in self._entries.items():
            if self._directory.models.get(model) is None:
                log.warning("there is a split for model '%s', which is not loaded", model)
            else:
                entry.tell_missing()

    def roll_back(self, model: str, version: str, reason: str) -> None:
        """Give a version's share to the baseline, because a person or another worker says so."""
        entry = self._entry(model)
        known = [lane for lane in entry.lanes if version in (lane.name, lane.number)]
        if not known:
            names = ", ".join(lane.name for lane in entry.lanes)
            raise NotFound(f"version '{version[:64]}' is not in the split of model '{model}'; these are: {names}")
        if known[0] is entry.baseline:
            raise FailedPrecondition(
                f"version '{version}' is the baseline of model '{model}': there is nothing to roll it back to. Set another "
                "split"
            )
        entry.roll_back(version, reason)

    def splits(self) -> dict[str, Split]:
        """Every split, by model."""
        return {model: entry.split for model, entry in self._entries.items()}

    def state(self, model: str) -> dict[str, Any]:
        """A split as it was written, and where the traffic really goes: see `reporting.state_of`."""
        return state_of(self._entry(model))

    def report(self, model: str, others: Iterable[Numbers] = ()) -> dict[str, Any]:
        """What a split has done: see `reporting.report_of`. `others` are `numbers` of other workers."""
        entry = self._entry(model)
        name = _name(entry)
        same = [numbers[name] for numbers in others if name in numbers]
        return report_of(entry, same, self._clock.wall())

    def numbers(self) -> Numbers:
        """What was counted here, for other workers: plain numbers, in objects of any depth."""
        return {_name(entry): entry.numbers() for entry in self._entries.values()}

    def key_of(self, model: str, head: Headers, fields: Mapping[str, object]) -> str:
        """Whom a request is for, as the split of its model says; "" for nobody in particular."""
        entry = self._entries.get(model)
        return key_of(entry.split.sticky, head, fields) if entry is not None else ""

    def close(self) -> None:
        """Wait for no copy."""
        for entry in self._entries.values():
            entry.close()

    def _look_for_fields(self) -> None:
        self.sticky_fields.clear()
        self.sticky_fields.update(entry.split.sticky.field for entry in self._entries.values())
        self.sticky_fields.discard("")

    def _rolled_back(self, model: str, version: str, reason: str) -> None:
        if self.on_rollback is not None:
            self.on_rollback(model, version, reason)

    def _entry(self, model: str) -> SplitEntry:
        entry = self._entries.get(model)
        if entry is None:
            raise NotFound(
                f"model '{model[:64]}' has no split: all its requests go to the newest version. Set one with "
                f"'headrace ab set MODEL 1=0.9 2=0.1'"
            )
        return entry

    def _check_versions(self, model: str, split: Split) -> None:
        served: ServedModel | None = self._directory.models.get(model)
        if served is None:
            raise NotFound(f"model '{model}' is not loaded: load it before its traffic is split")
        labels = labels_served(served)
        there = ", ".join(f"{number} ({labels[number]})" if number in labels else number for number in served.versions)
        meant: dict[str, str] = {}
        for name in (*split.weights, *split.shadows):
            number = number_of(name, labels)
            if number not in served.versions:
                raise InvalidArgument(f"model '{model}' has no version '{name[:64]}' that serves; these do: {there}")
            if number in meant:
                raise InvalidArgument(
                    f"'{meant[number]}' and '{name}' are the same version of model '{model}'; write it once"
                )
            meant[number] = name


def _name(entry: SplitEntry) -> str:
    """The same for the same split in every worker, and another when it was changed: their counts are not to be mixed."""
    return f"{entry.model}/{sha256(orjson.dumps(split_tree(entry.split))).hexdigest()[:16]}"
