# SPDX-License-Identifier: Apache-2.0
"""The audit log: one line each, whole, no secret, nothing forged, nothing lost when it is full."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.access.audit import AuditLog
from headrace.api.access.roles import Principal
from headrace.core.clock import ManualClock
from headrace.core.errors import InvalidArgument

ALICE = Principal("id-1", "alice", "", {"acme": "operator"}, "jti-1")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("ascii").split("\n")[:-1]]


def test_a_line_says_who_did_what_where_from_and_how_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path, clock=ManualClock(wall=1_700_000_000.5))
    audit.record("services.start", "allowed", ALICE, "acme", "job-1", "10.0.0.1")
    audit.record("login", "denied", None, "acme", "", "10.0.0.2", "Unauthorized: no")
    audit.close()
    assert lines(path) == [
        {
            "time": "2023-11-14T22:13:20.500Z",
            "user": "alice",
            "user_id": "id-1",
            "organisation": "acme",
            "address": "10.0.0.1",
            "operation": "services.start",
            "target": "job-1",
            "outcome": "allowed",
            "token_id": "jti-1",
        },
        {
            "time": "2023-11-14T22:13:20.500Z",
            "user": None,
            "user_id": None,
            "organisation": "acme",
            "address": "10.0.0.2",
            "operation": "login",
            "target": "",
            "outcome": "denied",
            "reason": "Unauthorized: no",
        },
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_could_read_is_closed_to_them_and_only_grows(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"old": 1}\n')
    path.chmod(0o644)
    audit = AuditLog(path)
    audit.record("login", "allowed", ALICE, "acme", "", "a")
    audit.close()
    assert [line.get("old") for line in lines(path)] == [1, None]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with pytest.raises(OSError):
        AuditLog(link)


@given(st.lists(st.text(), min_size=6, max_size=6))
def test_log_lines_cannot_be_forged(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    audit = AuditLog(path)
    name, organisation, target, address, reason, operation = texts
    principal = Principal("id", name, "", {}, "")
    audit.record(operation, "failed", principal, organisation, target, address, reason)
    audit.record(operation, "denied", principal, organisation, target, address, reason)
    audit.close()
    assert [line["outcome"] for line in lines(path)] == ["failed", "denied"]


@pytest.mark.parametrize("text", ["a\n{}", "a\r\n{}", "\x1b[2J", "\u202e", "\u2028", "\x00", "\ud800", '"}'])
def test_what_terminals_and_readers_stumble_over_is_escaped(tmp_path: Path, text: str) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    audit.record("jobs.write", "allowed", ALICE, "acme", text, text)
    audit.close()
    raw = path.read_bytes()
    assert raw.count(b"\n") == 1 and all(32 <= byte < 127 for byte in raw[:-1])
    assert lines(path)[0]["target"] == text


SECRET = "Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MA"


@pytest.mark.parametrize(
    "text",
    [
        f"nvapi-{SECRET}{SECRET}",
        f"the key nvapi-{SECRET} is wrong",
        "x" * 250 + f"nvapi-{SECRET}",
        f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET}",
        f"Bearer {SECRET}",
        f"basic {SECRET}",
        f"s3://user:{SECRET}@bucket/x",
        f"https://host/x?X-Amz-Signature={SECRET}",
        f'{{"secret_key": "{SECRET}"}}',
        f"access_key={SECRET}",
        f"hr_{SECRET}",
    ],
)
def test_secrets_are_redacted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    audit.record(text, "failed", Principal(text, text, "", {}, text), text, text, text, text)
    audit.close()
    for cut in range(len(SECRET) - 5):
        assert SECRET[cut : cut + 6] not in path.read_text()


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    audit.record("jobs.write", "allowed", ALICE, "acme", "x" * 10_000_000, "a")
    audit.close()
    assert lines(path)[0]["target"] == "x" * 256


def test_a_full_file_is_rotated_and_the_oldest_deleted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path, max_bytes=1000, files=3)
    for number in range(60):
        audit.record("jobs.write", "allowed", ALICE, "acme", str(number), "a")
    audit.close()
    names = [path.with_name(f"audit.jsonl.{number}") for number in (3, 2, 1)] + [path]
    assert all(0 < name.stat().st_size <= 1000 and stat.S_IMODE(name.stat().st_mode) == 0o600 for name in names)
    assert not path.with_name("audit.jsonl.4").exists()
    received = [int(line["target"]) for name in names for line in lines(name)]
    assert received == list(range(received[0], 60)) and received[0] > 0


WRITER = """
import sys
from pathlib import Path
from headrace.api.access.audit import AuditLog
audit = AuditLog(Path(sys.argv[1]), max_bytes=4000, files=100)
for number in range(100):
    audit.record("jobs.write", "allowed", None, sys.argv[2], str(number), "a")
audit.close()
"""


def test_several_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in ("a", "b", "c")]
    assert [writer.wait(180) for writer in writers] == [0, 0, 0]
    files = [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    assert len(files) > 5
    received = sorted((line["organisation"], int(line["target"])) for file in files for line in lines(file))
    assert received == [(name, number) for name in "abc" for number in range(100)]


def test_a_flood_of_denials_does_not_push_the_past_out(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    clock = ManualClock()
    audit = AuditLog(path, clock=clock)
    for _ in range(500):
        audit.record("authenticate", "denied", None, "", "", "6.6.6.6")
    audit.record("authenticate", "denied", None, "", "", "1.1.1.1")
    audit.record("login", "allowed", ALICE, "acme", "", "6.6.6.6")
    audit.close()
    reported = lines(path)
    assert len(reported) == 122
    assert [line.get("denials_left_out") for line in reported[-2:]] == [380, None]


def test_the_file_is_created_again_if_it_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    os.rename(path, tmp_path / "taken")
    audit.record("login", "allowed", ALICE, "acme", "", "a")
    audit.close()
    assert len(lines(path)) == 1


def test_a_disk_that_fails_does_not_fail_the_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    audit = AuditLog(folder / "audit.jsonl")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    audit.record("login", "allowed", ALICE, "acme", "", "a")
    audit.close()
    assert "audit.jsonl: No such file or directory" in caplog.text


def test_a_torn_line_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, line: write(file, line[:20]))
        audit.record("login", "allowed", ALICE, "acme", "1", "a")
    audit.record("login", "allowed", ALICE, "acme", "2", "a")
    audit.close()
    torn, whole = path.read_text().split("\n")[:-1]
    assert len(torn) == 20 and json.loads(whole)["target"] == "2"


def test_invalid_rotation_limits(tmp_path: Path) -> None:
    for max_bytes, files in ((0, 1), (1, 0)):
        with pytest.raises(InvalidArgument):
            AuditLog(tmp_path / "audit.jsonl", max_bytes=max_bytes, files=files)


def test_the_newest_lines_of_an_organisation(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path, max_bytes=2000, files=2)
    for number in range(30):
        audit.record("jobs.write", "allowed", ALICE, "acme" if number % 2 else "other", f"job-{number}", "10.0.0.1")
    with path.open("ab") as file:
        file.write(b'{"torn\n[]\n\xff\n')
    result = audit.recent("acme", 5)
    assert [item["target"] for item in result] == ["job-29", "job-27", "job-25", "job-23", "job-21"]
    assert len(path.read_bytes().splitlines()) < 10  # so some are of the file before
    assert audit.recent("nobody", 5) == audit.recent("acme", 0) == []
    path.unlink()
    assert len(audit.recent("acme", 100)) > 2
    audit.close()
