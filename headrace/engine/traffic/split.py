# SPDX-License-Identifier: Apache-2.0
"""The traffic split of one model: takes the place of the newest version in the directory and chooses a version per request.

`splits` creates it. The directory calls `apply` whenever versions are loaded or unloaded. The share of a version that is
missing or rolled back goes to the baseline; if that is missing too, to the serving version with the largest share; otherwise
to the newest. This is logged, counted and in the report.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple, cast

from headrace.core.clock import Clock
from headrace.core.requests import InferRequest, InferResponse
from headrace.engine.repository.directory import LoadedVersion, ServedModel
from headrace.engine.scheduling.pending_request import PendingRequest, ResponseCallback, StreamCallback
from headrace.engine.traffic.settings import SplitSettings, baseline_of, shares_of
from headrace.engine.traffic.shadow import Shadow
from headrace.engine.traffic.split_version import RequestTarget, SplitVersion, SuccessCallback
from headrace.engine.traffic.statistics import Numbers, TrafficMetrics
from headrace.engine.traffic.version_choice import (
    RandomSource,
    VersionChooser,
    served_labels,
    sticky_key_in,
    version_number,
)
from headrace.models.config.types import SequenceBatching

log = logging.getLogger("headrace.traffic")

_MAX_EVENTS = 50
_MAX_SEQUENCES = 65_536
"""Open sequences whose version is remembered; the oldest are dropped."""

RollbackCallback = Callable[[str, str, str], None]
"""Notified of a rollback that was decided here: model, version, reason."""


class Route(NamedTuple):
    """The version that a share of the requests was configured for, and the version that gets them."""

    configured: SplitVersion
    actual: SplitVersion


class TrafficSplit:
    """The split of one model. Runs in the event loop's thread."""

    def __init__(
        self,
        model: str,
        split: SplitSettings,
        *,
        clock: Clock,
        metrics: TrafficMetrics,
        chance: RandomSource,
        started: Callable[[], bool],
        rolled_back: RollbackCallback,
    ) -> None:
        self.model = model
        self.split = split
        self.labels: dict[str, str] = {}
        self._clock = clock
        self._metrics = metrics
        self._started = started
        self._on_rollback = rolled_back
        self.since = clock.wall()
        baseline = baseline_of(split)
        self.versions = [
            self._split_version(name, share, judged=name != baseline)
            for name, share in shares_of(model, split.weights).items()
        ]
        for version in self.versions:
            version.create_metrics()
        self.baseline = next(version for version in self.versions if version.name == baseline)
        self.newest = self._split_version("newest", 0.0, judged=False)
        """Gets the requests if no version of the split serves."""
        self.shadows = [
            Shadow(model, name, share, split.tolerance, clock=clock, metrics=metrics, chance=chance)
            for name, share in split.shadows.items()
        ]
        self.events: deque[dict[str, str]] = deque(maxlen=_MAX_EVENTS)
        self._chooser: VersionChooser[Route] = VersionChooser(model, chance)
        self._sequences: OrderedDict[str, str] = OrderedDict()
        """For a model with sequences: the version number of each open sequence."""
        self._has_sequences = False
        self._loaded: dict[str, LoadedVersion] = {}
        self._reported_missing: set[str] = set()
        self._baseline_counts: dict[str, tuple[int, int]] = {}
        """The baseline's answered and refused requests when a version began to refuse every request."""

    def apply(self, served: ServedModel) -> object | None:
        """Update the loaded versions; return what receives requests without a version."""
        self.labels = served_labels(served) or self.labels
        for member in self._members():
            member.number = version_number(member.name, self.labels) or member.number
            member.target = cast("RequestTarget | None", served.versions.get(member.number))
        self._loaded = served.versions
        self.newest.target = cast("RequestTarget | None", served.newest)
        self.newest.number = str(served.newest.version) if served.newest is not None else ""
        self._has_sequences = any(
            isinstance(version.config.scheduling, SequenceBatching) for version in served.versions.values()
        )
        if served.versions and self._started():
            self.report_missing()
        self._update_routes()
        return self if served.versions else None

    @property
    def missing(self) -> list[str]:
        """The names of versions and shadows that do not serve."""
        return [member.name for member in self._members() if member.target is None]

    def report_missing(self) -> None:
        """Log which versions are missing, once each time they are unloaded."""
        for member in self._members():
            if member.target is not None:
                if member.name in self._reported_missing:
                    self._reported_missing.discard(member.name)
                    self._event("is back", member.name, "it is loaded again")
                    log.info("Model '%s': version '%s' of its split is loaded again", self.model, member.name)
            elif member.name not in self._reported_missing:
                self._reported_missing.add(member.name)
                is_shadow = isinstance(member, Shadow)
                effect = "its requests are not copied" if is_shadow else "its share goes to the baseline"
                self._event("is missing", member.name, effect)
                log.warning("Model '%s': version '%s' of its split is not loaded: %s", self.model, member.name, effect)

    def roll_back(self, name: str, reason: str) -> bool:
        """Give a version's share to the baseline; return False if it has none to give."""
        version = next((version for version in self.versions if name in (version.name, version.number)), None)
        if version is None or version is self.baseline or version.rolled_back:
            return False
        version.rolled_back = reason
        self._event("is rolled back", version.name, reason)
        log.warning("Model '%s': version '%s' is rolled back: %s", self.model, version.name, reason)
        self._update_routes()
        return True

    def infer(self, request: InferRequest, done: ResponseCallback) -> PendingRequest:
        """Send a request to a version of the split."""
        version, sequence = self._choose(request)
        target = cast("RequestTarget", version.target)
        return version.infer(target, request, done, self._copy_callback(request, sequence))

    def infer_stream(self, request: InferRequest, on_response: StreamCallback) -> PendingRequest:
        """Send a request with any number of responses to a version of the split."""
        version, sequence = self._choose(request)
        target = cast("RequestTarget", version.target)
        return version.infer_stream(target, request, on_response, self._copy_callback(request, sequence))

    def express(self, request: InferRequest) -> InferResponse | None:
        """Compute a request on the express path of a version; None if it must take the regular path."""
        if self._has_sequences:
            return None
        key = sticky_key_in(request, self.split.sticky)
        route = self._chooser.peek(key)
        try:
            response = route.actual.express(request)
        except Exception:
            self._take(route, key)
            raise
        if response is not None:
            self._take(route, key)
            copy = self._copy_callback(request, "")
            if copy is not None:
                copy(request, response)
        return response

    def numbers(self) -> Numbers:
        """Return the counts as JSON, for other processes."""
        return {
            "versions": {version.name: version.counts.numbers() for version in (*self.versions, self.newest)},
            "shadows": {shadow.name: shadow.numbers() for shadow in self.shadows},
        }

    def take_over(self, before: TrafficSplit) -> None:
        """Continue the sequences of a split that this one replaces."""
        self._sequences = before._sequences

    def close(self) -> None:
        """Cancel the shadows' requests."""
        for shadow in self.shadows:
            shadow.close()

    def _split_version(self, name: str, share: float, *, judged: bool) -> SplitVersion:
        rules = self.split.rollback if judged else None
        return SplitVersion(
            self.model,
            name,
            share,
            rules=rules,
            clock=self._clock,
            metrics=self._metrics,
            on_bad=self._roll_back_bad,
            on_refused=self._check_refusals,
        )

    def _roll_back_bad(self, version: SplitVersion, reason: str) -> None:
        # Without a baseline there is nothing better to give its share to.
        if not self.baseline.out and self.roll_back(version.name, reason):
            self._metrics.rollbacks(self.model, version.name).value += 1
            self._on_rollback(self.model, version.name, reason)

    def _check_refusals(self, version: SplitVersion) -> None:
        """Roll a version back if it refuses every request while the baseline answers most of its own.

        A single refused request is the caller's mistake and says nothing about the version.
        """
        rules, baseline = self.split.rollback, self.baseline.counts
        if rules is None or not rules.error_rate:
            return
        if version.refused_in_a_row == 1:
            self._baseline_counts[version.name] = baseline.answered, baseline.refused
        answered, refused = self._baseline_counts[version.name]
        answered, refused = baseline.answered - answered, baseline.refused - refused
        if version.refused_in_a_row >= rules.least_requests and answered > refused:
            self._roll_back_bad(
                version,
                f"it refused {version.refused_in_a_row} requests in a row, while the baseline answered {answered} and "
                f"refused {refused}",
            )

    def _members(self) -> list[SplitVersion | Shadow]:
        return [*self.versions, *self.shadows]

    def stand_in(self) -> SplitVersion:
        """Return the version that gets the share of versions that are out."""
        if not self.baseline.out:
            return self.baseline
        serving = [version for version in self.versions if not version.out and version.share > 0]
        return max(serving, key=lambda version: version.share, default=self.newest)

    def _update_routes(self) -> None:
        stand_in = self.stand_in()
        ordered = sorted(self.versions, key=lambda version: (int(version.number or -1), version.name))
        routes = [(version.share, Route(version, stand_in if version.out else version)) for version in ordered]
        self._chooser.set_choices(routes)

    def _choose(self, request: InferRequest) -> tuple[SplitVersion, str]:
        """Return the version for a request, and the id of its sequence, if any."""
        sequence = str(request.parameters.get("sequence_id") or "") if self._has_sequences else ""
        if sequence:
            return self._version_of_sequence(request, sequence), sequence
        key = sticky_key_in(request, self.split.sticky)
        route = self._chooser.peek(key)
        self._take(route, key)
        return route.actual, ""

    def _take(self, route: Route, key: str) -> None:
        self._chooser.take(key)
        if route.configured is not route.actual:
            route.configured.diverted()

    def _version_of_sequence(self, request: InferRequest, sequence: str) -> SplitVersion:
        """Return the version on which a sequence started: only that version knows it, whatever the shares are now."""
        starts = bool(request.parameters.get("sequence_start"))
        number = "" if starts else self._sequences.get(sequence)
        if number is None:
            return self.newest  # it started before there was a split
        version = self._version_numbered(number) if number else None
        if version is None or version.target is None:
            route = self._chooser.peek(sequence)
            self._take(route, sequence)
            version = route.actual
        if request.parameters.get("sequence_end"):
            self._sequences.pop(sequence, None)
        else:
            self._sequences[sequence] = version.number
            if len(self._sequences) > _MAX_SEQUENCES:
                self._sequences.popitem(last=False)
        return version

    def _version_numbered(self, number: str) -> SplitVersion:
        """Return a version by number. It may not be in this split: a sequence may have started under another one."""
        for version in (*self.versions, self.newest):
            if version.number == number:
                return version
        version = self._split_version(number, 0.0, judged=False)
        version.number, version.target = number, cast("RequestTarget | None", self._loaded.get(number))
        return version

    def _copy_callback(self, request: InferRequest, sequence: str) -> SuccessCallback | None:
        """Return the callback that copies a successful request to the shadows; None if no shadow wants a copy."""
        # The tensors of an ensemble step may be in device memory and are not copied.
        if not self.shadows or request.is_ensemble_step:
            return None
        wanting = [shadow for shadow in self.shadows if shadow.wants(sequence)]
        if not wanting:
            return None

        def copy(request: InferRequest, response: InferResponse) -> None:
            for shadow in wanting:
                shadow.copy(request, response)

        return copy

    def _event(self, event: str, version: str, reason: str) -> None:
        at = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="seconds")
        self.events.append({"at": at, "version": version, "what": event, "reason": reason})
