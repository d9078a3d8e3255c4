# SPDX-License-Identifier: Apache-2.0
"""Which backend a prompt goes to, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.backend import Backend
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.chooser import Chooser, SessionAffinity
from headrace.fleet.router.policies import ChoiceReason, HashRing, RequestView, make_policy
from headrace.fleet.router.settings import (
    ALIASES,
    BackendAddress,
    CacheAwareSettings,
    HedgingSettings,
    PrefixHashSettings,
    RouterSettings,
    SessionAffinitySettings,
    check_settings,
)
from headrace.net.http.heads import RequestHead


def _settings(policy: str, count: int = 4, **changes: Any) -> RouterSettings:
    addresses = tuple(BackendAddress.parse(f"http://b{number}:80") for number in range(count))
    return RouterSettings(addresses, policy=policy, **changes)


def _chooser(policy: str, count: int = 4, **changes: Any) -> tuple[Chooser, Backends]:
    settings = _settings(policy, count, **changes)
    backends = Backends(settings)
    return Chooser(settings, backends), backends


def _request(body: Any, path: bytes = b"/v1/chat/completions") -> RequestView:
    return RequestView(
        RequestHead(b"POST", path, (), version="1.1"), body if isinstance(body, bytes) else orjson.dumps(body)
    )


def _chat(system: str, user: str) -> RequestView:
    return _request({"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]})


def _why(chooser: Chooser) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for (_, why), count in chooser.counts.items():
        counts[why] += count
    return dict(counts)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "user: hi"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "m\nuser: a"),
        ({"system": "be brief", "messages": [{"role": "user", "content": "hi"}]}, "system: be brief\nuser: hi"),
        ({"system": [{"type": "text", "text": "a"}], "messages": [{"role": "user"}]}, "system: a\nuser: "),
        ({"prompt": "once"}, "once"),
        ({"prompt": ["a", "b"]}, "a\nb"),
        ({"prompt": [1, 2, 3]}, "[1,2,3]"),
        ({"text": "sg"}, "sg"),
        ({"text_input": "t"}, "t"),
        ({"input": [{"role": "user", "content": "r"}]}, "r"),
        (b"\x00\xff", "\x00\xff"),
        (b"{broken", "{broken"),
        ({"messages": 5, "prompt": None}, '{"messages":5,"prompt":null}'),
        (b"", ""),
    ],
)
def test_the_prompt_of_a_body(body: Any, prompt: str) -> None:
    assert _request(body).prompt == prompt


_NAMES = st.sampled_from(["messages", "prompt", "text", "input", "content", "role", "model", "a"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(_JSON | st.binary(max_size=30))
def test_every_request_has_a_prompt_and_may_have_a_session(body: Any) -> None:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    assert isinstance(_request(content).prompt, str)
    assert bool(_request(content).prompt) == bool(content)
    assert isinstance(SessionAffinity(SessionAffinitySettings(body="a.a")).key(_request(content)), bytes)


def test_prompts_with_a_common_prefix_go_to_one_backend_and_others_are_spread() -> None:
    chooser, backends = _chooser("cache_aware")
    homes: dict[str, set[Backend | None]] = {}
    for turn in range(20):
        for number in range(8):
            system = f"{number} you are a helper " * 20
            homes.setdefault(system, set()).add(chooser.pick(_chat(system, f"question {turn}")))
    assert all(len(home) == 1 for home in homes.values())
    assert Counter(next(iter(home)) for home in homes.values()) == dict.fromkeys(backends.all, 2)
    assert _why(chooser) == {ChoiceReason.MISS: 8, ChoiceReason.HIT: 152}


def test_new_prompts_are_spread_by_prefix_counts_unless_a_backend_is_clearly_busier() -> None:
    chooser, backends = _chooser("cache_aware", 2)
    one, two = backends.all
    for _ in range(4):
        backends.begin(one)
    chosen = [chooser.pick(_chat(f"{number} you are a helper " * 20, "x")) for number in range(8)]
    assert Counter(chosen) == {one: 4, two: 4}  # by load alone, all would be of the second
    backends.begin(one)
    chosen = [chooser.pick(_chat(f"{number} be short " * 20, "x")) for number in range(8, 16)]
    assert set(chosen) == {two}


def test_a_short_common_prefix_is_ignored() -> None:
    chooser, backends = _chooser("cache_aware")
    chosen = [chooser.pick(_chat("be nice", f"{number}" * 500)) for number in range(8)]
    assert Counter(chosen) == dict.fromkeys(backends.all, 2)


def test_load_decides_when_one_has_far_too_much_to_do() -> None:
    chooser, backends = _chooser("cache_aware", 2, cache_aware=CacheAwareSettings(balance_abs_threshold=10))
    request = _chat("system " * 50, "x")
    home = chooser.pick(request)
    assert home is not None
    other = next(backend for backend in backends.all if backend is not home)
    for _ in range(10):
        backends.begin(home)
    assert chooser.pick(request) is home
    backends.begin(home)
    assert chooser.pick(request) is other
    assert _why(chooser)[ChoiceReason.IMBALANCE] == 1
    # Now both know it: the one with less to do gets it.
    backends.end(home, 0, 0.0)
    assert chooser.pick(request) is other
    # The factor counts as well.
    for _ in range(100):
        backends.begin(home)
        backends.begin(other)
    assert _why(chooser)[ChoiceReason.IMBALANCE] == 1


def test_without_a_prompt_the_least_busy_gets_it() -> None:
    for policy in ("cache_aware", "prefix_hash"):
        chooser, backends = _chooser(policy, 2)
        backends.begin(backends.all[0])
        assert chooser.pick(_request(b"")) is backends.all[1]
        assert _why(chooser) == {ChoiceReason.NO_PROMPT: 1}


def test_one_that_is_down_is_left_out_and_finds_its_prompts_again() -> None:
    chooser, backends = _chooser("cache_aware", 2)
    request = _chat("system " * 50, "x")
    home = chooser.pick(request)
    assert home is not None
    for _ in range(3):
        backends.checked(home, False, 1.0, "down")
    assert chooser.pick(request) is not home
    for _ in range(2):
        backends.checked(home, True, 2.0)
    assert chooser.pick(request) in backends.all


def test_removed_backends_are_forgotten() -> None:
    chooser, backends = _chooser("cache_aware", 2)
    for number in range(10):
        chooser.pick(_chat(f"{number} " * 100, "x"))
    gone = backends.all[0]
    tree = chooser.policy.tree  # type: ignore[union-attr]
    chooser.tick(0.0)
    assert tree.size(gone) > 0
    backends.set_addresses([backends.all[1].address], 1.0)
    chooser.tick(1.0)
    assert tree.size(gone) == 0
    assert {name for name, _ in chooser.counts} == {"http://b1:80"}


def test_a_hash_of_the_first_characters_selects_a_backend() -> None:
    chooser, backends = _chooser("prefix_hash", 4, prefix_hash=PrefixHashSettings(characters=30))
    again, _ = _chooser("prefix_hash", 4, prefix_hash=PrefixHashSettings(characters=30))
    names = []
    for number in range(200):
        first = chooser.pick(_request({"prompt": f"{number:030d} and more"}))
        other = again.pick(_request({"prompt": f"{number:030d} and other things"}))
        assert first is not None and other is not None and first.name == other.name
        names.append(first.name)
    assert min(Counter(names).values()) > 20


def test_a_hash_is_overruled_by_too_much_to_do() -> None:
    chooser, backends = _chooser("prefix_hash", 4)
    given: Counter[Backend] = Counter()
    for _ in range(400):
        backend = chooser.pick(_request({"prompt": "the same for all"}))
        assert backend is not None
        backends.begin(backend)
        given[backend] += 1
        most = 1.25 * sum(given.values()) / 4
        assert backend.outstanding <= most + 1
    assert _why(chooser)[ChoiceReason.OVERFLOW] > 200


def test_few_keys_move_when_a_backend_is_removed_and_none_between_the_others() -> None:
    _, backends = _chooser("p2c", 5)
    before, after = HashRing(backends.all), HashRing(backends.all[1:])
    for number in range(500):
        key = f"key {number}".encode()
        home = next(iter(before.walk(key)))
        if home is not backends.all[0]:
            assert next(iter(after.walk(key))) is home
        assert set(before.walk(key)) == set(backends.all)


def test_a_ring_follows_weights() -> None:
    addresses = tuple(BackendAddress.parse(f"http://b{n}:80,weight={n + 1}") for n in range(3))
    backends = Backends(RouterSettings(addresses))
    ring = HashRing(backends.all)
    homes = Counter(next(iter(ring.walk(f"{number}".encode()))).name for number in range(6000))
    shares = [homes[backend.name] / 6000 for backend in backends.all]
    assert all(abs(share - wanted) < 0.1 for share, wanted in zip(shares, (1 / 6, 2 / 6, 3 / 6), strict=True))


@pytest.mark.parametrize(
    "sticky",
    [
        SessionAffinitySettings(header="X-Session"),
        SessionAffinitySettings(cookie="sid"),
        SessionAffinitySettings(body="parameters.id"),
    ],
)
def test_a_session_stays_where_it_is_while_that_is_there(sticky: SessionAffinitySettings) -> None:
    chooser, backends = _chooser("round-robin", 4, sticky=sticky)

    def request(key: str) -> RequestView:
        fields = [(b"x-session", key.encode()), (b"cookie", b"a=b; sid=" + key.encode())]
        body = orjson.dumps({"parameters": {"id": key}})
        return RequestView(RequestHead(b"POST", b"/", fields, version="1.1"), body)

    homes = {key: chooser.pick(request(key)) for key in map(str, range(50))}
    assert len(set(homes.values())) == 4
    assert all(chooser.pick(request(key)) is home for key, home in homes.items())
    gone = backends.all[0]
    for _ in range(3):
        backends.checked(gone, False, 1.0, "down")
    moved = {key: chooser.pick(request(key)) for key in homes}
    assert all((moved[key] is home) == (home is not gone) for key, home in homes.items())
    for _ in range(2):
        backends.checked(gone, True, 2.0)
    assert all(chooser.pick(request(key)) is home for key, home in homes.items())
    assert _why(chooser).keys() == {ChoiceReason.STICKY, ChoiceReason.MOVED}
    # Without a key the policy decides.
    assert chooser.pick(RequestView(RequestHead(b"GET", b"/", (), version="1.1"))) is not None
    assert _why(chooser)[ChoiceReason.POLICY] == 1


def test_those_that_are_full_are_left_out() -> None:
    chooser, backends = _chooser("least", 2, max_outstanding=2)
    for expected in (1, 1, 1, 1, 0):
        backend = chooser.pick(_request(b""))
        assert (backend is not None) == bool(expected)
        if backend is not None:
            backends.begin(backend)


def test_the_names_of_others_are_known() -> None:
    for name, ours in ALIASES.items():
        assert type(make_policy(name)) is type(make_policy(ours))
    assert {"round_robin", "power_of_two", "least_loaded"} == set(ALIASES)


def test_by_chance_is_by_weight() -> None:
    addresses = (BackendAddress.parse("http://a:1,weight=3"), BackendAddress.parse("http://b:1"))
    backends = Backends(RouterSettings(addresses, policy="random"))
    given = Counter(backends.pick() for _ in range(4000))
    assert abs(given[backends.all[0]] - 3000) < 150


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cache_aware": CacheAwareSettings(cache_threshold=1.5)}, "cache_threshold"),
        ({"prefix_hash": PrefixHashSettings(characters=0)}, "characters"),
        ({"prefix_hash": PrefixHashSettings(load_factor=0.5)}, "load_factor"),
        ({"hedging": HedgingSettings(percentile=95)}, "percentile"),
        ({"sticky": SessionAffinitySettings(cookie="a", header="b")}, "one of cookie"),
        ({"sticky": SessionAffinitySettings(cookie="a;b")}, "sticky.cookie"),
        ({"sticky": SessionAffinitySettings(header="a b")}, "sticky.header"),
    ],
)
def test_invalid_settings(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        check_settings(_settings("p2c", **changes))
