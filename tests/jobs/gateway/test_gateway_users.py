# SPDX-License-Identifier: Apache-2.0
"""`headrace users` beside a gateway that runs: what it changes there, and that it is written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway

from support.waiting import eventually

ACME, OTHER = "/api/v1/orgs/acme/experiments", "/api/v1/orgs/other/experiments"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, open_gateway: Callable[..., Any]) -> Iterator[Gateway]:
    with open_gateway(tmp_path_factory.mktemp("users")) as made:
        yield made


def until(running: Gateway, path: str, token: str, status: int) -> None:
    """The gateway believes what it saw within the last second."""
    eventually(lambda: running.ask("GET", path, token=token).status == status)


def audited(running: Gateway) -> set[tuple[str, str]]:
    """Operations that were written down, and what they were done to."""
    lines = [json.loads(line) for line in (running.data_dir / "audit.jsonl").read_text().splitlines()]
    return {(line["operation"], line["target"]) for line in lines}


def test_a_role_is_granted_and_withdrawn(running: Gateway) -> None:
    key = running.command("users", "add", "alice", "--org", "acme").strip()
    assert running.ask("POST", "/api/v1/login", {"ngc_key": key, "ngc_org_name": "other"}).status == 401
    running.command("users", "grant", "alice", "--org", "other", "--role", "viewer")
    token = running.login(key, "other")
    assert running.ask("GET", OTHER, token=token).status == 200
    assert running.ask("POST", OTHER, {"network_arch": "x"}, token).status == 403
    running.command("users", "grant", "alice", "--org", "other", "--role", "operator")
    eventually(lambda: running.ask("POST", OTHER, {"network_arch": "x"}, token).status != 403)
    row = json.loads(running.command("users", "withdraw", "alice", "--org", "other", "--json"))
    assert row["roles"] == {"acme": "operator"}
    assert ("users.withdraw", "alice") in audited(running)
    until(running, OTHER, token, 401)
    assert running.ask("GET", ACME, token=running.login(key, "acme")).status == 200
    assert "no role of their own" in running.command("users", "withdraw", "alice", "--org", "other", code=1)
    assert "unknown role" in running.command("users", "grant", "alice", "--org", "acme", "--role", "king", code=1)


def test_tokens_are_revoked_and_the_key_stays(running: Gateway) -> None:
    key = running.command("users", "add", "bob", "--org", "acme").strip()
    token = running.login(key, "acme")
    assert running.ask("GET", ACME, token=token).status == 200
    assert "revoked" in running.command("users", "revoke-tokens", "bob")
    assert ("users.revoke-tokens", "bob") in audited(running)
    until(running, ACME, token, 401)
    fresh = running.login(key, "acme")
    assert fresh != token and running.ask("GET", ACME, token=fresh).status == 200
    assert "there is no user" in running.command("users", "revoke-tokens", "nobody", code=1)


def test_the_signing_key_is_rotated(running: Gateway, tmp_path: Path) -> None:
    key = running.command("users", "add", "carol", "--org", "acme").strip()
    token = running.login(key, "acme")
    kid = json.loads(running.command("users", "rotate-signing-key", "--json"))["kid"]
    assert running.ask("GET", ACME, token=token).status == 200  # of the old key, and good to its end
    dave = running.command("users", "add", "dave", "--org", "acme").strip()
    new = running.login(dave, "acme")
    assert running.ask("GET", ACME, token=new).status == 200
    assert "the old key is removed" in running.command("users", "rotate-signing-key", "--drop-old")
    for old in (token, new):
        until(running, ACME, old, 401)
    assert running.ask("GET", ACME, token=running.login(dave, "acme")).status == 200
    assert running.ask("GET", ACME, token=key).status == 200  # keys are no tokens
    assert ("users.rotate-signing-key", kid) in audited(running)
    assert key not in (running.data_dir / "audit.jsonl").read_text()
    empty = Gateway(tmp_path)
    empty.data_dir.mkdir()
    assert "has no signing keys" in empty.command("users", "rotate-signing-key", code=1)
    assert not list(empty.data_dir.iterdir())
