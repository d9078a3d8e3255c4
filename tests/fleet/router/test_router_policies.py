# SPDX-License-Identifier: Apache-2.0
"""Which backend gets the next request."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.backend import Backend
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.policies import make_policy
from headrace.fleet.router.settings import POLICIES, BackendAddress, RouterSettings


def _backends(policy: str, *weights: float, slow_start: float = 0.0) -> Backends:
    addresses = tuple(BackendAddress.parse(f"http://b{n}:80,weight={w}") for n, w in enumerate(weights))
    settings = RouterSettings(addresses, policy=policy, slow_start_seconds=slow_start)
    return Backends(settings, make_policy(policy, Random(7)))


def _picked(backends: Backends, count: int, exclude: tuple[Backend, ...] = ()) -> list[int]:
    picked = Counter(backends.pick(exclude) for _ in range(count))
    return [picked[backend] for backend in backends.all]


def test_round_robin_is_even() -> None:
    assert _picked(_backends("round-robin", 1, 5, 1), 300) == [100, 100, 100]


def test_weighted_follows_the_weights_exactly_and_mixes_them() -> None:
    backends = _backends("weighted", 5, 1, 1)
    order = [backends.all.index(backends.pick()) for _ in range(7)]  # type: ignore[arg-type]
    assert order == [0, 0, 1, 0, 2, 0, 0]
    assert _picked(backends, 700) == [500, 100, 100]


def test_least_outstanding_takes_the_idle_one_and_rotates_among_equals() -> None:
    backends = _backends("least", 1, 1, 1)
    assert _picked(backends, 300) == [100, 100, 100]
    backends.begin(backends.all[0])
    backends.begin(backends.all[2])
    assert _picked(backends, 10) == [0, 10, 0]


def test_least_outstanding_weighs_what_is_outstanding() -> None:
    backends = _backends("least", 1, 3)
    for _ in range(400):
        backend = backends.pick()
        assert backend is not None
        backends.begin(backend)
    assert [backend.outstanding for backend in backends.all] == [100, 300]


def test_power_of_two_is_even_when_all_are_idle() -> None:
    counts = _picked(_backends("p2c", 1, 1, 1, 1), 40_000)
    # Four standard deviations of a binomial with p = 1/4.
    assert all(abs(count - 10_000) < 4 * (40_000 * 0.25 * 0.75) ** 0.5 for count in counts)


def test_power_of_two_never_takes_the_busiest_of_all() -> None:
    backends = _backends("p2c", 1, 1, 1)
    for _ in range(5):
        backends.begin(backends.all[1])
    assert _picked(backends, 3000)[1] == 0


def test_power_of_two_keeps_unfinished_requests_close_together() -> None:
    backends = _backends("p2c", *[1] * 10)
    for _ in range(10_000):
        backend = backends.pick()
        assert backend is not None
        backends.begin(backend)
    outstanding = [backend.outstanding for backend in backends.all]
    assert max(outstanding) - min(outstanding) < 20  # by chance alone it would be about 100


@pytest.mark.parametrize("policy", POLICIES)
def test_excluded_backends_are_not_picked(policy: str) -> None:
    backends = _backends(policy, 1, 1, 1)
    first, second, third = backends.all
    assert _picked(backends, 50, (first, third)) == [0, 50, 0]
    assert backends.pick((first, second, third)) is None
    assert _picked(backends, 60, (second,))[1] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_one_in_a_slow_start_gets_little(policy: str) -> None:
    backends = _backends(policy, 1, 1, slow_start=10.0)
    late = backends.all[1]
    for _ in range(3):
        backends.checked(late, False, 1.0, "down")
    for _ in range(2):
        backends.checked(late, True, 100.0)
    counts = []
    for now in (101.0, 105.0, 110.0):
        backends.tick(now)
        given = [0, 0]
        waiting: list[Backend] = []
        for _ in range(2000):
            backend = backends.pick()
            assert backend is not None
            backends.begin(backend)
            given[backends.all.index(backend)] += 1
            waiting.append(backend)
            if len(waiting) > 40:
                backends.end(waiting.pop(0), 0, now)
        for backend in waiting:
            backends.end(backend, 0, now)
        counts.append(given[1] / 2000)
    assert counts[0] < 0.2 < counts[1] < 0.45 < counts[2] < 0.55


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="p2c, round-robin, least, weighted"):
        make_policy("magic")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ftp://a:1", "only http and https"),
        ("http://a:1/path", "path"),
        ("http://user:secret@a:1", "password"),
        ("http://:8000", "no host"),
        ("http://a:99999", "port"),
        ("http://a:1,weight=0", "weight"),
        ("http://a:1,weight=nan", "weight"),
        ("http://a:1,colour=red", "colour"),
        ("http://a b:1", "no host"),
        ("http://a\r\nx:1", "no host"),
    ],
)
def test_bad_backends_are_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        BackendAddress.parse(text)


def test_backends_as_people_write_them() -> None:
    address = BackendAddress.parse("triton:8000,weight=2.5,grpc=triton:8001")
    assert (address.url, address.weight, address.grpc_port) == ("http://triton:8000", 2.5, 8001)
    assert BackendAddress.parse("https://[::1]:8443").url == "https://[::1]:8443"
    assert BackendAddress.parse("https://example.com").port == 443
