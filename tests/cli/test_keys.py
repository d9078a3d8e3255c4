# SPDX-License-Identifier: Apache-2.0
"""`headrace keys`: output, files, and errors."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.api.access.api_keys import KeyRing, read_keys
from headrace.cli.keys import keys


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(keys, arguments)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_a_key_is_printed_once_and_works(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    out, told = run("create", "alice", "--scope", "infer", "--scope", "read", "--expires", "30d", "--file", str(file))
    key = out.strip()
    assert out == f"{key}\n"  # alone, for `KEY=$(headrace keys create ...)`
    assert told.startswith(f"alice: added to {file}, until 20")
    assert key not in told
    result = KeyRing(file).find({b"x-api-key": key.encode()}, time.monotonic())
    assert result is not None
    assert (result.name, result.scopes) == ("alice", {"infer", "read"})
    assert result.expires is not None
    assert result.expires - time.time() == pytest.approx(30 * 86400, abs=60)


def test_scopes_and_dates(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    run("create", "plain", "--file", str(file))
    run("create", "dated", "--scope", "admin", "--expires", "2999-01-31", "--file", str(file))
    plain, dated = read_keys(file)
    assert (plain.scopes, plain.expires) == ({"infer"}, None)
    assert (dated.scopes, dated.expires) == ({"admin"}, datetime(2999, 1, 31, tzinfo=UTC).timestamp())


def test_list_and_revoke(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = json.loads(run("create", "alice", "--file", str(file), "--json")[0])["key"]
    run("create", "bob", "--scope", "read", "--scope", "infer", "--expires", "12h", "--file", str(file))
    out, _ = run("list", "--file", str(file))
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "alice", "bob"]
    assert "never" in out
    assert "infer read" in out
    assert key not in out
    rows = json.loads(run("list", "--file", str(file), "--json")[0])
    assert [(row["name"], row["state"]) for row in rows] == [("alice", "valid"), ("bob", "valid")]
    assert run("revoke", "alice", "--file", str(file))[0] == "alice: revoked\n"
    assert [read_key.name for read_key in read_keys(file)] == ["bob"]
    assert json.loads(run("revoke", "bob", "--file", str(file), "--json")[0]) == {"name": "bob", "revoked": True}


def test_what_a_router_grants_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    run("create", "alice", "--share", "2", "--file", str(file))
    run("create", "bob", "--file", str(file))
    out, _ = run("set", "alice", "--priority", "1", "--output-tokens-per-minute", "600", "--file", str(file))
    assert out == "alice: priority 1, output_tokens_per_minute 600\n"
    alice, bob = json.loads(run("list", "--file", str(file), "--json")[0])
    assert (alice["share"], alice["priority"], alice["output_tokens_per_minute"]) == (2.0, 1, 600)
    assert bob["share"] == 1.0
    out, _ = run("list", "--file", str(file))
    assert "ROUTER" in out and "share 2, priority 1, 600 output tokens/min" in " ".join(out.split())


def test_an_expired_key_is_listed_as_such(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    run("create", "old", "--expires", "1h", "--file", str(file))
    file.write_text(file.read_text().replace("expires: '20", "expires: '19"))
    assert json.loads(run("list", "--file", str(file), "--json")[0])[0]["state"] == "expired"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["create", "alice"], "already has a key named 'alice'"),
        (["create", "a b"], "not a valid name for a key"),
        (["create", "bob", "--scope", "root"], "--scope root: write one of infer, read, admin"),
        (["create", "bob", "--expires", "soon"], "give a time such as 30d"),
        (["create", "bob", "--expires", "2001-01-01"], "that time is in the past"),
        (["create", "bob", "--expires", "0d"], "that time is in the past"),
        (["revoke", "bob"], "has no key named 'bob'"),
        (["set", "bob", "--share", "2"], "has no key named 'bob'"),
        (["set", "alice"], "give what to change"),
        (["set", "alice", "--share", "0"], "`share` is a number over 0"),
    ],
)
def test_what_is_refused(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    run("create", "alice", "--file", str(file))
    before = file.read_text()
    out, told = run(*arguments, "--file", str(file), code=1)
    assert (out, complaint in told) == ("", True)
    assert file.read_text() == before


def test_no_file(tmp_path: Path) -> None:
    assert "does not exist" in run("list", "--file", str(tmp_path / "none.yaml"), code=1)[1]
    assert "No such file" in run("create", "a", "--file", str(tmp_path / "no/such/keys.yaml"), code=1)[1]
