# SPDX-License-Identifier: Apache-2.0
"""The policy `predicted_latency`: what it learns, what it chooses, and what it refuses. Time is what the tests say."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from routing import Answer, Routing, ScriptedBackend, ask, routing, scripted_backend

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.backend import Backend
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.policies import ChoiceReason, RequestView
from headrace.fleet.router.predicted_latency import LatencyModel, PredictedLatency
from headrace.fleet.router.settings import (
    BackendAddress,
    HedgingSettings,
    PredictedLatencySettings,
    RouterSettings,
    check_settings,
)
from headrace.net.http.heads import RequestHead
from support.waiting import eventually

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("headrace.fleet.router.predicted_latency.monotonic", clock)
    return clock


def policy_of(count: int, **changes: Any) -> tuple[PredictedLatency, list[Backend]]:
    backends = tuple(BackendAddress.parse(f"http://10.0.0.{number}:1") for number in range(1, count + 1))
    settings = RouterSettings(
        backends, policy="predicted_latency", predicted_latency=PredictedLatencySettings(**changes)
    )
    return PredictedLatency(settings), list(Backends(settings).all)


def view(prompt: str = "hello", **fields: str) -> RequestView:
    body = orjson.dumps({"model": "m", "prompt": prompt})
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    return RequestView(RequestHead(b"POST", b"/v1/completions", named, version="1.1"), body)


def teach(policy: PredictedLatency, backend: Backend, *, prompt: float, next_token: float, base: float = 0.01) -> None:
    """`prompt`: seconds for 1,000 tokens of a prompt. `next_token`: seconds for a token of one stream."""
    known, random_ = policy.of(backend), random.Random(backend.name)
    for _ in range(200):
        features = (1.0, random_.random() * 8, random_.random() * 6)
        for models in (known, policy.all):
            models.first_token.learn(features, base + prompt * features[1] + 0.002 * features[2], 1000.0)
            models.next_token.learn(features, next_token * (1 + features[2]), 1000.0)


def test_a_model_learns_what_a_time_depends_on() -> None:
    model, random_ = LatencyModel(), random.Random(1)

    def sample(slope: float) -> None:
        features = (1.0, random_.random() * 8, random_.random() * 5)
        model.learn(features, 0.05 + slope * features[1] + 0.03 * features[2] + random_.gauss(0, 0.005), 1000.0)

    for _ in range(300):
        sample(0.2)
    assert model.predict((1.0, 4.0, 2.0)) == pytest.approx(0.05 + 0.8 + 0.06, rel=0.03)
    assert model.error < 0.05
    # A stall hardly matters, and a change is followed.
    model.learn((1.0, 1.0, 1.0), 600.0, 1000.0)
    assert model.predict((1.0, 4.0, 2.0)) < 1.1
    for _ in range(800):
        sample(0.1)
    assert model.predict((1.0, 4.0, 2.0)) == pytest.approx(0.05 + 0.4 + 0.06, rel=0.06)


def test_a_model_of_one_load_stays_sane() -> None:
    """The same features again and again say nothing of others, and must not let the arithmetic run away."""
    model = LatencyModel()
    for _ in range(200_000):
        model.learn((1.0, 0.5, 0.0), 0.1, 1000.0)
    assert model.predict((1.0, 0.5, 0.0)) == pytest.approx(0.1, rel=0.01)
    for number in range(200):
        model.learn((1.0, number % 8 / 2, number % 3), 0.05 + 0.1 * (number % 8 / 2), 1000.0)
    assert model.predict((1.0, 3.0, 1.0)) == pytest.approx(0.35, rel=0.1)


def test_the_faster_backend_is_chosen_until_it_has_more_to_do(clock: Clock) -> None:
    policy, (slow, fast) = policy_of(2)
    teach(policy, slow, prompt=0.4, next_token=0.01)
    teach(policy, fast, prompt=0.1, next_token=0.01)
    assert {policy.choose([slow, fast], view("x" * 4000))[0] for _ in range(20)} == {fast}
    policy.of(fast).pending_tokens = 20_000
    assert {policy.choose([slow, fast], view("x" * 4000)) for _ in range(20)} == {(slow, ChoiceReason.PREDICTED)}
    assert policy.choose([fast], view()) == (fast, ChoiceReason.ONLY)


def test_what_a_backend_has_seen_need_not_be_computed(clock: Clock) -> None:
    policy, backends = policy_of(3)
    for backend in backends:
        teach(policy, backend, prompt=0.2, next_token=0.01)
    prompt = "a long beginning " * 1000
    policy.sent(backends[1], view(prompt))
    assert {policy.choose(backends, view(prompt + "and an end"))[0] for _ in range(20)} == {backends[1]}
    first, _ = policy.predict(backends[1], view(prompt + "and an end"))
    other, _ = policy.predict(backends[0], view(prompt + "and an end"))
    assert first < 0.1 and other == pytest.approx(0.01 + 0.2 * 4.25, rel=0.1)
    # Not at any price.
    policy.of(backends[1]).pending_tokens = 30_000
    assert policy.choose(backends, view(prompt))[0] is not backends[1]


def test_targets_come_before_the_sooner_end(clock: Clock) -> None:
    policy, (quick_start, steady) = policy_of(2)
    teach(policy, quick_start, prompt=0.01, next_token=0.08)
    teach(policy, steady, prompt=2.0, next_token=0.02)
    policy.output_tokens = 10
    live, prompt = [quick_start, steady], "x" * 4000
    assert policy.choose(live, view(prompt))[0] is quick_start
    assert policy.choose(live, view(prompt, x_slo_tpot_ms="50")) == (steady, ChoiceReason.PREDICTED)
    assert policy.choose(live, view(prompt, x_slo_ttft_ms="500")) == (quick_start, ChoiceReason.PREDICTED)
    both = view(prompt, x_slo_ttft_ms="500", x_slo_tpot_ms="50")
    assert policy.choose(live, both) == (quick_start, ChoiceReason.TARGET_MISSED)
    explained = policy.explain(live, both)
    assert explained["targets"] == {"ttft_ms": 500, "tpot_ms": 50}
    assert explained["predictions"][steady.name]["missed_by"] > 1


def test_a_backend_that_was_not_seen_for_long_is_given_a_chance(clock: Clock) -> None:
    policy, (one, other) = policy_of(2)
    teach(policy, one, prompt=0.1, next_token=0.01)
    for _ in range(20):
        policy.of(other).first_token.learn((1.0, 0.1, 0.0), 5.0, clock.now)
    assert policy.predict(other, view())[0] > 1
    clock.now += 60
    assert policy.predict(other, view())[0] < 0.1


def test_of_very_many_backends_some_are_compared_and_the_one_that_knows_the_prompt(clock: Clock) -> None:
    policy, backends = policy_of(200)
    prompt = "a long beginning " * 1000
    for backend in backends[:3]:
        teach(policy, backend, prompt=0.2, next_token=0.01)
    policy.sent(backends[150], view(prompt))
    assert {policy.choose(backends, view(prompt))[0] for _ in range(50)} == {backends[150]}
    assert len({policy.choose(backends, view("else"))[0] for _ in range(200)}) > 50
    policy.tick(backends, 0)
    policy.tick(backends[:150], 0)
    assert policy._tree.size(backends[150]) == 0


class Timed:
    """A backend that takes some time, as the clock says, for the first event and for each further one."""

    def __init__(self, clock: Clock, first: float, following: float) -> None:
        self.first, self.following, self.cut = first, following, False
        self.after_first: Callable[[], object] = lambda: None
        self._clock = clock

    def __call__(self, sock: socket.socket, backend: ScriptedBackend) -> None:
        while backend.read_request(sock):
            self._clock.now += self.first
            sock.sendall(HEAD + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            self.after_first()
            self._clock.now += 5 * self.following
            if self.cut:
                return
            sock.sendall(b"%x\r\n%b\r\n" % (5 * len(EVENT), 5 * EVENT) + b"0\r\n\r\n")


@pytest.fixture
def timed(clock: Clock) -> Iterator[tuple[Routing, list[Timed], list[ScriptedBackend]]]:
    behaviours = [Timed(clock, 0.5, 0.05), Timed(clock, 0.1, 0.05)]
    with scripted_backend(behaviours[0]) as slow, scripted_backend(behaviours[1]) as fast:
        with routing(slow.port, fast.port, policy="predicted_latency") as router:
            for behaviour in behaviours:
                # So that the events do not come all at once.
                behaviour.after_first = lambda: eventually(lambda: sum(streams for _, streams in loads(router)) == 1)
            yield router, behaviours, [slow, fast]


def complete(router: Routing, **fields: str) -> Answer:
    body = b'{"model":"m","stream":true,"prompt":"' + b"x" * 400 + b'"}'
    return ask(router.port, "POST", "/v1/completions", body, fields)


def loads(router: Routing) -> list[tuple[float, int]]:
    chooser = router.proxy.chooser
    assert chooser is not None and isinstance(chooser.policy, PredictedLatency)
    policy = chooser.policy
    return [(policy.of(backend).pending_tokens, policy.of(backend).streams) for backend in router.proxy.backends.all]


def test_through_http(timed: tuple[Routing, list[Timed], list[ScriptedBackend]]) -> None:
    router, _, backends = timed
    for _ in range(40):
        assert complete(router).body == 6 * EVENT
    before = [len(backend.seen) for backend in backends]
    for _ in range(10):
        complete(router)
    assert [len(backend.seen) - seen for backend, seen in zip(backends, before, strict=True)] == [0, 10]
    assert loads(router) == [(0, 0), (0, 0)]
    question = {"path": "/v1/completions", "body": {"prompt": "hello"}}
    explained = json.loads(ask(router.port, "POST", "/router/explain", json.dumps(question).encode()).body)
    assert explained["because"] == "it is expected to be done first"
    fast = explained["details"]["predictions"][explained["backend"]]
    assert 50 < fast["ttft_ms"] < 200
    metrics = ask(router.port, "GET", "/router/metrics").body
    assert b'why="predicted"' in metrics and b'headrace_router_latency_prediction_error{kind="ttft"}' in metrics


def test_a_target_that_cannot_be_kept_is_refused_when_asked_for(
    timed: tuple[Routing, list[Timed], list[ScriptedBackend]],
) -> None:
    router, _, backends = timed
    for _ in range(20):
        complete(router)
    seen = sum(len(backend.seen) for backend in backends)
    refused = complete(router, x_slo_ttft_ms="5", x_slo_refuse="true")
    assert refused.status == 429 and b"no backend is expected to keep the latency target" in refused.body
    assert int(refused.fields["retry-after"]) == 1 and sum(len(backend.seen) for backend in backends) == seen
    assert complete(router, x_slo_ttft_ms="5").status == 200
    assert complete(router, x_slo_ttft_ms="10000", x_slo_refuse="true").status == 200
    wrong = complete(router, x_slo_ttft_ms="soon")
    assert wrong.status == 400 and b"x-slo-ttft-ms is a number of milliseconds" in wrong.body
    assert b"headrace_router_latency_refused_total 1" in ask(router.port, "GET", "/router/metrics").body


def test_whatever_ends_a_request_it_is_taken_out_of_the_load(
    timed: tuple[Routing, list[Timed], list[ScriptedBackend]],
) -> None:
    router, behaviours, _ = timed
    for behaviour in behaviours:
        behaviour.cut = True
    with pytest.raises(http.client.IncompleteRead):
        complete(router)
    eventually(lambda: loads(router) == [(0, 0), (0, 0)])
    for behaviour in behaviours:
        behaviour.cut = False
    body = b'{"stream":true,"prompt":"x"}'
    with socket.create_connection(("127.0.0.1", router.port)) as leaving:
        leaving.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    eventually(lambda: sum(backend.outstanding for backend in router.proxy.backends.all) == 0)
    assert loads(router) == [(0, 0), (0, 0)]
    assert Counter(status for _ in range(5) for status in [complete(router).status]) == {200: 5}
    assert loads(router) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("value", ["", "fast", "-1", "nan", "inf"])
def test_a_wrong_target(value: str) -> None:
    policy, backends = policy_of(2)
    with pytest.raises(InvalidArgument, match="x-slo-tpot-ms is a number of milliseconds"):
        policy.targets({b"x-slo-tpot-ms": value.encode()})
    # A gRPC call has no body to be refused with, and is chosen as if it had no target.
    policy.choose(backends, view(x_slo_tpot_ms=value))


def test_targets_of_the_service_are_for_requests_without_their_own() -> None:
    policy, _ = policy_of(2, ttft_seconds=0.5, refuse=True)
    targets = policy.targets({})
    assert (targets.first, targets.next, targets.refuse) == (0.5, 0.0, True)
    targets = policy.targets({b"x-slo-ttft-ms": b"0", b"x-slo-tpot-ms": b"20", b"x-slo-refuse": b"no"})
    assert (targets.first, targets.next, targets.refuse) == (0.0, 0.02, False)


def test_what_cannot_be_combined() -> None:
    backends = (BackendAddress.parse("http://a:1"),)
    with pytest.raises(InvalidArgument, match="predicted_latency cannot be combined with hedging"):
        check_settings(RouterSettings(backends, policy="predicted_latency", hedging=HedgingSettings(after_seconds=1.0)))
