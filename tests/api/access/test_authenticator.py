# SPDX-License-Identifier: Apache-2.0
"""Logins, and who a request's token or key belongs to: also after somebody elsewhere changed that."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.api.access.authenticator import Access, LoginLimits, open_access, parse_credential
from headrace.api.access.roles import Principal, check_permission
from headrace.api.access.settings import RateLimit
from headrace.api.access.tokens import SigningKeys
from headrace.api.access.users import User
from headrace.core.clock import ManualClock
from headrace.core.errors import InvalidArgument, NotFound, ResourceExhausted, Unauthenticated, Unavailable
from support.access_rows import CountedMemoryRows, CountingHasher, MemoryRows
from support.async_tests import async_test

HERE = "10.0.0.1"
NOBODY = "nvapi-" + "A" * 64


@pytest.fixture(params=[MemoryRows, CountedMemoryRows], autouse=True)
def kind_of_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with rows that count their changes, and with those that do not."""
    monkeypatch.setattr(AccessFixture, "kind_of_rows", request.param)


class AccessFixture:
    kind_of_rows: type[MemoryRows] = MemoryRows

    def __init__(
        self, folder: Path, access: Access, rows: MemoryRows, hasher: CountingHasher, clock: ManualClock
    ) -> None:
        self.folder = folder
        self.rows = rows
        self.hasher = hasher
        self.clock = clock
        self.users = access.users
        self.tokens = access.tokens
        self.ask = access.authenticator

    def recall(self, token: str) -> Principal | None:
        return self.ask.cached_principal(token, self.clock.monotonic())

    async def refused(self, token: str, text: str) -> None:
        """A second later, so that what was believed is looked at again."""
        self.clock.advance(1)
        with pytest.raises(Unauthenticated, match=f"^Unauthorized: .*{text}"):
            await self.ask.identify(token, HERE)

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit.jsonl").read_text().splitlines()]


@asynccontextmanager
async def access_fixture(folder: Path, limits: LoginLimits | None = None) -> AsyncIterator[AccessFixture]:
    rows, hasher, clock = AccessFixture.kind_of_rows(), CountingHasher(), ManualClock()
    access = open_access(folder, rows, hasher=hasher, limits=limits, clock=clock)
    try:
        yield AccessFixture(folder, access, rows, hasher, clock)
    finally:
        access.close()


@async_test
async def test_from_a_key_to_a_token_to_a_principal(tmp_path: Path) -> None:
    async with access_fixture(tmp_path / "data") as at:
        user, key = await at.users.add("alice", "acme", "viewer", email="a@example.org")
        login = await at.ask.login(f" {key}\n", "acme", HERE)
        assert (login.user_id, login.user_name, login.user_email) == (user.id, "alice", "a@example.org")
        assert at.hasher.matched == 1
        result = at.recall(login.token)
        assert result is not None and result.roles == {"acme": "viewer"}
        assert result == await at.ask.identify(login.token, HERE)
        assert (await at.ask.login(key, "acme", HERE)).token == login.token
        assert [line["outcome"] for line in at.audited()] == ["allowed", "allowed"]
        assert at.audited()[0]["target"] == result.token_id
        assert key not in (at.folder / "audit.jsonl").read_text()
        assert login.token not in (at.folder / "audit.jsonl").read_text()


