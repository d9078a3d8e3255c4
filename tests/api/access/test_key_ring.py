# SPDX-License-Identifier: Apache-2.0
"""Keys while a server runs: who is found, until when, and what a change of the file does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headrace.api.access.api_keys import KeyRing, create_key, request_key, revoke_key
from headrace.core.clock import ManualClock
from headrace.core.errors import HeadraceError


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def name_of(ring: KeyRing, fields: dict[bytes, bytes], clock: ManualClock) -> str | None:
    result = ring.find(fields, clock.monotonic())
    return None if result is None else result.name


def test_a_key_is_found_however_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = create_key(path, "alice", ["infer"], created=0).encode()
    clock = ManualClock()
    ring = KeyRing(path, clock)
    for _ in range(2):  # the second time from memory
        for fields in (
            {b"authorization": b"Bearer " + key},
            {b"authorization": b"bearer  " + key},
            {b"x-api-key": key},
            {b"authorization": b"Basic YWxhZGRpbg==", b"x-api-key": key},
        ):
            assert name_of(ring, fields, clock) == "alice"
        for fields in (
            {},
            {b"authorization": key},
            {b"authorization": b"Bearer"},
            {b"authorization": b"Bearer "},
            {b"authorization": b"Bearer " + key[:-1]},
            {b"authorization": b"Bearer " + key + b"x"},
            {b"authorization": b"Basic " + key},
            {b"x-api-key": b""},
            {b"x-api-key": b"\xff\x00"},
            {b"authorization": b"Bearer wrong", b"x-api-key": key},
        ):
            assert name_of(ring, fields, clock) is None


def test_a_key_that_is_remembered_is_forgotten_when_it_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    clock = ManualClock()
    key = create_key(path, "alice", ["infer"], created=0)
    ring = KeyRing(path, clock)
    ways = (bearer(key), {b"x-api-key": key.encode()})
    assert [name_of(ring, fields, clock) for fields in ways * 2] == ["alice"] * 4
    revoke_key(path, "alice")
    clock.advance(1.0)
    assert [name_of(ring, fields, clock) for fields in ways] == [None, None]


def test_a_missing_key_and_a_wrong_key_have_different_errors() -> None:
    assert request_key({}) is None
    assert request_key({b"authorization": b"Basic x"}) is None
    assert request_key({b"authorization": b"Bearer wrong"}) == b"wrong"


def test_a_key_expires(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    clock = ManualClock(wall=1000.0)
    key = create_key(path, "alice", ["infer"], created=0, expires=1010.0)
    ring = KeyRing(path, clock)
    assert name_of(ring, bearer(key), clock) == "alice"
    clock.advance(9.5)
    assert name_of(ring, bearer(key), clock) == "alice"
    clock.advance(0.5)
    assert name_of(ring, bearer(key), clock) is None


def test_a_changed_file_is_read_within_a_second(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    clock = ManualClock()
    alice = create_key(path, "alice", ["infer"], created=0)
    ring = KeyRing(path, clock)
    assert name_of(ring, bearer(alice), clock) == "alice"
    bob = create_key(path, "bob", ["infer"], created=0)
    revoke_key(path, "alice")
    assert name_of(ring, bearer(alice), clock) == "alice"  # not looked yet
    clock.advance(1.0)
    assert name_of(ring, bearer(alice), clock) is None
    assert name_of(ring, bearer(bob), clock) == "bob"


def test_a_broken_or_missing_file_keeps_the_old_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    clock = ManualClock()
    key = create_key(path, "alice", ["infer"], created=0)
    good = path.read_text()
    ring = KeyRing(path, clock)
    with caplog.at_level(logging.INFO):
        path.write_text("keys: [")
        for _ in range(3):
            clock.advance(1.0)
            assert name_of(ring, bearer(key), clock) == "alice"
        assert [record.levelname for record in caplog.records] == ["ERROR"]  # told once
        path.unlink()
        clock.advance(1.0)
        assert name_of(ring, bearer(key), clock) == "alice"
        path.write_text(good.replace("alice", "carol"))
        clock.advance(1.0)
        assert name_of(ring, bearer(key), clock) == "carol"
    assert key not in caplog.text


def test_a_server_does_not_start_without_its_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(HeadraceError, match="does not exist"):
        KeyRing(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("keys: []\n")
    KeyRing(tmp_path / "empty.yaml")
    assert "all requests except health checks will be refused" in caplog.text


def test_admin_includes_the_others(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    fields = bearer(create_key(path, "root", ["admin"], created=0))
    other = bearer(create_key(path, "alice", ["read"], created=0))
    ring = KeyRing(path, ManualClock())
    root, alice = ring.find(fields, 0), ring.find(other, 0)
    assert root is not None
    assert alice is not None
    assert all(root.allows(scope) for scope in ("infer", "read", "admin"))
    assert [scope for scope in ("infer", "read", "admin") if alice.allows(scope)] == ["read"]  # type: ignore[arg-type]
