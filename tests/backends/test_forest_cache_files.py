# SPDX-License-Identifier: Apache-2.0
"""The folder of what was checked: damaged entries, folders that are not ours, full disks, and what goes when."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_forest_cache import KINDS, answer_of, checks, content_of, entries

from headrace.backends.tabular import check_cache
from headrace.backends.tabular.check_cache import CheckCache, default_folder, read_file

__all__ = ["checks", "entries"]

pytestmark = pytest.mark.worker("frameworks")

KEY = {"digest": "of a file"}


def sealed(told: Any, content: bytes = b"", length: int | None = None) -> bytes:
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    body = struct.pack(">Q", len(text) if length is None else length) + text + content
    return hashlib.sha256(body).digest() + body


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_entry_is_replaced_and_the_file_checked_again(
    tmp_path: Path, entries: Any, checks: list[str], kind: str
) -> None:
    expected = answer_of(kind, tmp_path, content_of(kind))
    (entry,) = entries()
    whole, choose = entry.read_bytes(), random.Random(1)
    damaged = [b"", whole[:31], whole[:39], whole[:-1], whole + b"\0", bytes(len(whole))]
    for _ in range(20):
        copy = bytearray(whole)
        copy[choose.randrange(len(copy))] ^= 1 << choose.randrange(8)
        damaged.append(bytes(copy))
    for copy in damaged:
        entry.write_bytes(copy)
        looks = len(checks)
        np.testing.assert_array_equal(answer_of(kind, tmp_path, None), expected)
        assert len(checks) > looks
        assert entry.read_bytes() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_entry_with_other_content_is_not_used(
    tmp_path: Path, entries: Any, checks: list[str], kind: str
) -> None:
    expected = answer_of(kind, tmp_path, content_of(kind))
    (entry,) = entries()
    whole = entry.read_bytes()
    (length,) = struct.unpack_from(">Q", whole, 32)
    told, content = json.loads(whole[40 : 40 + length]), whole[40 + length :]
    begin = told["facts"].get("trees")
    others = [
        sealed({**told, "key": {**told["key"], "checks": "0"}}, content),
        sealed({**told, "facts": {}}, content),
        sealed({**told, "facts": [1]}, content),
        sealed({**told, "facts": {"trees": {"begin": 1}} if begin else {"columns": 6}}, content),
        sealed(b"[" * 100_000, content),
        sealed(b"{}", content),
        sealed(told, content, length=2**63),
    ]
    if begin:
        others += [
            sealed({**told, "facts": {"trees": {**begin, name: value}}})
            for name, value in (("begin", 5), ("end", 2**40), ("end", begin["end"] - 3), ("count", 1), ("columns", 7))
        ]
    for other in others:
        entry.write_bytes(other)
        looks = len(checks)
        np.testing.assert_array_equal(answer_of(kind, tmp_path, None), expected)
        assert len(checks) > looks
        assert entry.read_bytes() == whole


@pytest.mark.parametrize("put", ["folder", "pipe", "link", "writable"])
def test_an_entry_that_is_not_a_private_file_of_ours_is_not_read(
    tmp_path: Path, entries: Any, checks: list[str], put: str
) -> None:
    expected = answer_of("txt", tmp_path, content_of("txt"))
    (entry,) = entries()
    whole = entry.read_bytes()
    entry.unlink()
    if put == "folder":
        entry.mkdir()
    elif put == "pipe":
        os.mkfifo(entry)
    elif put == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        entry.symlink_to(tmp_path / "elsewhere")
    else:
        entry.write_bytes(whole)
        entry.chmod(0o666)
    looks = len(checks)
    np.testing.assert_array_equal(answer_of("txt", tmp_path, None), expected)
    assert len(checks) > looks


@pytest.mark.parametrize("wrong", ["a file above", "others may enter", "a link", "a file"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unusable_folder_costs_only_time(
    tmp_path: Path, entries: Any, checks: list[str], kind: str, wrong: str
) -> None:
    above = tmp_path / "cache" / "headrace"
    folder = above / "checked"
    if wrong == "a file above":
        above.parent.mkdir()
        above.write_text("no folder")
    else:
        above.mkdir(parents=True)
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        if wrong == "others may enter":
            folder.mkdir()
            folder.chmod(0o755)
        elif wrong == "a link":
            folder.symlink_to(tmp_path / "elsewhere")
        else:
            folder.write_text("no folder")
    first = answer_of(kind, tmp_path, content_of(kind))
    looks = len(checks)
    np.testing.assert_array_equal(answer_of(kind, tmp_path, None), first)
    assert len(checks) > looks
    if folder.is_dir():
        assert list(folder.iterdir()) == []


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, entries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_of("ubj", tmp_path, content_of("ubj"))
    folder = entries()[0].parent
    entry = entries()[0]
    key = json.loads(entry.read_bytes()[40:])["key"]
    assert CheckCache(folder).find(key) is not None
    monkeypatch.setattr(check_cache.os, "geteuid", lambda: os.getuid() + 1)
    assert CheckCache(folder).find(key) is None
    CheckCache(folder).keep(KEY, {})
    assert entries() == [entry]


@pytest.mark.parametrize("call", ["replace", "mkdir", "statvfs"])
def test_a_disk_that_refuses_leaves_nothing_half_written(
    tmp_path: Path, entries: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test" / "1").mkdir(parents=True)
    (tmp_path / "test" / "1" / "model.ubj").write_bytes(content_of("ubj"))

    def refuse(*_given: Any, **_more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "cache" / "headrace" / "checked"
    with monkeypatch.context() as patched:
        patched.setattr(check_cache.os, call, refuse)
        CheckCache(folder).keep(KEY, {}, b"content")
    assert entries() == []
    answer_of("ubj", tmp_path, None)
    assert len(entries()) == 1


def test_stored_entries_are_found_and_deleted_ones_are_gone(tmp_path: Path) -> None:
    files = CheckCache(tmp_path / "a" / "b")
    assert files.find(KEY) is None
    files.remove(KEY)
    files.keep(KEY, {"columns": 3, "names": ["é"]}, b"content")
    result = files.find(KEY)
    assert result is not None
    assert (result.facts, bytes(result.content)) == ({"columns": 3, "names": ["é"]}, b"content")
    assert files.find({"digest": "of another"}) is None
    files.remove(KEY)
    assert files.find(KEY) is None


def test_the_least_recently_used_entry_is_evicted_first_and_other_files_stay(tmp_path: Path) -> None:
    files = CheckCache(tmp_path, max_bytes=50_000)
    tmp_path.chmod(0o700)
    (tmp_path / "notes.txt").write_bytes(bytes(60_000))
    keys = [{"digest": str(number)} for number in range(5)]
    for age, key in enumerate(keys[:4]):
        files.keep(key, {}, bytes(11_000))
        newest = max(tmp_path.glob("*.checked"), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (0, newest.stat().st_mtime - 1000 + age))
    # It is wanted now, so the next one is the one to go.
    assert files.find(keys[0]) is not None
    files.keep(keys[4], {}, bytes(11_000))
    assert [files.find(key) is not None for key in keys] == [True, False, True, True, True]
    assert (tmp_path / "notes.txt").exists()
    files.keep(KEY, {}, bytes(30_000))
    assert files.find(KEY) is None


def test_old_and_unfinished_entries_are_deleted(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    files = CheckCache(tmp_path, max_age_seconds=1000)
    files.keep(KEY, {})
    (old,) = tmp_path.iterdir()
    unfinished, recent = tmp_path / ".new-1-ab", tmp_path / ".new-2-cd"
    unfinished.write_bytes(b"")
    recent.write_bytes(b"")
    for path, age in ((old, 1001), (unfinished, 3601)):
        os.utime(path, (0, path.stat().st_mtime - age))
    files.keep({"digest": "of another"}, {})
    assert not old.exists()
    assert not unfinished.exists()
    assert recent.exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_folder({"XDG_CACHE_HOME": "/there"}) == Path("/there/headrace/checked")
    monkeypatch.setenv("HOME", "/home/her")
    for base in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "not/absolute"}):
        assert default_folder(base) == Path("/home/her/.cache/headrace/checked")
    monkeypatch.setattr(check_cache.os.path, "expanduser", lambda path: path)
    assert default_folder({}) is None
    assert default_folder({"XDG_CACHE_HOME": "/there", check_cache.ENVIRONMENT_VARIABLE: "off"}) is None


@pytest.mark.parametrize("size", [0, 1, 5 << 20, (8 << 20) + 3])
def test_a_file_is_read_whole_with_the_digest_of_what_was_read(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    file = tmp_path / "file"
    file.write_bytes(content)
    data, digest = read_file(file)
    assert data == content
    assert digest == hashlib.sha256(content).hexdigest()
    data += b"more"  # nothing holds on to it
    assert read_file(file, hashed=False) == (content, "")