@pytest.mark.parametrize(
    ("key", "organisation", "text"),
    [
        ("KEY", "", "ngc_org_name is missing"),
        ("KEY", None, "ngc_org_name is missing"),
        ("KEY", 7, "ngc_org_name is missing"),
        ("", "acme", "ngc_key is missing"),
        (None, "acme", "ngc_key is missing"),
        (["KEY"], "acme", "ngc_key is missing"),
        ("bGVnYWN5", "acme", "legacy NGC API keys are not accepted: use a personal key"),
        (NOBODY, "acme", "unknown key"),
        ("KEY", "umbrella", "no role in organisation 'umbrella'"),
        ("KEY", "ACME", "no role"),
    ],
)
@async_test
async def test_failed_logins_state_a_reason_and_are_audited(
    tmp_path: Path, key: object, organisation: object, text: str
) -> None:
    async with access_fixture(tmp_path) as at:
        _, good = await at.users.add("alice", "acme")
        await at.users.add("bob", "umbrella")
        with pytest.raises(Unauthenticated, match=f"^Unauthorized: .*{text}"):
            await at.ask.login(good if key == "KEY" else key, organisation, HERE)
        (line,) = at.audited()
        assert (line["operation"], line["outcome"], line["address"]) == ("login", "denied", HERE)
        assert good not in json.dumps(line)


