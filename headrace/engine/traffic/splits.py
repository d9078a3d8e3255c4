# SPDX-License-Identifier: Apache-2.0
"""All traffic splits of a server: set, remove and report them while it runs.

A program creates it over the engine's data plane. The configuration and `api.admin` change splits; in a server with several
workers, the other workers do too. Everything runs in the event loop's thread.
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
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.directory import ServedModel
from headrace.engine.traffic.report import report_of, state_of
from headrace.engine.traffic.settings import SplitSettings, TrafficSettings, check_split, split_tree
from headrace.engine.traffic.split import RollbackCallback, TrafficSplit
from headrace.engine.traffic.statistics import Numbers, TrafficMetrics
from headrace.engine.traffic.version_choice import Headers, RandomSource, served_labels, sticky_key_of, version_number

log = logging.getLogger("headrace.traffic")


class TrafficSplits:
    """The traffic splits of a server, by model."""

    def __init__(
        self,
        plane: DataPlane,
        registry: Registry,
        settings: TrafficSettings | None = None,
        *,
        clock: Clock | None = None,
        chance: RandomSource = random.random,
    ) -> None:
        self._plane = plane
        self._directory = plane.directory
        self._metrics = TrafficMetrics(registry)
        self._clock = clock or SystemClock()
        self._chance = chance
        self._splits: dict[str, TrafficSplit] = {}
        self.sticky_fields: set[str] = set()
        """Body fields that any split uses as sticky key; always the same set object."""
        self.on_rollback: RollbackCallback | None = None
        """Notified of a rollback that was decided here, for the other workers."""
        if settings is not None:
            self.replace(settings)

    def set(self, model: str, split: SplitSettings, *, must_exist: bool = True) -> None:
        """Set the split of a model; counts and rollbacks are reset.

        Raise if the split is invalid. Its versions must serve now, unless `must_exist` is false.
        """
        check_split(check_name(model), split)
        if must_exist:
            self._check_versions(model, split)
        new = TrafficSplit(
            model,
            split,
            clock=self._clock,
            metrics=self._metrics,
            chance=self._chance,
            started=lambda: self._plane.started,
            rolled_back=self._rolled_back,
        )
        before = self._splits.get(model)
        if before is not None:
            new.take_over(before)
        self._splits[model] = new
        self._update_sticky_fields()
        self._directory.set_default(model, new.apply)
        if before is not None:
            before.close()
        shares = " ".join(f"{version}={weight:g}" for version, weight in split.weights.items())
        log.info("Model '%s': traffic split set to %s", model, shares)

    def remove(self, model: str) -> None:
        """Remove the split of a model; its newest version gets all traffic."""
        split = self._split(model)
        del self._splits[model]
        self._update_sticky_fields()
        self._directory.set_default(model, None)
        split.close()
        log.info("Model '%s': traffic split removed; the newest version gets all requests", model)

    def replace(self, settings: TrafficSettings) -> None:
        """Set exactly these splits; an unchanged split keeps its counts. Versions may be loaded later."""
        for model, split in settings.splits.items():
            check_split(check_name(model), split)
        for model in self._splits.keys() - settings.splits.keys():
            self.remove(model)
        for model, split in settings.splits.items():
            if model not in self._splits or self._splits[model].split != split:
                self.set(model, split, must_exist=False)

    def settled(self) -> None:
        """Check the splits after the initial loading of models.

        Raise `FailedPrecondition` if one names a version that its model does not have. Log what failed to load.
        """
        for model, split in self._splits.items():
            served = self._directory.models.get(model)
            if served is None:
                log.warning("Model '%s' has a traffic split and is not loaded", model)
                continue
            versions = {entry.version for entry in self._plane.states() if entry.name == model}
            for name in split.missing:
                if version_number(name, split.labels) not in versions:
                    raise FailedPrecondition(
                        f"traffic: model '{model}' has no version '{name[:64]}': it has {', '.join(sorted(versions))}; "
                        "correct the split"
                    )
            split.report_missing()

    def roll_back(self, model: str, version: str, reason: str) -> None:
        """Give a version's share to the baseline, on request of an operator or another worker."""
        split = self._split(model)
        matching = [member for member in split.versions if version in (member.name, member.number)]
        if not matching:
            names = ", ".join(member.name for member in split.versions)
            raise NotFound(f"version '{version[:64]}' is not in the split of model '{model}'; these are: {names}")
        if matching[0] is split.baseline:
            raise FailedPrecondition(
                f"version '{version}' is the baseline of model '{model}': there is nothing to roll it back to. Set another "
                "split"
            )
        split.roll_back(version, reason)

    def splits(self) -> dict[str, SplitSettings]:
        """Return the settings of every split, by model."""
        return {model: split.split for model, split in self._splits.items()}

    def state(self, model: str) -> dict[str, Any]:
        """Return a split as configured, and where its traffic actually goes (`report.state_of`)."""
        return state_of(self._split(model))

    def report(self, model: str, others: Iterable[Numbers] = ()) -> dict[str, Any]:
        """Return the report of a split (`report.report_of`). `others` are the `numbers` of other workers."""
        split = self._split(model)
        name = _name(split)
        same = [numbers[name] for numbers in others if name in numbers]
        return report_of(split, same, self._clock.wall())

    def numbers(self) -> Numbers:
        """Return the counts of this worker for other workers, as nested JSON objects."""
        return {_name(split): split.numbers() for split in self._splits.values()}

    def key_of(self, model: str, head: Headers, fields: Mapping[str, object]) -> str:
        """Return the sticky key of a request; "" if its model has no split or the request no key."""
        split = self._splits.get(model)
        return sticky_key_of(split.split.sticky, head, fields) if split is not None else ""

    def close(self) -> None:
        """Cancel the requests of all shadows."""
        for split in self._splits.values():
            split.close()

    def _update_sticky_fields(self) -> None:
        self.sticky_fields.clear()
        self.sticky_fields.update(split.split.sticky.field for split in self._splits.values())
        self.sticky_fields.discard("")

    def _rolled_back(self, model: str, version: str, reason: str) -> None:
        if self.on_rollback is not None:
            self.on_rollback(model, version, reason)

    def _split(self, model: str) -> TrafficSplit:
        split = self._splits.get(model)
        if split is None:
            raise NotFound(
                f"model '{model[:64]}' has no split: all its requests go to the newest version. Set one with "
                f"'headrace ab set MODEL 1=0.9 2=0.1'"
            )
        return split

    def _check_versions(self, model: str, split: SplitSettings) -> None:
        served: ServedModel | None = self._directory.models.get(model)
        if served is None:
            raise NotFound(f"model '{model}' is not loaded: load it before its traffic is split")
        labels = served_labels(served)
        serving = ", ".join(
            f"{number} ({labels[number]})" if number in labels else number for number in served.versions
        )
        names: dict[str, str] = {}
        for name in (*split.weights, *split.shadows):
            number = version_number(name, labels)
            if number not in served.versions:
                raise InvalidArgument(f"model '{model}' has no version '{name[:64]}' that serves; these do: {serving}")
            if number in names:
                raise InvalidArgument(
                    f"'{names[number]}' and '{name}' are the same version of model '{model}'; write it once"
                )
            names[number] = name


def _name(split: TrafficSplit) -> str:
    """Return a name that is equal in all workers for the same split, so that counts of different splits are not added."""
    return f"{split.model}/{sha256(orjson.dumps(split_tree(split.split))).hexdigest()[:16]}"
