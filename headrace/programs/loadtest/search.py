# SPDX-License-Identifier: Apache-2.0
"""Search for the settings with the highest throughput within a latency target, by measurement.

Coordinate ascent: changes one setting after the other as long as the throughput rises. Measurements are noisy: a costlier
setting must be better by more than the noise, and the best ones are measured again before one wins. Server and configuration
are behind two functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.programs.loadtest.results import RunResults
from headrace.programs.loadtest.tuning import Setting, Space

WORTH = 0.05
"""Minimum gain that justifies a costlier setting."""
NOISE = 0.03
"""Smaller differences are noise, whatever the repeats say."""
_HOPELESS = 0.6
"""Settings below this share of the best, with as many clients, are dropped."""
_WITH_FEWER = 0.9
"""Fewer clients do not raise throughput: a setting that misses the target below this share cannot win."""
_NEAR = 0.15
"""Settings this close to the best by one measurement may be as good."""
_REPEATS = 3
_PASSES = 2
_FIRST_CONCURRENCY = 4


@dataclass(frozen=True)
class Trial:
    """One measurement of one setting."""

    setting: Setting
    concurrency: int
    results: RunResults | None
    """None if the server refused the setting."""
    latency_ms: float
    """The percentile to compare."""
    ok: bool
    """Whether it meets the target without errors."""
    reason: str = ""
    """Why not."""

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return 0.0 if self.results is None else self.results.throughput


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    winner: Trial | None
    """None if no setting meets the target."""
    throughput: float
    """Throughput of the winner; the mean of its repeats, if it was repeated."""
    start: Trial | None
    """The best trial of the initial setting; None if it misses the target."""
    notes: Sequence[str]
    trials: Sequence[Trial]


class Search:
    """One search.

    `apply` applies a setting to the server, or raises `HeadraceError`; `measure` runs a closed loop of some clients;
    `on_trial` is called for each trial.
    """

    def __init__(
        self,
        apply: Callable[[Setting], Awaitable[None]],
        measure: Callable[[int], Awaitable[RunResults]],
        *,
        target_ms: float,
        share: float = 99.0,
        max_concurrency: int = 256,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self._apply = apply
        self._measure = measure
        self._target_ms = target_ms
        self._share = share
        self._max_concurrency = max_concurrency
        self._on_trial = on_trial
        self._best: dict[Setting, Trial | None] = {}
        self._start: Setting | None = None
        self._space: Space | None = None
        self._concurrency = _FIRST_CONCURRENCY
        self.trials: list[Trial] = []

    async def run(self, start: Setting, space: Space) -> SearchResult:
        """Search, beginning with a setting."""
        self._start = start
        self._space = space
        await self._score(start)
        current = Setting(
            _nearest(start.max_batch_size, space.batches),
            start.delay_microseconds,
            _nearest(start.instances, space.instances),
        )
        await self._score(current)
        for _ in range(_PASSES):
            before = current
            current = await self._walk(current, "delay_microseconds", space.delays)
            if current.batches_requests:
                current = await self._walk(current, "max_batch_size", space.batches)
            current = await self._walk(current, "instances", space.instances)
            if current == before:
                break
        return await self._decide()

    async def _walk(self, current: Setting, name: str, values: Sequence[Any]) -> Setting:
        """Raise and then lower one setting, as long as the throughput rises."""
        for direction in (1, -1):
            index = values.index(getattr(current, name))
            while 0 <= (index := index + direction) < len(values):
                candidate = replace(current, **{name: values[index]})
                if not self._pays(await self._score(candidate), current):
                    break
                current = candidate
        return current

    def _pays(self, candidate: Trial | None, current: Setting) -> bool:
        if candidate is None:
            return False
        now = self._best[current]
        if now is None:
            return True
        if self._cost(candidate.setting) > self._cost(current):
            return candidate.throughput > now.throughput * (1 + WORTH)
        # Compared with the best so far, so that many small losses do not add up.
        peak = max(trial.throughput for trial in self._allowed())
        return candidate.throughput >= peak * (1 - NOISE)

    def _cost(self, setting: Setting) -> tuple[int, int, int]:
        """Return the cost of a setting: instances cost memory, a delay costs latency, another limit is a surprise."""
        delay = -1 if setting.delay_microseconds is None else setting.delay_microseconds
        limit = setting.max_batch_size if self._start is None else self._start.max_batch_size
        return setting.instances, delay, abs(setting.max_batch_size - limit)

    async def _score(self, setting: Setting) -> Trial | None:
        """Return the best trial of a setting within the target, over numbers of clients; cached."""
        if setting not in self._best:
            try:
                await self._apply(setting)
            except HeadraceError as error:
                self._record(Trial(setting, 0, None, float("nan"), False, error.message))
                self._best[setting] = None
            else:
                self._best[setting] = await self._climb(setting)
            if allowed := self._allowed():
                self._concurrency = max(allowed, key=lambda trial: trial.throughput).concurrency
        return self._best[setting]

    def _allowed(self) -> list[Trial]:
        """Return the best trial of each allowed setting; the initial one may not be allowed."""
        return [
            trial
            for setting, trial in self._best.items()
            if trial is not None and (self._space is None or setting in self._space)
        ]

    async def _climb(self, setting: Setting) -> Trial | None:
        """Reduce the clients until the target is met, or raise them while the throughput rises."""
        first = clients = min(self._concurrency, self._max_concurrency)
        trial = await self._try(setting, clients)
        while not trial.ok and clients > 1:
            if self._is_behind(trial, _WITH_FEWER):
                return None
            clients //= 2
            trial = await self._try(setting, clients)
        if not trial.ok:
            return None
        best = trial
        if clients < first or self._is_behind(best, _HOPELESS):
            return best
        while clients * 2 <= self._max_concurrency:
            clients *= 2
            trial = await self._try(setting, clients)
            gained = trial.throughput > best.throughput * (1 + NOISE)
            # More clients without more throughput only wait longer.
            if not trial.ok or not gained:
                break
            best = trial
        return best

    def _is_behind(self, trial: Trial, share: float) -> bool:
        """Return whether other settings reach much more with no more clients."""
        rivals = [other.throughput for other in self._allowed() if other.concurrency <= trial.concurrency]
        return bool(rivals) and trial.throughput < max(rivals) * share

    async def _try(self, setting: Setting, clients: int) -> Trial:
        """Measure; once more if only the tail missed the target, which may be a hiccup of the machine."""
        trial = self._record(self._judge(setting, clients, await self._measure(clients)))
        results = trial.results
        if not trial.ok and results is not None and not results.failed and results.at(50) <= self._target_ms / 2:
            trial = self._record(self._judge(setting, clients, await self._measure(clients)))
        return trial

    def _judge(self, setting: Setting, clients: int, results: RunResults) -> Trial:
        latency = results.at(self._share)
        reason = ""
        if results.failed:
            kind = next(iter(results.errors))
            reason = f"{results.failed} of {results.requests} failed: {kind}: {results.examples.get(kind, '')}"
        elif not len(results.latencies_ms):
            reason = "no answer"
        elif latency > self._target_ms:
            reason = f"p{self._share:g} over {self._target_ms:g} ms"
        return Trial(setting, clients, results, latency, not reason, reason)

    def _record(self, trial: Trial) -> Trial:
        self.trials.append(trial)
        if self._on_trial is not None:
            self._on_trial(trial)
        return trial

    async def _decide(self) -> SearchResult:
        """Measure the best settings again, in turns, and return the winner."""
        start = self._best.get(self._start) if self._start is not None else None
        ranked = sorted(self._allowed(), key=lambda trial: -trial.throughput)
        if not ranked:
            return SearchResult(None, 0.0, start, [self._explain_failure()], self.trials)
        if len(ranked) == 1:
            return SearchResult(
                ranked[0], ranked[0].throughput, start, ["only one setting keeps the target"], self.trials
            )
        # One lucky measurement may have favoured a costly setting: the cheapest one close to it is measured again, too.
        close = [trial for trial in ranked if trial.throughput >= ranked[0].throughput * (1 - _NEAR)]
        simplest = min(close, key=lambda trial: self._cost(trial.setting))
        chosen = ranked[:2] if simplest in ranked[:2] else [*ranked[:2], simplest]
        rivals = [(trial.setting, trial.concurrency) for trial in chosen]
        repeats = await self._repeat_trials(rivals)
        if not any(map(_meets_target, repeats.values())):
            # At the edge of the target one hiccup decides: a slightly lower load is safe.
            repeats = await self._repeat_trials([(setting, max(clients // 2, 1)) for setting, clients in rivals])
        return self._compare(repeats, start)

    async def _repeat_trials(self, rivals: Sequence[tuple[Setting, int]]) -> dict[Setting, list[Trial]]:
        """Measure in turns, so that changes of the machine affect all settings."""
        repeats: dict[Setting, list[Trial]] = {setting: [] for setting, _ in rivals}
        for _ in range(_REPEATS):
            for setting, clients in rivals:
                await self._apply(setting)
                repeats[setting].append(await self._try(setting, clients))
        return repeats

    def _compare(self, repeats: dict[Setting, list[Trial]], start: Trial | None) -> SearchResult:
        steady = [setting for setting in repeats if _meets_target(repeats[setting])]
        notes = [
            f"{setting}: did not keep the target when it was measured again"
            for setting in repeats
            if setting not in steady
        ]
        if not steady:
            notes.append("the best are at the edge of the target: give --latency-target-ms some room")
            steady = list(repeats)
        means = {setting: fmean(trial.throughput for trial in repeats[setting]) for setting in steady}
        top = max(steady, key=lambda setting: means[setting])
        noise = max(NOISE * means[top], fmean(_range(repeats[setting]) for setting in steady))
        equals = [setting for setting in steady if means[top] - means[setting] <= noise]
        winner = min(equals, key=self._cost)
        if len(equals) > 1:
            notes.append(
                f"the best {len(equals)} differ by no more than the noise ({noise:.1f} requests/s): the simplest is taken"
            )
        elif len(steady) > 1:
            runner_up = max((setting for setting in steady if setting != winner), key=lambda setting: means[setting])
            gain = means[winner] / means[runner_up] - 1 if means[runner_up] else 1.0
            notes.append(f"measured again {_REPEATS} times, it is {gain:.0%} ahead of the next best: {runner_up}")
        best = next((trial for trial in repeats[winner] if trial.ok), repeats[winner][0])
        return SearchResult(best, means[winner], start, notes, self.trials)

    def _explain_failure(self) -> str:
        measured = [trial for trial in self.trials if trial.results is not None and trial.latency_ms > 0]
        if not measured:
            return f"nothing could be measured: {self.trials[0].reason if self.trials else 'no trial'}"
        lowest = min(measured, key=lambda trial: trial.latency_ms)
        lowest_text = f"the lowest p{self._share:g} was {lowest.latency_ms:.2f} ms, with {lowest.concurrency} client(s)"
        return f"no setting keeps p{self._share:g} within {self._target_ms:g} ms: {lowest_text} and {lowest.setting}"


def _nearest(value: int, allowed: Sequence[int]) -> int:
    """Return the value, or the largest allowed one."""
    return value if value in allowed else max(allowed)


def _range(trials: Sequence[Trial]) -> float:
    numbers = [trial.throughput for trial in trials]
    return max(numbers) - min(numbers)


def _meets_target(trials: Sequence[Trial]) -> bool:
    """Return whether most repeats are within the target."""
    return sum(trial.ok for trial in trials) * 2 > len(trials)