@async_test
async def test_an_organisation_that_cannot_be_one(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        for organisation in ("*", "a b", "x" * 256, "acme\n", "acme/../umbrella"):
            with pytest.raises(InvalidArgument):
                await at.ask.login(key, organisation, HERE)
        assert at.hasher.matched == 0


@async_test
async def test_a_token_is_for_one_organisation_and_a_key_for_all_of_its_users(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme", "viewer")
        await at.users.grant("alice", "umbrella", "admin")
        token = (await at.ask.login(key, "acme", HERE)).token
        by_token, by_key = await at.ask.identify(token, HERE), await at.ask.identify(key, HERE)
        with pytest.raises(NotFound):
            check_permission(by_token, "umbrella", "jobs.read")
        check_permission(by_key, "umbrella", "users.write")
        for principal in (by_token, by_key):
            check_permission(principal, "acme", "jobs.read")
            with pytest.raises(NotFound):
                check_permission(principal, "third", "jobs.read")


@async_test
async def test_the_first_admin_logs_in_anywhere_and_gets_a_token_for_there(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        key = await at.users.ensure_admin()
        token = (await at.ask.login(key, "acme", HERE)).token
        assert (await at.ask.identify(token, HERE)).roles == {"acme": "admin"}
        check_permission(await at.ask.identify(str(key), HERE), "umbrella", "users.write")


@async_test
async def test_a_key_as_a_bearer_token_is_hashed_once(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        assert at.recall(key) is None
        # Many at once, cold: one hash, and no rate limit.
        results = await asyncio.gather(*(at.ask.identify(key, HERE) for _ in range(200)))
        assert at.hasher.matched == 1 and {result.user_name for result in results} == {"alice"}
        for _ in range(300):
            at.clock.advance(1)
            assert at.recall(key) is None  # to be looked at again
            await at.ask.identify(key, HERE)
            assert at.recall(key) is not None
        assert at.hasher.matched == 1


@async_test
async def test_what_is_recalled_reads_nothing(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        token = (await at.ask.login(key, "acme", HERE)).token
        reads = at.rows.reads
        for _ in range(1000):
            assert at.recall(token) is not None
        assert at.rows.reads == reads


@async_test
async def test_a_removed_user_is_out_within_a_second(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        token = (await at.ask.login(key, "acme", HERE)).token
        await at.ask.identify(key, HERE)
        await at.users.remove("alice")
        at.clock.advance(1)
        assert at.recall(token) is None and at.recall(key) is None
        await at.refused(token, "log in again")
        await at.refused(key, "replaced or removed")
        await at.refused(key, "unknown key")  # forgotten, so hashed as anybody's
        # A namesake has the same id, and yet neither works.
        await at.users.add("alice", "acme")
        await at.refused(token, "log in again")
        await at.refused(key, "unknown key")


@async_test
async def test_a_changed_role_applies_immediately_to_old_tokens(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme", "admin")
        token = (await at.ask.login(key, "acme", HERE)).token
        await at.users.grant("alice", "acme", "viewer")
        at.clock.advance(1)
        assert (await at.ask.identify(token, HERE)).roles == {"acme": "viewer"}
        await at.users.withdraw("alice", "acme")
        await at.refused(token, "no longer has a role in its organisation")


@async_test
async def test_rotation_ends_key_and_tokens_or_gives_both_time(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, old = await at.users.add("alice", "acme")
        token = (await at.ask.login(old, "acme", HERE)).token
        await at.ask.identify(old, HERE)
        _, new = await at.users.rotate("alice", grace_seconds=60)
        at.clock.advance(59)
        for credential in (token, old, new):
            await at.ask.identify(credential, HERE)
        await at.refused(old, "replaced")
        await at.users.rotate("alice")
        await at.refused(token, "log in again")
        await at.refused(new, "replaced")


@async_test
async def test_revocation_of_one_token_of_all_and_of_what_signs(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        await at.users.grant("alice", "umbrella", "viewer")
        first = (await at.ask.login(key, "acme", HERE)).token
        other = (await at.ask.login(key, "umbrella", HERE)).token
        await at.ask.logout(first, HERE)
        assert at.recall(first) is None
        await at.refused(first, "revoked")
        await at.ask.identify(other, HERE)
        await at.users.revoke_tokens("alice")
        await at.refused(other, "revoked")
        second = (await at.ask.login(key, "acme", HERE)).token
        await at.ask.identify(second, HERE)
        SigningKeys(at.folder / "signing-keys.json", clock=at.clock).rotate(keep_old=False)
        await at.refused(second, "log in again")
        await at.refused(second, "signing key is no longer in use")
        with pytest.raises(InvalidArgument, match="headrace users rotate"):
            await at.ask.logout(key, HERE)


@async_test
async def test_an_expired_token_is_refused_though_it_is_remembered(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        token = (await at.ask.login(key, "acme", HERE)).token
        at.clock.advance(24 * 3600 + 60)
        assert at.recall(token) is None
        await at.refused(token, "log in again")
        await at.refused(token, "expired")
        assert (await at.ask.login(key, "acme", HERE)).token != token


@async_test
async def test_failed_logins_are_limited_by_address(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        for number in range(20):
            wrong = "nvapi-" + f"{number:012}" + "A" * 52
            with pytest.raises(Unauthenticated):
                await (at.ask.login(wrong, "acme", HERE) if number % 2 else at.ask.identify(wrong, HERE))
        hashes = at.hasher.matched
        for attempt in (at.ask.login(key, "acme", HERE), at.ask.identify(key, HERE)):
            with pytest.raises(ResourceExhausted, match="this address: wait 3 s") as caught:
                await attempt
            assert caught.value.retry_after_seconds == pytest.approx(3.0)
        assert at.hasher.matched == hashes
        await at.ask.login(key, "acme", "10.0.0.2")
        at.clock.advance(3)
        await at.ask.login(key, "acme", HERE)
        assert {line["outcome"] for line in at.audited()} == {"allowed", "denied"}


@async_test
async def test_failed_logins_are_limited_by_key_from_any_address(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        wrong = key[:20] + "A" * 50
        for number in range(10):
            with pytest.raises(Unauthenticated):
                await at.ask.login(wrong, "acme", f"10.0.1.{number}")
        with pytest.raises(ResourceExhausted, match="this key"):
            await at.ask.login(wrong, "acme", "10.0.2.1")
        # Refused by one limit, it is not counted by the others.
        for number in range(20):
            with pytest.raises(Unauthenticated):
                await at.ask.login("nvapi-" + f"{number:012}" + "A" * 52, "acme", "10.0.2.1")


@async_test
async def test_logins_that_succeed_are_limited_too_but_less(tmp_path: Path) -> None:
    limits = LoginLimits(RateLimit(30, 60.0), RateLimit(2, 60.0), RateLimit(2, 60.0, by="key"))
    async with access_fixture(tmp_path, limits) as at:
        _, key = await at.users.add("alice", "acme")
        for _ in range(30):
            await at.ask.login(key, "acme", HERE)
        with pytest.raises(ResourceExhausted):
            await at.ask.login(key, "acme", HERE)


class BrokenRows(MemoryRows):
    broken = False

    async def find_user(self, *, id: str = "", name: str = "", lookup: str = "") -> User | None:
        if self.broken:
            raise Unavailable("the database is away")
        return await super().find_user(id=id, name=name, lookup=lookup)


@async_test
async def test_without_a_database_logins_are_refused_and_not_counted_as_failures(tmp_path: Path) -> None:
    rows, clock = BrokenRows(), ManualClock()
    limits = LoginLimits(failures=RateLimit(1, 60.0), key_failures=RateLimit(1, 60.0, by="key"))
    access = open_access(tmp_path, rows, hasher=CountingHasher(), limits=limits, clock=clock)
    try:
        _, key = await access.users.add("alice", "acme")
        token = (await access.authenticator.login(key, "acme", HERE)).token
        rows.broken = True
        clock.advance(1)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await access.authenticator.login(key, "acme", HERE)
            for credential in (token, key):
                with pytest.raises(Unavailable):
                    await access.authenticator.identify(credential, HERE)
        rows.broken = False
        await access.authenticator.login(key, "acme", HERE)
        outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
        assert outcomes == ["allowed", *["failed"] * 9, "allowed"]
    finally:
        access.close()


@async_test
async def test_who_stops_waiting_does_not_stop_the_others(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        first, second = (asyncio.create_task(at.ask.identify(key, HERE)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).user_name == "alice"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert at.hasher.matched == 1


@async_test
async def test_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    async with access_fixture(tmp_path) as at:
        _, key = await at.users.add("alice", "acme")
        first = (await at.ask.login(key, "acme", HERE)).token
        known = at.ask._cache[first]
        for number in range(4200):
            at.ask._cache_login(f"t{number}", known)
        assert len(at.ask._cache) == 4096
        assert at.recall(first) is None
        await at.ask.identify(first, HERE)


@async_test
async def test_user_rows_are_read_at_most_once_a_second(tmp_path: Path) -> None:
    rows, clock = CountedMemoryRows(), ManualClock()
    access = open_access(tmp_path, rows, hasher=CountingHasher(), clock=clock)
    try:
        keys = [(await access.users.add(f"user-{number}", "acme"))[1] for number in range(10)]
        tokens = [(await access.authenticator.login(key, "acme", HERE)).token for key in keys]
        everything = [*keys, *tokens]
        clock.advance(1)
        await asyncio.gather(*(access.authenticator.identify(document, HERE) for document in everything))
        reads, looks = rows.reads, rows.looks
        for _ in range(5):
            clock.advance(1)
            await asyncio.gather(*(access.authenticator.identify(document, HERE) for document in everything))
        assert (rows.reads - reads, rows.looks - looks) == (0, 5)
        await access.users.remove("user-3")
        clock.advance(1)
        answers = await asyncio.gather(
            *(access.authenticator.identify(document, HERE) for document in everything), return_exceptions=True
        )
        assert [number for number, answer in enumerate(answers) if isinstance(answer, Unauthenticated)] == [3, 13]
    finally:
        access.close()


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_the_credential_of_a_request() -> None:
    assert parse_credential("Bearer abc") == parse_credential("bearer  abc ") == "abc"
    assert parse_credential(basic(f"$oauthtoken:acme,{NOBODY}")) == NOBODY
    assert parse_credential(basic(f"$oauthtoken:{NOBODY}")) == NOBODY
    wrong = (
        None,
        "",
        "Bearer",
        "Bearer ",
        "abc",
        "Digest abc",
        "Basic",
        "Basic !",
        basic("alice:x"),
        basic("$oauthtoken:"),
    )
    for item in (*wrong, basic("$oauthtoken"), "Basic /w==", "Basic " + "A" * 2000, basic("$oauthtoken:acme,")):
        with pytest.raises(Unauthenticated, match="^Unauthorized: missing token$"):
            parse_credential(item)
