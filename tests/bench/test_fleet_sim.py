# SPDX-License-Identifier: Apache-2.0
"""The simulated fleet: its engines take the times that they should, and the router's policies make the difference."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from bench.fleet_sim import (
    BLOCK_TOKENS,
    POLICIES,
    EngineTimes,
    PrefixCache,
    Request,
    Result,
    Simulation,
    conversations,
    plot,
    simulate,
    table,
)
from headrace.fleet.router import predicted_latency

TIMES = EngineTimes()


def _run(*requests: Request, policy: str = "least", replicas: int = 1) -> list[Request]:
    simulation = Simulation(policy, replicas, TIMES)
    simulation.run(requests)
    return simulation.done


def test_one_request_takes_its_prompt_and_its_tokens() -> None:
    (done,) = _run(Request(0.0, (1, 2), 2 * BLOCK_TOKENS, 101))
    first = TIMES.step_seconds + 2 * BLOCK_TOKENS * TIMES.prompt_seconds
    assert done.first_token == pytest.approx(first)
    assert done.done == pytest.approx(first + 100 * (TIMES.step_seconds + TIMES.stream_seconds))


def test_what_is_cached_is_not_computed_again() -> None:
    first, second = _run(Request(0.0, (1, 2, 3, 4), 2048, 10), Request(60.0, (1, 2, 3, 5), 2048, 10))
    assert (first.cached_tokens, second.cached_tokens) == (0, 3 * BLOCK_TOKENS)
    assert second.first_token - 60.0 < first.first_token / 2


def test_requests_are_batched_and_wait_for_each_other() -> None:
    together = _run(*(Request(0.0, (number,), 512, 200) for number in range(1, 33)))
    alone = _run(Request(0.0, (99,), 512, 200))[0]
    end = max(request.done for request in together)
    assert alone.done < end < 16 * alone.done
    assert len({request.first_token for request in together}) == 32


def test_a_request_that_comes_meanwhile_begins_after_the_current_step() -> None:
    _, second = sorted(_run(Request(0.0, (1,), 512, 2000), Request(3.0, (2,), 512, 2)), key=lambda one: one.arrived)
    assert second.first_token - 3.0 < 3 * TIMES.step_seconds + 512 * TIMES.prompt_seconds


def test_the_cache_evicts_what_was_not_used_for_longest() -> None:
    changes: list[tuple[int | None, list[int], list[int]]] = []
    cache = PrefixCache(4, lambda parent, stored, removed: changes.append((parent, list(stored), list(removed))))
    assert [cache.use(blocks) for blocks in ((1, 2), (3, 4), (1, 2, 5), (3, 4))] == [0, 0, 2, 1]
    # The end of a prompt goes before its beginning.
    assert changes == [(None, [1, 2], []), (None, [3, 4], []), (2, [5], [4]), (3, [4], [5])]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered(policy: str) -> None:
    clock = predicted_latency.monotonic
    requests = conversations(6.0, 30.0)
    simulation = Simulation(policy, 4, TIMES)
    simulation.run(requests)
    assert sorted(request.arrived for request in simulation.done) == [request.arrived for request in requests]
    assert all(request.arrived < request.first_token <= request.done for request in requests)
    assert {request.backend for request in requests} == set(simulation._backends.all)
    assert all(backend.outstanding == 0 for backend in simulation._backends.all)
    assert predicted_latency.monotonic is clock


def test_the_same_seed_means_the_same_traffic() -> None:
    assert [request.blocks for request in conversations(5, 60)] == [request.blocks for request in conversations(5, 60)]
    requests = conversations(5, 2000)
    assert len(requests) == pytest.approx(10_000, rel=0.15)
    assert sum(request.prompt_tokens for request in requests) / len(requests) == pytest.approx(12_000, rel=0.25)
    assert sum(request.output_tokens for request in requests) / len(requests) == pytest.approx(340, rel=0.15)


def test_policies_that_know_the_prompt_are_better_and_prediction_is_best_in_the_tail() -> None:
    results = {policy: simulate(policy, 0.9, 8, 120.0) for policy in ("p2c", "cache_aware", "predicted_latency")}
    assert results["cache_aware"].hit_rate > 2 * results["p2c"].hit_rate
    for name in ("cache_aware", "predicted_latency"):
        assert results[name].first_token["p50"] < 0.6 * results["p2c"].first_token["p50"]
    predicted, aware = (results[name].first_token["p99"] for name in ("predicted_latency", "cache_aware"))
    assert predicted < aware


def test_a_table_and_a_picture() -> None:
    percentiles = {"p50": 0.5, "p90": 1.0, "p99": 2.0}
    results = [Result(policy, 0.8, 10, percentiles, percentiles, 0.5, 20.0) for policy in ("p2c", "least")]
    assert "| 80% | `least` | 0.50 s | 1.00 s | 2.00 s | 500 ms | 2000 ms | 50% | 20 us |" in table(results)
    assert len(ET.fromstring(plot(results)).findall("{*}rect")) == 2
