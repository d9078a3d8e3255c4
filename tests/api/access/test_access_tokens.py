# SPDX-License-Identifier: Apache-2.0
"""Tokens: what is in them, how long they are good, and what is tried to forge them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from headrace.api.access.tokens import SigningKeys, Tokens
from headrace.api.access.users import User, user_id
from headrace.core.clock import ManualClock
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unauthenticated
from support.access_rows import MemoryRows
from support.async_tests import async_test

HOUR = 3600.0


class AccessFixture:
    def __init__(self, folder: Path, key_file: Path | None = None) -> None:
        self.clock = ManualClock()
        self.rows = MemoryRows()
        self.path = folder / "signing-keys.json"
        self.keys = SigningKeys(self.path, key_file, self.clock)
        self.tokens = Tokens(self.keys, self.rows, self.clock)
        self.user = User(user_id("alice"), "alice", self.clock.wall(), {"acme": "operator"})

    async def token(self) -> str:
        return (await self.tokens.issue(self.user, "acme", "operator"))[0]

    def signed(self, **changes: Any) -> str:
        """Signed with the right key, whatever it says."""
        now = self.clock.wall()
        claims = {"iss": "headrace", "user_id": "u", "org_name": "acme", "role": "viewer", "jti": "j", "iat": now}
        claims |= {"exp": now + HOUR} | changes
        key = self.keys.current
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(claims, key.private, key.algorithm, headers={"kid": key.kid})


def pem(path: Path, key: Any, mode: int = 0o600) -> Path:
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    path.chmod(mode)
    return path


def b64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def forged(head: dict[str, Any], said: dict[str, Any], secret: bytes | None) -> str:
    text = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(said).encode())}"
    sign = b"" if secret is None else hmac.new(secret, text.encode(), hashlib.sha256).digest()
    return f"{text}.{b64(sign)}"


@async_test
async def test_the_claims_of_a_token(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    token = await at.token()
    said = jwt.decode(token, options={"verify_signature": False})
    now = at.clock.wall()
    assert (said["user_id"], said["org_name"], said["role"]) == (at.user.id, "acme", "operator")
    assert (said["iat"], said["exp"]) == (now, now + 24 * HOUR)
    assert jwt.get_unverified_header(token) == {"alg": "HS256", "typ": "JWT", "kid": at.keys.current.kid}
    claims = at.tokens.verify(token)
    assert (claims.user_id, claims.organisation, claims.role) == (at.user.id, "acme", "operator")
    assert claims.token_id == said["jti"]


@async_test
async def test_the_last_token_is_given_again_until_twelve_hours_before_its_end(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    first = await at.token()
    at.clock.advance(12 * HOUR - 1)
    assert await at.token() == first
    other = (await at.tokens.issue(at.user, "umbrella", "operator"))[0]
    assert other != first
    assert (await at.tokens.issue(at.user, "acme", "admin"))[0] != first  # the role has changed
    at.clock.advance(1)
    second = await at.token()
    assert second != first
    assert at.tokens.verify(first).token_id != at.tokens.verify(second).token_id


@async_test
async def test_a_revoked_token_is_not_given_again(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    token, claims = await at.tokens.issue(at.user, "acme", "operator")
    assert await at.tokens.is_valid(claims)
    await at.tokens.revoke(claims.token_id, claims.expires)
    assert not await at.tokens.is_valid(claims)
    assert at.rows.revoked[claims.token_id] > claims.expires
    assert await at.token() != token
    for bad in ("", "x" * 65):
        with pytest.raises(InvalidArgument):
            await at.tokens.revoke(bad)


@async_test
async def test_a_token_made_in_the_moment_of_a_revocation_is_good(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    before = await at.token()
    at.user = User(at.user.id, "alice", 0.0, at.user.roles, tokens_after=at.clock.wall())
    after = await at.token()
    assert at.tokens.verify(before).issued <= at.user.tokens_after < at.tokens.verify(after).issued


@async_test
async def test_expiry_with_a_minute_for_clocks_that_differ(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    token = await at.token()
    claims = at.tokens.verify(token)
    at.clock.advance(24 * HOUR + 59)
    at.tokens.verify(token)
    at.clock.advance(1)
    with pytest.raises(Unauthenticated, match="Unauthorized: the token has expired: log in again"):
        at.tokens.verify(token)
    assert not await at.tokens.is_valid(claims)


def test_a_token_from_the_future(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    now = at.clock.wall()
    at.tokens.verify(at.signed(iat=now + 59))
    with pytest.raises(Unauthenticated, match="clocks"):
        at.tokens.verify(at.signed(iat=now + 61))


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "elsewhere"},
        {"iss": None},
        {"user_id": None},
        {"user_id": 7},
        {"org_name": ["acme"]},
        {"jti": None},
        {"role": "root"},
        {"role": ["admin"]},
        {"exp": None},
        {"exp": 10**400},
        {"exp": 1_800_000_000},  # longer than any of ours
        {"iat": None},
        {"iat": True},
        {"iat": float("nan")},
        {"iat": -1},
        {"nbf": 0},
        {"aud": "other"},
    ],
)
def test_a_token_signed_by_our_key_is_validated_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    at = AccessFixture(tmp_path)
    at.tokens.verify(at.signed())
    with pytest.raises(Unauthenticated):
        at.tokens.verify(at.signed(**changes))


@async_test
async def test_no_algorithm_but_the_keys_own(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    claims = jwt.decode(await at.token(), options={"verify_signature": False})
    kid, secret = at.keys.current.kid, at.keys.current.public
    at.tokens.verify(forged({"alg": "HS256", "kid": kid}, claims, secret))  # so that the others fail for what they are
    for algorithm in ("none", "None", "NONE", "", "HS384", "HS512", "RS256", "EdDSA", None, ["HS256"]):
        for key in (secret, None):
            with pytest.raises(Unauthenticated):
                at.tokens.verify(forged({"alg": algorithm, "kid": kid}, claims, key))
    with pytest.raises(Unauthenticated):
        at.tokens.verify(forged({"alg": "HS256", "kid": kid}, claims, None))
    with pytest.raises(Unauthenticated):
        at.tokens.verify(forged({"alg": "HS256", "kid": kid}, claims, b"guess"))


@pytest.mark.parametrize("kind", ["RS256", "EdDSA"])
@async_test
async def test_a_key_pair_from_a_file(tmp_path: Path, kind: str) -> None:
    created: Any = rsa.generate_private_key(65537, 2048) if kind == "RS256" else ed25519.Ed25519PrivateKey.generate()
    at = AccessFixture(tmp_path, pem(tmp_path / "key.pem", created))
    token = await at.token()
    assert jwt.get_unverified_header(token)["alg"] == kind
    assert at.tokens.verify(token).user_id == at.user.id
    assert "PRIVATE" not in at.path.read_text()
    # The public key is anyone's; as an HMAC secret it must not do.
    claims = jwt.decode(token, options={"verify_signature": False})
    for encoding in (serialization.Encoding.PEM, serialization.Encoding.DER):
        public = created.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(Unauthenticated):
            at.tokens.verify(forged({"alg": "HS256", "kid": at.keys.current.kid}, claims, public))
    with pytest.raises(FailedPrecondition):
        at.keys.rotate()
    # Another key in the same file: noticed, and tokens of the first still verify.
    other: Any = ed25519.Ed25519PrivateKey.generate()
    pem(tmp_path / "other.pem", other)
    os.replace(tmp_path / "other.pem", tmp_path / "key.pem")
    at.user = User(user_id("bob"), "bob", 0.0, {"acme": "operator"})
    assert jwt.get_unverified_header(await at.token())["alg"] == "EdDSA"
    assert at.tokens.verify(token)


def test_key_files_that_will_not_do(tmp_path: Path) -> None:
    weak = pem(tmp_path / "weak.pem", rsa.generate_private_key(65537, 1024))
    curve = pem(tmp_path / "curve.pem", ec.generate_private_key(ec.SECP256R1()))
    readable = pem(tmp_path / "readable.pem", ed25519.Ed25519PrivateKey.generate(), 0o644)
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nvapi-secret")
    nonsense.chmod(0o600)
    wrong = {
        weak: "2048 bits",
        curve: "Ed25519",
        nonsense: "not a PEM private key",
        tmp_path / "none.pem": "cannot read",
    }
    for path, text in wrong.items():
        with pytest.raises(InvalidArgument, match=text) as caught:
            SigningKeys(tmp_path / "keys.json", path)
        assert "nvapi-secret" not in caught.value.message
    with pytest.raises(FailedPrecondition, match="chmod 600"):
        SigningKeys(tmp_path / "keys.json", readable)


@async_test
async def test_rotation_keeps_tokens_until_their_end(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    old = await at.token()
    elsewhere = SigningKeys(at.path, clock=at.clock)  # the command line, beside a running gateway
    kid = elsewhere.rotate()
    new = await at.token()
    assert jwt.get_unverified_header(new)["kid"] == kid != jwt.get_unverified_header(old)["kid"]
    assert at.tokens.verify(old).user_id == at.user.id
    # Who finds the old secret later can make nothing new of it.
    retired = at.keys.find(jwt.get_unverified_header(old)["kid"])
    assert retired is not None and retired.retired is not None
    at.clock.advance(HOUR)
    now = at.clock.wall()
    output = jwt.decode(old, options={"verify_signature": False}) | {"iat": now, "exp": now + HOUR}
    with pytest.raises(Unauthenticated):
        at.tokens.verify(forged({"alg": "HS256", "kid": retired.kid}, output, retired.public))
    at.clock.advance(24 * HOUR)
    elsewhere.rotate()
    assert at.keys.find(retired.kid) is None
    with pytest.raises(Unauthenticated, match="log in again"):
        at.tokens.verify(old)


@async_test
async def test_rotation_that_drops_what_leaked(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    old, claims = await at.tokens.issue(at.user, "acme", "operator")
    SigningKeys(at.path, clock=at.clock).rotate(keep_old=False)
    with pytest.raises(Unauthenticated, match="signing key is no longer in use"):
        at.tokens.verify(old)
    assert not await at.tokens.is_valid(claims)


def test_the_file_is_its_owners_alone_and_made_once(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    assert stat.S_IMODE(at.path.stat().st_mode) == 0o600
    second = SigningKeys(at.path, clock=at.clock)
    assert second.current == at.keys.current
    assert len(at.keys.current.public) == 64
    assert "public" not in repr(at.keys.current)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["signing-keys.json", "signing-keys.json.lock"]
    at.path.chmod(0o640)
    with pytest.raises(FailedPrecondition, match="chmod 600"):
        SigningKeys(at.path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"keys": 3}',
        '{"keys": [{}]}',
        '{"keys": [{"kid": "a", "alg": "HS256", "secret": "c2hvcnQ=", "created": 0, "retired": null}]}',
        '{"keys": [{"kid": "a", "alg": "none", "public": "", "created": 0, "retired": null}]}',
    ],
)
@async_test
async def test_a_damaged_file_stops_a_start_and_not_a_running_gateway(tmp_path: Path, text: str) -> None:
    at = AccessFixture(tmp_path)
    token = await at.token()
    at.path.write_text(text)
    assert at.tokens.verify(token)
    with pytest.raises(InvalidArgument, match="is damaged"):
        SigningKeys(at.path)


@pytest.mark.parametrize("kid", [None, 7, "", "../../etc/passwd", "a" * 65, "x' OR '1", ["a"], "0000000000000000"])
@async_test
async def test_an_unknown_key_id(tmp_path: Path, kid: Any) -> None:
    at = AccessFixture(tmp_path)
    claims = jwt.decode(await at.token(), options={"verify_signature": False})
    with pytest.raises(Unauthenticated):
        at.tokens.verify(forged({"alg": "HS256", "kid": kid}, claims, at.keys.current.public))


@pytest.mark.parametrize(
    "token", ["", ".", "..", "a.b.c", "é.é.é", "\ud800", "x" * 5000, "[" * 4000, "e30.e30.", "bnVsbA.bnVsbA.a"]
)
def test_text_that_is_not_a_token(tmp_path: Path, token: str) -> None:
    at = AccessFixture(tmp_path)
    with pytest.raises(Unauthenticated) as caught:
        at.tokens.verify(token)
    assert caught.value.message.startswith("Unauthorized: ")


@async_test
async def test_a_changed_token_is_refused(tmp_path: Path) -> None:
    at = AccessFixture(tmp_path)
    head, said, sign = (await at.token()).split(".")
    claims = json.loads(base64.urlsafe_b64decode(said + "=="))
    for change in ({"role": "admin"}, {"org_name": "umbrella"}, {"user_id": "x"}, {"exp": claims["exp"] + 1}):
        with pytest.raises(Unauthenticated):
            at.tokens.verify(f"{head}.{b64(json.dumps(claims | change).encode())}.{sign}")
    with pytest.raises(Unauthenticated):
        at.tokens.verify(f"{head}.{said}.")
