# SPDX-License-Identifier: Apache-2.0
"""The search over made-up models: it finds the best, survives noise, prefers the simpler, and says what is not so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from load_fakes import run_of

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.programs.loadtest.results import RunResults
from headrace.programs.loadtest.search import Search, SearchResult
from headrace.programs.loadtest.tuning import Setting, Space, setting_of, space_of, with_setting

SPACE = Space((1, 2, 4, 8, 16), (None, 0, 100, 500), (1, 2, 4))
START = Setting(16, None, 1)


@dataclass
class Model:
    """Computes a batch in `fixed + each * rows` milliseconds; so many instances at once help."""

    fixed_ms: float = 2.0
    each_ms: float = 0.1
    useful_instances: int = 2
    noise: float = 0.0
    hiccups: float = 0.0
    refuses: Callable[[Setting], bool] = lambda setting: False
    setting: Setting = START
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    applied: list[Setting] = field(default_factory=list)

    async def apply(self, setting: Setting) -> None:
        if self.refuses(setting):
            raise FailedPrecondition("too much memory")
        self.setting = setting
        self.applied.append(setting)

    async def measure(self, clients: int) -> RunResults:
        instances = min(self.setting.instances, self.useful_instances)
        rows = min(self.setting.max_batch_size, max(clients // instances, 1)) if self.setting.batches_requests else 1
        batch_ms = self.fixed_ms + self.each_ms * rows + (self.setting.delay_microseconds or 0) / 1000
        most = instances * rows / batch_ms * 1000
        throughput = min(most, clients / batch_ms * 1000)
        latency = max(batch_ms, clients / throughput * 1000)
        throughput *= 1 + self.noise * self.chance.uniform(-1, 1)
        tail = 1000.0 if self.chance.random() < self.hiccups else latency
        return run_of([latency] * 98 + [tail] * 2, throughput=throughput, load=clients)


def search(model: Model, *, target_ms: float = 20.0, start: Setting = START, space: Space = SPACE) -> SearchResult:
    return asyncio.run(Search(model.apply, model.measure, target_ms=target_ms, max_concurrency=128).run(start, space))


def test_it_joins_requests_and_uses_the_instances_that_help() -> None:
    best = search(Model())
    assert best.winner is not None
    assert best.winner.setting == Setting(16, 0, 2)
    assert best.start is not None
    assert best.throughput > 5 * best.start.throughput
    assert best.winner.latency_ms <= 20


@pytest.mark.parametrize("seed", range(8))
def test_noise_and_hiccups_do_not_lead_it_astray(seed: int) -> None:
    best = search(Model(noise=0.02, hiccups=0.1, chance=random.Random(seed)))
    assert best.winner is not None
    # As good as the best, but for the noise; more instances than help are never taken.
    assert best.throughput > 0.8 * 2 * 16 / 3.6 * 1000
    assert best.winner.setting.instances <= 2


def test_the_simpler_of_two_equals_is_chosen() -> None:
    best = search(Model(useful_instances=1), start=Setting(16, 0, 1))
    assert best.winner is not None
    assert best.winner.setting == Setting(16, 0, 1)
    assert any("noise" in note or "ahead" in note for note in best.notes)


def test_a_present_setting_with_too_many_instances_is_made_simpler() -> None:
    best = search(Model(useful_instances=1), start=Setting(16, 0, 4))
    assert best.winner is not None
    assert best.winner.setting.instances == 1


def test_an_unreachable_target_is_reported_with_the_lowest() -> None:
    best = search(Model(fixed_ms=50.0))
    assert best.winner is None
    assert best.start is None
    assert "no setting keeps p99 within 20 ms: the lowest p99 was 50.10 ms" in best.notes[0]


def test_a_setting_that_the_server_refuses_is_a_trial_and_no_end() -> None:
    best = search(Model(refuses=lambda setting: setting.instances > 1))
    assert best.winner is not None
    assert best.winner.setting == Setting(16, 0, 1)
    assert any(trial.reason == "too much memory" for trial in best.trials)


def test_errors_disqualify() -> None:
    model = Model()
    plain = model.measure

    async def failing(clients: int) -> RunResults:
        if model.setting.batches_requests:
            return run_of([1.0] * 100, throughput=9999, errors={"HTTP 500": 3})
        return await plain(clients)

    result = asyncio.run(Search(model.apply, failing, target_ms=20).run(START, SPACE))
    assert result.winner is not None
    assert not result.winner.setting.batches_requests
    assert any("3 of 103 failed: HTTP 500: why" in trial.reason for trial in result.trials)


def test_the_best_are_measured_again_by_turns() -> None:
    model = Model()
    best = search(model)
    rivals = model.applied[-2:] if len(set(model.applied[-6:])) == 2 else model.applied[-3:]
    assert model.applied[-3 * len(rivals) :] == rivals * 3
    assert best.winner is not None and best.winner.setting in rivals
    # The fastest by one measurement is among them.
    assert max(best.trials, key=lambda trial: trial.ok * trial.throughput).setting in rivals


@pytest.mark.parametrize("seed", range(8))
def test_a_lucky_measurement_does_not_change_the_limit(seed: int) -> None:
    """Four clients never fill a batch of 8: whatever looks faster with another limit is noise."""
    model = Model(noise=0.08, chance=random.Random(seed))
    plain = model.measure

    async def few(clients: int) -> RunResults:
        return await plain(min(clients, 4))

    result = asyncio.run(Search(model.apply, few, target_ms=20).run(Setting(16, 0, 1), Space((8, 16), (0,), (1,))))
    assert result.winner is not None
    assert result.winner.setting == Setting(16, 0, 1)


def test_limits_below_the_present_setting_are_kept() -> None:
    best = search(Model(), start=Setting(64, 0, 4), space=Space((1, 2, 4, 8), (0, 100), (1, 2)))
    assert best.winner is not None
    assert best.winner.setting.max_batch_size <= 8
    assert best.winner.setting.instances <= 2


CONFIG: dict[str, Any] = {
    "name": "m",
    "max_batch_size": 12,
    "instance_group": [{"name": "m_0", "count": 1, "kind": "KIND_CPU"}],
    "dynamic_batching": {"max_queue_delay_microseconds": 300, "preferred_batch_size": [4, 12]},
}


def space(config: dict[str, Any], **more: Any) -> Space:
    return space_of(config, **({"latency_ms": 2.0, "rows": 1, "max_batch": None, "max_instances": 4} | more))


def test_a_setting_is_written_into_a_configuration_and_nothing_else_changes() -> None:
    changed = with_setting(CONFIG, Setting(8, 500, 3))
    assert setting_of(changed) == Setting(8, 500, 3)
    assert changed["instance_group"] == [{"name": "m_0", "count": 3, "kind": "KIND_CPU"}]
    assert changed["dynamic_batching"]["preferred_batch_size"] == [4]  # 12 is more than a batch now
    assert setting_of(CONFIG) == Setting(12, 300, 1)
    assert with_setting(CONFIG, setting_of(CONFIG)) == CONFIG


def test_an_automatic_delay_becomes_a_number() -> None:
    config = CONFIG | {"dynamic_batching": {"max_queue_delay_microseconds": 0, "max_queue_delay_auto": True}}
    assert with_setting(config, Setting(12, 0, 1))["dynamic_batching"] == {"max_queue_delay_microseconds": 0}


def test_what_is_tried_is_within_limits() -> None:
    result = space(CONFIG)
    assert result.batches == (1, 2, 4, 8, 12)
    assert result.delays == (0, 100, 250, 300, 500, 1000)  # at most half of the target
    assert result.instances == (1, 2, 4)
    assert space(CONFIG, rows=4).batches == (4, 8, 12)
    assert space(CONFIG, max_batch=32).batches == (1, 2, 4, 8, 12, 16, 32)
    assert space({**CONFIG, "dynamic_batching": None}).delays[0] is None


def test_a_model_without_batches_is_tuned_by_instances_alone() -> None:
    result = space({"name": "m", "max_batch_size": 0})
    assert (result.batches, result.delays, result.instances) == ((0,), (None,), (1, 2, 4))
    result = search(Model(), start=Setting(0, None, 1), space=result)  # type: ignore[assignment]
    assert result.winner.setting == Setting(0, None, 2)  # type: ignore[attr-defined]


def test_several_instance_groups_are_not_changed() -> None:
    assert space({**CONFIG, "instance_group": [{"count": 1}, {"count": 2}]}).instances == (1,)


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        ({"name": "m", "ensemble_scheduling": {"step": []}}, {}, "is an ensemble"),
        ({"name": "m", "model_transaction_policy": {"decoupled": True}}, {}, "decoupled"),
        (CONFIG, {"rows": 13}, "at most 12"),
        (CONFIG, {"rows": 8, "max_batch": 4}, "less than the 8 rows"),
    ],
)
def test_untunable_models_are_reported(config: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises((FailedPrecondition, InvalidArgument), match=said):
        space(config, **more)
