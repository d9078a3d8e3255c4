# SPDX-License-Identifier: Apache-2.0
"""Rollouts by steps, the pure part: what is asked for, what was counted, what follows, and the state that is told of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import facts, service

from headrace.fleet import admission, schema
from headrace.fleet.rollouts.controller import RolloutObservation, StepObservation, StepStats, advance, decide
from headrace.fleet.rollouts.policy import RolloutPolicy, command_for, parse_policy
from headrace.fleet.rollouts.revision_stats import RequestStats, RouterStats, parse_router_stats
from headrace.fleet.rollouts.state import RolloutState, current_share, read_state, state_to_json

NOW = datetime(2026, 1, 15, 10, 30, tzinfo=UTC)
POLICY = RolloutPolicy((10, 25, 50), step_seconds=60, max_error_percent=1, max_latency_ratio=2, min_requests=50)
BOUNDS = (0.1, 0.25, 0.5, 1.0)
LOOK = RolloutObservation("engine", "new", "old", two=True, ready=True, settled=True)


def counts(requests: int, errors: int = 0, times: tuple[int, ...] = (), seconds: float = 0.0) -> RequestStats:
    return RequestStats(requests, errors, sum(times), seconds, times)


def observation(new: RequestStats, old: RequestStats | None = None) -> StepObservation:
    return StepObservation(ready=True, stats=StepStats(new, old or counts(1000), BOUNDS))


def by(router: str, **revisions: RequestStats) -> RouterStats:
    return RouterStats({(router, name): item for name, item in revisions.items()}, BOUNDS, (router,))


# What is asked for


def problems(annotations: dict[str, str], **engine: Any) -> dict[str, str]:
    document = service({"engine": {"minReplicas": 1, **engine}})
    document["metadata"]["annotations"] = {f"ome.io/rollout-{name}": value for name, value in annotations.items()}
    return {item.field: str(item) for item in admission.validate(document, facts())}


def test_the_requested_rollout() -> None:
    assert problems({"steps": "10, 25,50", "step-seconds": "0.5e2", "max-error-percent": "0.1"}) == {}
    annotations = {"ome.io/rollout-steps": "10, 25,50", "ome.io/rollout-step-seconds": "60"}
    result = parse_policy({**annotations, "ome.io/rollout-paused": "true"})
    assert result is not None and (result.steps, result.step_seconds, result.paused) == ((10, 25, 50), 60.0, True)
    assert (result.max_error_percent, result.max_latency_ratio, result.min_requests) == (1.0, 2.0, 50)
    assert parse_policy({}) is None and parse_policy({"ome.io/rollout-step-seconds": "60"}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", ""),
        ("steps", "10,5"),
        ("steps", "10,10"),
        ("steps", "0,10"),
        ("steps", "50,100"),
        ("steps", "ten"),
        ("steps", "\u0661\u0660"),
        ("steps", ",".join(map(str, range(1, 30)))),
        ("step-seconds", "0"),
        ("step-seconds", "nan"),
        ("step-seconds", "1m"),
        ("max-error-percent", "101"),
        ("max-error-percent", "-1"),
        ("max-latency-ratio", "0.5"),
        ("max-latency-ratio", "inf"),
        ("min-requests", "-1"),
        ("min-requests", "1.5"),
        ("paused", "yes"),
        ("command", "destroy"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_annotation(name: str, value: str) -> None:
    result = problems({"steps": "10,50"} | {name: value})
    field = f"metadata.annotations[ome.io/rollout-{name}]"
    assert list(result) == [field] and "takes" in result[field] and "such as" in result[field]


def test_what_would_do_nothing_is_refused() -> None:
    assert "has no effect without ome.io/rollout-steps" in "".join(problems({"step-seconds": "5"}).values())
    assert "did you mean ome.io/rollout-steps?" in "".join(problems({"stepps": "10"}).values())
    both = problems({"steps": "10"}, canaryTrafficPercent=20)
    assert list(both) == ["spec.engine.canaryTrafficPercent"]
    assert problems({"steps": "10"}, canaryTrafficPercent=100) == {}


def test_a_command_may_name_a_component() -> None:
    assert command_for("promote", "engine") == command_for("promote 2026-01-15T10:30:00Z", "engine") == "promote"
    assert command_for("undo engine 2026-01-15T10:30:00Z", "engine") == "undo"
    assert command_for("undo decoder 2026-01-15T10:30:00Z", "engine") == ""
    assert command_for("", "engine") == command_for("rm -rf", "engine") == ""


# What was counted


def test_counts_of_routers_are_summed_and_compared() -> None:
    document = {"counts": {"new": {"requests": 5, "errors": 1, "seconds": 2.0, "times": [1, 4]}}, "bounds": [0.1]}
    both = parse_router_stats({"a": {"revisions": document}, "b": {"revisions": document}})
    assert both is not None and both.since("new", {}) == counts(10, 2, (2, 8), 4.0)
    begun = both.baseline("new", "old")
    assert begun["a", "new"].requests == 5 and begun["b", "old"] == RequestStats()
    assert both.since("new", begun) == counts(0, 0, (0, 0))
    # A router that begins anew has fewer than before: all that it has came since.
    later = parse_router_stats({"a": {"revisions": {"counts": {"new": {"requests": 3, "errors": 0, "times": [3, 0]}}}}})
    assert later is not None and later.since("new", begun).requests == 3


@pytest.mark.parametrize("silent", [None, {}, {"revisions": 7}, "text"])
def test_of_a_router_that_does_not_answer_nothing_is_guessed(silent: Any) -> None:
    assert parse_router_stats({"a": {"revisions": {"counts": {}}}, "b": silent}) is None
    assert (
        parse_router_stats({"a": {"revisions": {"counts": {"x": 7, "y": {"requests": "many", "times": "no"}}}}})
        is not None
    )


@given(st.lists(st.integers(0, 10_000), min_size=5, max_size=5), st.floats(0.01, 1))
def test_a_quantile_is_within_the_bucket_it_is_found_in(times: list[int], share: float) -> None:
    result = counts(0, 0, tuple(times)).quantile_seconds(BOUNDS, share)
    assert 0 <= result <= BOUNDS[-1]
    within = sum(times[: sum(bound <= result for bound in BOUNDS) + 1])
    assert within >= share * sum(times) - 1e-6


# What follows


@pytest.mark.parametrize(
    ("step", "seconds", "sight", "verb", "words"),
    [
        (0, 5, observation(counts(10)), "stay", "step 10 %: 10 requests, 0.0 % errors"),
        (0, 61, observation(counts(10)), "stay", "40 more are needed"),
        (0, 61, observation(counts(212)), "next", "step 10 %: 212 requests, 0.0 % errors"),
        (2, 61, observation(counts(212, 1)), "promote", "step 50 %: 212 requests, 0.5 % errors"),
        (0, 1, observation(counts(120, 9)), "undo", "7.5 % errors of 120 requests at 10 %, 1 % allowed"),
        (0, 1, observation(counts(1, 1)), "undo", "100.0 % errors of 1 requests at 10 %, 1 % allowed"),
        (0, 61, replace(observation(counts(212)), ready=False), "stay", "do not answer"),
        (0, 1, StepObservation(ready=False, stuck="its pods crash"), "undo", "its pods crash, at 10 %"),
        (0, 61, StepObservation(ready=True, counted=True), "stay", "has not answered yet"),
        (0, 61, StepObservation(ready=True, counted=False), "next", "errors are not counted here"),
        (2, 61, StepObservation(ready=True, counted=False), "promote", "errors are not counted here"),
        (0, 59, StepObservation(ready=True, counted=False), "stay", "errors are not counted here"),
        (9, 61, observation(counts(212)), "promote", "step 50 %"),
    ],
)
def test_a_step(step: int, seconds: float, sight: StepObservation, verb: str, words: str) -> None:
    result = decide(POLICY, step, seconds, sight)
    assert result.verb == verb and words in result.reason


def test_latency_needs_enough_of_both_and_two_numbers_that_agree() -> None:
    quick, slow = counts(100, 0, (100, 0, 0, 0, 0), 5.0), counts(100, 0, (0, 0, 100, 0, 0), 40.0)
    result = decide(POLICY, 0, 61, observation(slow, quick))
    assert result.verb == "undo"
    assert result.reason == (
        "8.0 times as slow as before (a mean of 400 ms against 50 ms, nine in ten 475 ms against 90 ms) at 10 %,"
        " 2 times allowed"
    )
    assert decide(POLICY, 0, 59, observation(slow, quick)).verb == "stay"
    assert decide(POLICY, 0, 61, observation(slow, counts(49, 0, (49, 0, 0, 0, 0), 1.0))).verb == "next"
    # One request that took very long moves the mean alone; a wide bucket the quantile alone.
    outlier = counts(100, 0, (99, 0, 0, 0, 1), 40.0)
    assert decide(POLICY, 0, 61, observation(outlier, quick)).verb == "next"
    border = counts(100, 0, (0, 100, 0, 0, 0), 10.1)
    assert decide(POLICY, 0, 61, observation(border, counts(100, 0, (100, 0, 0, 0, 0), 9.9))).verb == "next"
    assert decide(replace(POLICY, max_latency_ratio=0), 0, 61, observation(slow, quick)).verb == "next"


def test_a_pause_keeps_a_step_but_not_its_errors() -> None:
    paused = replace(POLICY, paused=True)
    result = decide(paused, 0, 600, observation(counts(100)))
    assert result.verb == "stay" and result.reason.endswith("; paused")
    assert decide(paused, 0, 600, observation(counts(100, 50))).verb == "undo"


COUNTS = st.builds(
    lambda ok, errors, times: counts(ok + errors, errors, tuple(times), float(sum(times))),
    st.integers(0, 500),
    st.integers(0, 50),
    st.lists(st.integers(0, 200), min_size=5, max_size=5),
)
POLICIES = st.builds(
    RolloutPolicy,
    st.lists(st.integers(1, 99), min_size=1, max_size=6, unique=True).map(lambda found: tuple(sorted(found))),
    st.floats(1, 1000),
    st.floats(0, 100),
    st.sampled_from([0.0, 1.0, 1.5, 10.0]),
    st.integers(0, 200),
    st.booleans(),
)
SIGHTS = st.builds(
    lambda ready, stuck, sees, numbers: StepObservation(ready, stuck, sees, numbers if sees else None),
    st.booleans(),
    st.sampled_from(["", "it crashes"]),
    st.booleans(),
    st.none() | st.builds(StepStats, COUNTS, COUNTS, st.just(BOUNDS)),
)


@given(POLICIES, st.integers(0, 10), st.floats(0, 2000), SIGHTS)
def test_a_step_needs_time_pods_and_enough_good_requests(
    policy: RolloutPolicy, step: int, seconds: float, sight: StepObservation
) -> None:
    result = decide(policy, step, seconds, sight)
    numbers = sight.stats
    if result.verb in ("next", "promote"):
        assert seconds >= policy.step_seconds and sight.ready and not sight.stuck and not policy.paused
        assert (result.verb == "promote") == (step >= len(policy.steps) - 1)
        assert numbers is not None or not sight.counted
        if numbers is not None:
            assert numbers.new.requests >= policy.min_requests
            assert numbers.new.error_percent <= policy.max_error_percent
    if result.verb == "undo":
        assert sight.stuck or numbers is not None
    assert result.reason and "\n" not in result.reason


@given(POLICIES, st.integers(0, 10), st.floats(0, 2000), COUNTS, COUNTS)
def test_a_rollback_for_errors_could_not_be_averted_by_only_good_answers(
    policy: RolloutPolicy, step: int, seconds: float, new: RequestStats, old: RequestStats
) -> None:
    sure = replace(policy, max_latency_ratio=0)
    if decide(sure, step, seconds, observation(new, old)).verb == "undo":
        more = max(0, policy.min_requests - new.requests)
        later = replace(new, requests=new.requests + more)
        assert decide(sure, step, 1e9, observation(later, old)).verb == "undo"


# The states


def walk(
    policy: RolloutPolicy | None, state: RolloutState | None, look: RolloutObservation, seconds: float = 0.0
) -> tuple[RolloutState | None, list[str]]:
    """Advance, by way of what the status has."""
    found, notes = advance(policy, state, look, NOW + timedelta(seconds=seconds))
    reported = state_to_json(found, policy) if found is not None else {}
    again = read_state({"rollout": reported})
    assert again == found
    return again, [f"{note.kind} {note.reason} {note.message}" for note in notes]


def test_a_rollout_from_its_beginning_to_its_end() -> None:
    state, notes = walk(POLICY, None, replace(LOOK, ready=False, settled=False))
    assert state is not None and state.phase == "Waiting" and current_share(POLICY, state, "new") == 10
    assert notes == ["Normal RolloutStarted engine: a new revision gets 10 %, 25 %, 50 %, then all requests"]
    state, _ = walk(POLICY, state, replace(LOOK, ready=False, settled=False), 1)
    assert state is not None and state.phase == "Waiting"
    state, _ = walk(POLICY, state, replace(LOOK, stats=None), 2)
    assert state is not None and state.message == "waits until its router answers"
    state, _ = walk(POLICY, state, replace(LOOK, stats=by("r", old=counts(900))), 3)
    assert state is not None and (state.phase, state.step, state.since) == ("Stepping", 0, NOW + timedelta(seconds=3))
    look = replace(LOOK, stats=by("r", old=counts(1500), new=counts(60)))
    state, notes = walk(POLICY, state, look, 30)
    assert state is not None and state.message == "step 10 %: 60 requests, 0.0 % errors" and notes == []
    state, notes = walk(POLICY, state, look, 64)
    assert state is not None and (state.step, current_share(POLICY, state, "new")) == (1, 25)
    assert notes == ["Normal RolloutStep engine: step 10 %: 60 requests, 0.0 % errors; 25 % now"]
    # What the step before has counted is not this one's.
    state, _ = walk(POLICY, state, look, 130)
    assert state is not None and "0 requests" in state.message and "50 more are needed" in state.message
    for step, requests in ((2, 200), (2, 400)):
        look = replace(LOOK, stats=by("r", old=counts(3000), new=counts(requests)))
        state, notes = walk(POLICY, state, look, 140 + requests)
        assert state is not None and state.step == step
    assert state.phase == "Promoted" and current_share(POLICY, state, "new") == 100
    assert notes == ["Normal RolloutPromoted engine: promoted: step 50 %: 200 requests, 0.0 % errors"]
    # Told until another revision comes.
    kept, _ = walk(POLICY, state, replace(LOOK, two=False, stable="new"), 700)
    assert kept == state
    assert walk(POLICY, state, replace(LOOK, latest="newer", stable="new"), 800)[0] == RolloutState(
        "newer", message="waits until its pods answer"
    )


def begun(policy: RolloutPolicy = POLICY) -> RolloutState:
    state, _ = walk(policy, RolloutState("new", command=policy.command), replace(LOOK, stats=by("r", old=counts(9))))
    assert state is not None and state.phase == "Stepping"
    return state


def test_rolling_back_and_resuming() -> None:
    bad = replace(LOOK, stats=by("r", old=counts(99), new=counts(120, 9)))
    state, notes = walk(POLICY, begun(), bad, 5)
    assert state is not None and state.phase == "RolledBack" and current_share(POLICY, state, "new") == 0
    assert notes == ["Warning RolloutRolledBack engine: rolled back: 7.5 % errors of 120 requests at 10 %, 1 % allowed"]
    assert walk(POLICY, state, replace(LOOK, ready=False, settled=False), 1000) == (state, [])
    # Without its steps it stays back as well; with what ran before it is forgotten.
    assert walk(None, state, LOOK)[0] == state
    assert (
        walk(POLICY, state, RolloutObservation("engine", "old", "old", two=False, ready=True, settled=False))[0] is None
    )
    again, notes = walk(replace(POLICY, command="retry t1"), state, LOOK)
    assert again is not None and (again.phase, again.step, again.command) == ("Waiting", 0, "retry t1")
    assert notes == ["Normal RolloutStarted engine: the same revision once more"]
    assert walk(replace(POLICY, command="retry t1"), replace(again, phase="RolledBack"), LOOK)[1] == []


def test_commands_are_executed_once_and_only_for_their_revision() -> None:
    look = replace(LOOK, stats=by("r", old=counts(9)))
    promoted, notes = walk(replace(POLICY, command="promote t1"), begun(), look, 1)
    assert promoted is not None and promoted.phase == "Promoted" and notes[0].endswith("promoted: by hand")
    undone, _ = walk(replace(POLICY, command="undo engine t1"), begun(), look, 1)
    assert undone is not None and (undone.phase, undone.message) == ("RolledBack", "rolled back: by hand")
    other, _ = walk(replace(POLICY, command="undo decoder t1"), begun(), look, 1)
    assert other is not None and (other.phase, other.command) == ("Stepping", "undo decoder t1")
    # One that was given before this rollout is none of it.
    stale = replace(POLICY, command="promote t0")
    state, _ = walk(stale, None, look)
    assert state is not None and walk(stale, state, look, 1)[0].phase == "Stepping"  # type: ignore[union-attr]


def test_pods_that_do_not_become_ready_roll_it_back() -> None:
    state, notes = walk(
        POLICY, RolloutState("new"), replace(LOOK, ready=False, settled=False, stuck="no progress in 600 s")
    )
    assert state is not None and state.message == "rolled back: no progress in 600 s"
    assert notes == ["Warning RolloutRolledBack engine: rolled back: no progress in 600 s"]


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.just("2026-01-15T10:30:00")
    | st.just([[], {}, 7])
)
ENTRY = st.dictionaries(st.sampled_from(["router", "revision", "requests", "times", "seconds"]), JUNK)
TOLD = st.fixed_dictionaries(
    {"revision": JUNK, "phase": JUNK | st.sampled_from(["Waiting", "Stepping", "RolledBack", "Promoted"])},
    optional={"step": JUNK, "since": JUNK, "command": JUNK, "counts": JUNK | st.lists(ENTRY, max_size=3)},
)


@given(JUNK | TOLD)
def test_any_stored_status_can_be_read(told: Any) -> None:
    result = read_state({"rollout": told})
    if result is not None:
        advance(POLICY, result, replace(LOOK, latest=result.revision, stats=by("r", old=counts(1))), NOW)


def test_the_state_fits_the_schema_of_the_kind() -> None:
    state = replace(begun(), message="m", command="promote t")
    document = service({"engine": {}})
    document["status"] = {"components": {"engine": {"mode": "RawDeployment", "rollout": state_to_json(state, POLICY)}}}
    assert schema.validate(document) == []
