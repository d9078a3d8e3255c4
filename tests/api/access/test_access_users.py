# SPDX-License-Identifier: Apache-2.0
"""Users: made, changed by several at once, rotated, removed, and told by their keys."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.api.access.users import KeyHasher, Users
from headrace.core.clock import ManualClock
from headrace.core.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from headrace.jobs.store.store import Store
from support.access_rows import CountingHasher, MemoryRows
from support.async_tests import async_test


class AccessFixture:
    def __init__(self) -> None:
        self.rows = MemoryRows()
        self.clock = ManualClock()
        self.hasher = CountingHasher()
        self.users = Users(self.rows, self.hasher, self.clock)


@asynccontextmanager
async def access_fixture() -> AsyncIterator[AccessFixture]:
    fixture = AccessFixture()
    try:
        yield fixture
    finally:
        fixture.users.close()


@async_test
async def test_a_key_is_shown_once_and_kept_as_a_hash() -> None:
    async with access_fixture() as at:
        user, key = await at.users.add("alice", "acme", "viewer", email="a@example.org")
        assert re.fullmatch(r"nvapi-[A-Za-z0-9_-]{64}", key)
        assert uuid.UUID(user.id).version == 5
        assert (user.roles, user.email) == ({"acme": "viewer"}, "a@example.org")
        kept = repr(at.rows.users) + at.rows.users[user.id].keys[0].hash
        assert key not in kept and key[20:] not in kept
        assert at.rows.users[user.id].keys[0].hash.startswith("$argon2id$")
        assert user.keys[0].hash not in repr(user)
        found, _ = await at.users.by_key(key)
        assert found.name == "alice"


@async_test
async def test_hashing_costs_are_at_least_owasps() -> None:
    hasher = KeyHasher()
    try:
        kept = await hasher.hash("nvapi-x")
        assert kept.startswith("$argon2id$v=19$m=19456,t=2,p=1$")
        assert await hasher.matches(kept, "nvapi-x")
        assert not await hasher.matches(kept, "nvapi-y")
    finally:
        hasher.close()


@async_test
async def test_a_wrong_key_costs_as_many_hashes_as_a_right_one() -> None:
    async with access_fixture() as at:
        _, key = await at.users.add("alice", "acme")
        received = set()
        for wrong in (key[:-1] + ("A" if key[-1] != "A" else "B"), "nvapi-" + "A" * 64):
            before = at.hasher.matched
            with pytest.raises(Unauthenticated) as caught:
                await at.users.by_key(wrong)
            assert at.hasher.matched == before + 1
            received.add(caught.value.message)
        assert len(received) == 1  # which of both it was is not told


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("dGhpcyBpcyBhIGxlZ2FjeSBuZ2Mga2V5", "legacy NGC API keys are not accepted: use a personal key"),
        ("", "legacy"),
        ("NVAPI-" + "a" * 64, "legacy"),
        ("nvapi-" + "a" * 63, "incomplete"),
        ("nvapi-" + "a" * 65, "incomplete"),
        ("nvapi-" + "a" * 63 + "\n", "incomplete"),
        ("nvapi-" + "é" * 64, "incomplete"),
        ("nvapi-" + "' OR 1=1 --".ljust(64), "incomplete"),
    ],
)
@async_test
async def test_what_cannot_be_a_key_costs_nothing(key: str, text: str) -> None:
    async with access_fixture() as at:
        with pytest.raises(Unauthenticated, match=text) as caught:
            await at.users.by_key(key)
        assert caught.value.message.startswith("Unauthorized: ")
        assert (at.hasher.matched, at.rows.reads) == (0, 0)


@async_test
async def test_rotation_immediately_and_with_grace() -> None:
    async with access_fixture() as at:
        _, first = await at.users.add("alice", "acme")
        at.clock.advance(10)
        user, second = await at.users.rotate("alice", grace_seconds=60)
        assert user.tokens_after < at.clock.wall()
        for key in (first, second):
            assert (await at.users.by_key(key))[0].id == user.id
        at.clock.advance(30)
        _, third = await at.users.rotate("alice", grace_seconds=3600)  # does not prolong what ends sooner
        at.clock.advance(30)
        with pytest.raises(Unauthenticated, match="replaced by a newer one"):
            await at.users.by_key(first)
        await at.users.by_key(second)
        user, fourth = await at.users.rotate("alice")
        assert user.tokens_after == at.clock.wall()
        for key in (second, third):
            with pytest.raises(Unauthenticated, match="unknown key"):
                await at.users.by_key(key)
        await at.users.by_key(fourth)
        for bad in (-1.0, float("nan"), 1e12):
            with pytest.raises(InvalidArgument):
                await at.users.rotate("alice", grace_seconds=bad)


@async_test
async def test_old_keys_do_not_pile_up() -> None:
    async with access_fixture() as at:
        await at.users.add("alice", "acme")
        for _ in range(9):
            user, key = await at.users.rotate("alice", grace_seconds=1e6)
        assert len(user.keys) == 5
        await at.users.by_key(key)


@async_test
async def test_roles_are_granted_and_revoked_per_organisation() -> None:
    async with access_fixture() as at:
        await at.users.add("alice", "acme", "viewer")
        user = await at.users.grant("alice", "umbrella", "admin")
        assert (user.role_in("acme"), user.role_in("umbrella"), user.role_in("other")) == ("viewer", "admin", None)
        assert [user.name for user in await at.users.list("umbrella")] == ["alice"]
        user = await at.users.withdraw("alice", "acme")
        assert user.roles == {"umbrella": "admin"}
        with pytest.raises(NotFound):
            await at.users.withdraw("alice", "acme")
        with pytest.raises(InvalidArgument):
            await at.users.grant("alice", "acme", "root")


@async_test
async def test_a_removed_user_is_gone_and_a_new_one_of_the_same_name_is_another() -> None:
    async with access_fixture() as at:
        before, key = await at.users.add("alice", "acme")
        await at.users.remove("alice")
        with pytest.raises(Unauthenticated):
            await at.users.by_key(key)
        with pytest.raises(NotFound, match="headrace users list"):
            await at.users.remove("alice")
        at.clock.advance(5)
        after, _ = await at.users.add("alice", "acme")
        assert after.id == before.id
        assert after.tokens_after > before.tokens_after  # so tokens of the first are not the second's


@async_test
async def test_bad_names_are_refused() -> None:
    async with access_fixture() as at:
        for name in ("", "a b", "a" * 65, "a\n", "../a", "'; DROP TABLE users", "é"):
            with pytest.raises(InvalidArgument):
                await at.users.add(name, "acme")
            with pytest.raises(NotFound):
                await at.users.get(name)
        for organisation in ("", "a b", "x" * 256, "**"):
            with pytest.raises(InvalidArgument):
                await at.users.add("alice", organisation)
        with pytest.raises(InvalidArgument):
            await at.users.add("alice", "acme", "owner")
        with pytest.raises(InvalidArgument):
            await at.users.add("alice", "acme", email="a@b\r\nX: y")
        assert at.rows.users == {}
        await at.users.add("alice", "acme")
        with pytest.raises(AlreadyExists):
            await at.users.add("alice", "umbrella")


@async_test
async def test_the_first_admin_is_made_once() -> None:
    async with access_fixture() as at:
        key = await at.users.ensure_admin()
        assert key is not None
        admin, _ = await at.users.by_key(key)
        assert (admin.name, admin.role_in("any-org")) == ("admin", "admin")
        assert await at.users.ensure_admin() is None


@async_test
async def test_changes_of_others_are_not_lost() -> None:
    async with access_fixture() as at:
        await at.users.add("alice", "acme")
        at.rows.lost_updates = 3
        assert (await at.users.grant("alice", "b", "viewer")).roles == {"acme": "operator", "b": "viewer"}
        at.rows.lost_updates = 100
        with pytest.raises(Unavailable):
            await at.users.grant("alice", "c", "viewer")


@async_test
async def test_too_many_logins_are_refused_with_a_retry_time() -> None:
    async with access_fixture() as at:
        tries = (at.users.by_key("nvapi-" + "A" * 64) for _ in range(200))
        results = await asyncio.gather(*tries, return_exceptions=True)
        kinds = {type(result) for result in results}
        assert kinds == {Unauthenticated, ResourceExhausted}


@async_test
async def test_a_damaged_hash_admits_no_user(caplog: pytest.LogCaptureFixture) -> None:
    async with access_fixture() as at:
        user, key = await at.users.add("alice", "acme")
        at.rows.users[user.id] = replace(user, keys=(replace(user.keys[0], hash="$argon2id$broken"),))
        with pytest.raises(Unauthenticated):
            await at.users.by_key(key)
        assert "damaged" in caplog.text and key not in caplog.text


@async_test
async def test_the_rows_of_the_job_store_do(tmp_path: Path) -> None:
    store = await Store.open(f"sqlite:///{tmp_path}/jobs.db")
    hasher = CountingHasher()
    first, second = (Users(store.users, hasher) for _ in range(2))
    try:
        created = await asyncio.gather(first.ensure_admin(), second.ensure_admin())
        assert sum(key is not None for key in created) == 1
        _, key = await first.add("alice", "acme", "viewer")
        await asyncio.gather(*(item.grant("alice", f"org-{n}", "admin") for n in range(3) for item in (first, second)))
        user, _ = await second.by_key(key)
        assert dict(user.roles) == {"acme": "viewer", "org-0": "admin", "org-1": "admin", "org-2": "admin"}
        revoked = await first.revoke_tokens("alice")
        assert await second.get("alice") == revoked
        _, key = await first.rotate("alice", grace_seconds=60)
        assert len((await second.by_key(key))[0].keys) == 2
        await first.remove("alice")
        with pytest.raises(Unauthenticated):
            await second.by_key(key)
        await first.add("alice", "acme")
    finally:
        hasher.close()
        await store.close()
