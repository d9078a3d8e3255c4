# SPDX-License-Identifier: Apache-2.0
"""Whom a request is counted for, and that nobody can pass for somebody else."""

from __future__ import annotations

import pytest

from headrace.api.access.api_keys import ApiKey
from headrace.api.access.rate_limits import SubjectResolver
from headrace.api.access.settings import RateBy, RateLimit, RateLimits
from headrace.core.errors import InvalidArgument

ALICE = ApiKey("alice", b"", frozenset(("infer",)))


class FakeHead:
    """A head with the fields of a test."""

    def __init__(self, *fields: tuple[bytes, bytes]) -> None:
        self.fields = fields
        self.by_name = dict(fields)


def forwarded(*values: bytes) -> FakeHead:
    return FakeHead(*((b"x-forwarded-for", value) for value in values))


def address(peer: str, head: FakeHead, *trusted: str) -> str:
    return SubjectResolver(RateLimits(trusted_proxies=trusted)).address(peer, head).decode()


@pytest.mark.parametrize(
    ("peer", "counted"),
    [
        ("10.1.2.3:5000", "10.1.2.3"),
        ("[2001:db8:1:2:3:4:5:6]:5000", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::ffff]:5001", "2001:db8:1:2::/64"),
        ("[::ffff:10.1.2.3]:5000", "10.1.2.3"),
        ("[fe80::1%eth0]:5000", "fe80::/64"),
        ("unix", "unix"),
        ("gone", "gone"),
    ],
)
def test_a_peer_without_proxies(peer: str, counted: str) -> None:
    assert address(peer, FakeHead()) == counted


@pytest.mark.parametrize(
    ("peer", "values", "trusted", "counted"),
    [
        # Nobody is trusted, or not the peer: the field is what the client made up.
        ("9.9.9.9:1", [b"1.1.1.1"], [], "9.9.9.9"),
        ("9.9.9.9:1", [b"1.1.1.1"], ["10.0.0.0/8"], "9.9.9.9"),
        # One proxy: what it added is the last; what the client wrote before that does not count.
        ("10.0.0.1:1", [b"1.1.1.1"], ["10.0.0.0/8"], "1.1.1.1"),
        ("10.0.0.1:1", [b"6.6.6.6, 1.1.1.1"], ["10.0.0.0/8"], "1.1.1.1"),
        ("10.0.0.1:1", [b"10.0.0.9, 1.1.1.1"], ["10.0.0.0/8"], "1.1.1.1"),
        ("10.0.0.1:1", [b"garbage, 1.1.1.1"], ["10.0.0.0/8"], "1.1.1.1"),
        # Two proxies, and a field for each.
        ("10.0.0.1:1", [b"6.6.6.6, 1.1.1.1", b"10.0.0.2"], ["10.0.0.0/8"], "1.1.1.1"),
        ("10.0.0.1:1", [b"1.1.1.1,10.0.0.2"], ["10.0.0.1", "10.0.0.2"], "1.1.1.1"),
        # All of them are ours: the first of them asks.
        ("10.0.0.1:1", [b"10.0.0.3, 10.0.0.2"], ["10.0.0.0/8"], "10.0.0.3"),
        # What is no address ends the search.
        ("10.0.0.1:1", [b"1.1.1.1, unknown, 10.0.0.2"], ["10.0.0.0/8"], "10.0.0.2"),
        ("10.0.0.1:1", [b""], ["10.0.0.0/8"], "10.0.0.1"),
        ("10.0.0.1:1", [b"\xff\xfe"], ["10.0.0.0/8"], "10.0.0.1"),
        # With ports, and IPv6.
        ("10.0.0.1:1", [b"1.1.1.1:4711"], ["10.0.0.0/8"], "1.1.1.1"),
        ("[::1]:1", [b"[2001:db8::7]:4711"], ["::1"], "2001:db8::/64"),
        ("[::ffff:10.0.0.1]:1", [b"::ffff:1.1.1.1"], ["10.0.0.0/8"], "1.1.1.1"),
        # Through a UNIX socket.
        ("unix", [b"1.1.1.1"], ["unix"], "1.1.1.1"),
        ("unix", [b"1.1.1.1"], ["10.0.0.0/8"], "unix"),
    ],
)
def test_forwarded_addresses(peer: str, values: list[bytes], trusted: list[str], counted: str) -> None:
    assert address(peer, forwarded(*values), *trusted) == counted


def test_a_trusted_proxy_must_be_an_address() -> None:
    with pytest.raises(InvalidArgument, match=r"'proxy\.local' is not a trusted proxy"):
        SubjectResolver(RateLimits(trusted_proxies=("proxy.local",)))


def subjects_of(by: RateBy, head: FakeHead, key: ApiKey | None) -> bytes:
    (subject,) = SubjectResolver(RateLimits(limits=(RateLimit(1, by=by),))).resolve("1.1.1.1:5", head, key)
    return subject


def test_by_key_user_and_address() -> None:
    user = FakeHead((b"x-user-id", b"u7"))
    assert subjects_of("key", user, ALICE) == b"0kalice"
    assert subjects_of("key", user, None) == b"0a1.1.1.1"  # anonymous
    assert subjects_of("user", user, ALICE) == b"0uu7"
    assert subjects_of("user", FakeHead(), ALICE) == b"0kalice"
    assert subjects_of("user", FakeHead((b"x-user-id", b"")), None) == b"0a1.1.1.1"
    assert subjects_of("address", user, ALICE) == b"0a1.1.1.1"


def test_kinds_and_limits_of_subjects_cannot_collide() -> None:
    limits = (RateLimit(1, by="user"), RateLimit(2, by="user"), RateLimit(1, by="key"))
    created = SubjectResolver(RateLimits(limits=limits)).resolve("1.1.1.1:5", FakeHead((b"x-user-id", b"alice")), ALICE)
    assert created == [b"0ualice", b"1ualice", b"2kalice"]


def test_the_memory_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.api.access.rate_limits._CACHED_ADDRESSES", 8)
    subjects = SubjectResolver(RateLimits(limits=(RateLimit(1),), trusted_proxies=("10.0.0.1",)))
    for number in range(100):
        subjects.resolve("10.0.0.1:1", forwarded(b"1.1.1.%d" % number), None)
        assert len(subjects._addresses) <= 8
    subjects.resolve("10.0.0.1:1", forwarded(b"1.1.1.1," * 1000), None)
    assert all(len(value) <= 512 for _, value in subjects._addresses)
