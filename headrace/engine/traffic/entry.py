# SPDX-License-Identifier: Apache-2.0
"""The split of one model: stands in the directory where the newest version would, and chooses one for each request.

Made by `traffic`. The directory asks it anew whenever versions come or go (`apply`). The share of a version that is missing
or rolled back goes to the baseline; if that is missing too, to the version of the largest share that serves; else to the
newest. This is logged, counted and in the report, never silent.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple, cast

from headrace.core.clock import Clock
from headrace.core.messages import InferRequest, InferResponse
from headrace.engine.repository.contract import LoadedVersion
from headrace.engine.repository.directory import ServedModel
from headrace.engine.scheduling.pending import Answered, Done, Pending
from headrace.engine.traffic.accounts import Numbers
from headrace.engine.traffic.checking import baseline_of, shares_of
from headrace.engine.traffic.choosing import Chance, Chooser
from headrace.engine.traffic.keys import key_in
from headrace.engine.traffic.labels import labels_served, number_of
from headrace.engine.traffic.lanes import Answer, Lane, Serving
from headrace.engine.traffic.metrics import TrafficMetrics
from headrace.engine.traffic.settings import Split
from headrace.engine.traffic.shadowing import Shadow
from headrace.models.config.types import SequenceBatching

log = logging.getLogger("headrace.traffic")

_EVENTS = 50
_SEQUENCES = 65_536
"""Sequences under way whose version is remembered; of more, the oldest are forgotten."""

RolledBack = Callable[[str, str, str], None]
"""Hears of a rollback that was decided here: model, version, reason."""


class Way(NamedTuple):
    """Where a share of the requests goes."""

    meant: Lane
    lane: Lane


class SplitEntry:
    """See the module. In the loop's thread."""

    def __init__(
        self,
        model: str,
        split: Split,
        *,
        clock: Clock,
        metrics: TrafficMetrics,
        chance: Chance,
        started: Callable[[], bool],
        rolled_back: RolledBack,
    ) -> None:
        self.model = model
        self.split = split
        self.labels: dict[str, str] = {}
        self._clock = clock
        self._metrics = metrics
        self._started = started
        self._tell_rolled_back = rolled_back
        self.since = clock.wall()
        standard = baseline_of(split)
        self.lanes = [
            self._lane(name, share, judged=name != standard) for name, share in shares_of(model, split.weights).items()
        ]
        for lane in self.lanes:
            lane.show()
        self.baseline = next(lane for lane in self.lanes if lane.name == standard)
        self.newest = self._lane("newest", 0.0, judged=False)
        """Stands in when none of the others serves."""
        self.shadows = [
            Shadow(model, name, share, split.tolerance, clock=clock, metrics=metrics, chance=chance)
            for name, share in split.shadows.items()
        ]
        self.events: deque[dict[str, str]] = deque(maxlen=_EVENTS)
        self._chooser: Chooser[Way] = Chooser(model, chance)
        self._sequences: OrderedDict[str, str] = OrderedDict()
        """Of a model with sequences: the number of the version that has each."""
        self._has_sequences = False
        self._versions: dict[str, LoadedVersion] = {}
        self._told_missing: set[str] = set()
        self._when_refused: dict[str, tuple[int, int]] = {}
        """What the baseline had answered and refused when a version began to refuse everything."""

    def apply(self, served: ServedModel) -> object | None:
        """These versions are there now. Returns what requests without a version go to."""
        self.labels = labels_served(served) or self.labels
        for one in self._all():
            one.number = number_of(one.name, self.labels) or one.number
            one.version = cast("Serving | None", served.versions.get(one.number))
        self._versions = served.versions
        self.newest.version = cast("Serving | None", served.newest)
        self.newest.number = str(served.newest.version) if served.newest is not None else ""
        self._has_sequences = any(
            isinstance(version.config.scheduling, SequenceBatching) for version in served.versions.values()
        )
        if served.versions and self._started():
            self.tell_missing()
        self._share_out()
        return self if served.versions else None

    def tell_missing(self) -> None:
        """Say which versions are not there, once each time they leave."""
        for one in self._all():
            if one.version is not None:
                if one.name in self._told_missing:
                    self._told_missing.discard(one.name)
                    self._event("is back", one.name, "it is loaded again")
                    log.info("model '%s': version '%s' of its split is back", self.model, one.name)
            elif one.name not in self._told_missing:
                self._told_missing.add(one.name)
                instead = "its requests are not copied" if isinstance(one, Shadow) else "its share goes to the baseline"
                self._event("is missing", one.name, instead)
                log.warning("model '%s': version '%s' of its split is not loaded: %s", self.model, one.name, instead)

    def roll_back(self, name: str, reason: str) -> bool:
        """Give a version's share to the baseline; False if it had none to give."""
        lane = next((lane for lane in self.lanes if name in (lane.name, lane.number)), None)
        if lane is None or lane is self.baseline or lane.rolled_back:
            return False
        lane.rolled_back = reason
        self._event("is rolled back", lane.name, reason)
        log.warning("model '%s': version '%s' is rolled back: %s", self.model, lane.name, reason)
        self._share_out()
        return True

    def infer(self, request: InferRequest, done: Done) -> Pending:
        """See `ModelVersion.infer`."""
        lane, sequence = self._take(request)
        return lane.infer(cast("Serving", lane.version), request, done, self._heard(request, sequence))

    def infer_stream(self, request: InferRequest, answered: Answered) -> Pending:
        """See `ModelVersion.infer_stream`."""
        lane, sequence = self._take(request)
        return lane.infer_stream(cast("Serving", lane.version), request, answered, self._heard(request, sequence))

    def express(self, request: InferRequest) -> InferResponse | None:
        """See `ModelVersion.express`."""
        if self._has_sequences:
            return None
        key = key_in(request, self.split.sticky)
        way = self._chooser.peek(key)
        try:
            response = way.lane.answer(request)
        except Exception:
            self._followed(way, key)
            raise
        if response is not None:
            self._followed(way, key)
            heard = self._heard(request, "")
            if heard is not None:
                heard(request, response)
        return response

    def numbers(self) -> Numbers:
        """What was counted, as JSON for other processes."""
        return {
            "lanes": {lane.name: lane.account.numbers() for lane in (*self.lanes, self.newest)},
            "shadows": {shadow.name: shadow.numbers() for shadow in self.shadows},
        }

    def take_over(self, before: SplitEntry) -> None:
        """Go on with the sequences of a split that this one replaces."""
        self._sequences = before._sequences

    def close(self) -> None:
        """Copies that are under way are not waited for."""
        for shadow in self.shadows:
            shadow.close()

    def _lane(self, name: str, share: float, *, judged: bool) -> Lane:
        rules = self.split.rollback if judged else None
        return Lane(
            self.model,
            name,
            share,
            rules=rules,
            clock=self._clock,
            metrics=self._metrics,
            on_bad=self._bad,
            on_refused=self._refused,
        )

    def _bad(self, lane: Lane, reason: str) -> None:
        # Without a baseline there is nothing better to give its share to.
        if not self.baseline.out and self.roll_back(lane.name, reason):
            self._metrics.rollbacks(self.model, lane.name).value += 1
            self._tell_rolled_back(self.model, lane.name, reason)

    def _refused(self, lane: Lane) -> None:
        """A wrong request says nothing about a version; that it answers none of those that the baseline does, all."""
        rules, account = self.split.rollback, self.baseline.account
        if rules is None or not rules.error_rate:
            return
        if lane.refused_in_a_row == 1:
            self._when_refused[lane.name] = account.answered, account.refused
        answered, refused = self._when_refused[lane.name]
        answered, refused = account.answered - answered, account.refused - refused
        if lane.refused_in_a_row >= rules.least_requests and answered > refused:
            self._bad(
                lane,
                f"it refused {lane.refused_in_a_row} requests in a row, while the baseline answered {answered} and "
                f"refused {refused}",
            )

    def _all(self) -> list[Lane | Shadow]:
        return [*self.lanes, *self.shadows]

    def stand_in(self) -> Lane:
        """Who gets the share of a version that is out."""
        if not self.baseline.out:
            return self.baseline
        well = [lane for lane in self.lanes if not lane.out and lane.share > 0]
        return max(well, key=lambda lane: lane.share, default=self.newest)

    def _share_out(self) -> None:
        stand_in = self.stand_in()
        ordered = sorted(self.lanes, key=lambda lane: (int(lane.number or -1), lane.name))
        self._chooser.share_out([(lane.share, Way(lane, stand_in if lane.out else lane)) for lane in ordered])

    def _take(self, request: InferRequest) -> tuple[Lane, str]:
        """The version for a request, and the sequence it belongs to, if any."""
        sequence = str(request.parameters.get("sequence_id") or "") if self._has_sequences else ""
        if sequence:
            return self._of_sequence(request, sequence), sequence
        key = key_in(request, self.split.sticky)
        way = self._chooser.peek(key)
        self._followed(way, key)
        return way.lane, ""

    def _followed(self, way: Way, key: str) -> None:
        self._chooser.take(key)
        if way.meant is not way.lane:
            way.meant.diverted()

    def _of_sequence(self, request: InferRequest, sequence: str) -> Lane:
        """A sequence stays where it began, whatever becomes of the shares; it is nowhere else known."""
        starts = bool(request.parameters.get("sequence_start"))
        number = "" if starts else self._sequences.get(sequence)
        if number is None:
            return self.newest  # it began before there was a split
        lane = self._numbered(number) if number else None
        if lane is None or lane.version is None:
            way = self._chooser.peek(sequence)
            self._followed(way, sequence)
            lane = way.lane
        if request.parameters.get("sequence_end"):
            self._sequences.pop(sequence, None)
        else:
            self._sequences[sequence] = lane.number
            if len(self._sequences) > _SEQUENCES:
                self._sequences.popitem(last=False)
        return lane

    def _numbered(self, number: str) -> Lane:
        """The lane of a version, which need not be in this split: a sequence may have begun under another."""
        for lane in (*self.lanes, self.newest):
            if lane.number == number:
                return lane
        lane = self._lane(number, 0.0, judged=False)
        lane.number, lane.version = number, cast("Serving | None", self._versions.get(number))
        return lane

    def _heard(self, request: InferRequest, sequence: str) -> Answer | None:
        """Who is told of a good answer: the shadows that want a copy."""
        # A step of an ensemble may lie in the memory of a device, and is not copied.
        if not self.shadows or request.inside:
            return None
        wanting = [shadow for shadow in self.shadows if shadow.wants(sequence)]
        if not wanting:
            return None

        def heard(request: InferRequest, response: InferResponse) -> None:
            for shadow in wanting:
                shadow.copy(request, response)

        return heard

    def _event(self, what: str, version: str, reason: str) -> None:
        at = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="seconds")
        self.events.append({"at": at, "version": version, "what": what, "reason": reason})
