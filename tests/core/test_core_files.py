# SPDX-License-Identifier: Apache-2.0
"""Atomic writes, JSON files and file locks."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import FailedPrecondition
from headrace.core.files import FileLock, list_folders, read_json, write_atomically, write_json


def test_a_file_is_replaced_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two", durable=False)
    assert path.read_bytes() == b"two" and path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_permissions_are_those_requested(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "exact", b"", mode=0o664)
        write_atomically(tmp_path / "usual", b"", mode=None)
        os.umask(0o022)
        write_atomically(tmp_path / "usual too", b"", mode=None)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {"exact": 0o664, "usual": 0o600, "usual too": 0o644}


def test_a_durable_write_syncs_the_file_and_then_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if os.path.isdir(synced[-1]):
            raise OSError(errno.EINVAL, "some file systems cannot sync a folder")

    monkeypatch.setattr(os, "fsync", sync)
    write_atomically(tmp_path / "file", b"x", durable=False)
    assert synced == []
    write_atomically(tmp_path / "file", b"y")
    assert len(synced) == 2 and synced[0].endswith(".new") and synced[1] == str(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"y"


def test_a_failed_write_keeps_the_old_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write_atomically(path, b"x")
    with pytest.raises(FailedPrecondition, match=r"file\.json cannot be written: No space left.*make room on its disk"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1} and [path.name for path in tmp_path.iterdir()] == ["file.json"]


def test_json_that_cannot_be_encoded_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "folder" / "file.json", {"a": object()})
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_file_without_a_json_object_reads_as_none(tmp_path: Path, content: bytes) -> None:
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "file.json").write_bytes(content)
    assert read_json(tmp_path / "file.json") is None


def test_folders_are_listed_by_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    assert [path.name for path in list_folders(tmp_path)] == ["a", "b"] and not list(list_folders(tmp_path / "none"))


@pytest.mark.parametrize("name", ["folder/lock", "."])
def test_a_lock_excludes_others_until_it_is_released(tmp_path: Path, name: str) -> None:
    with FileLock(tmp_path / name):
        other = FileLock(tmp_path / name)
        assert not other.try_acquire()
        with pytest.raises(TimeoutError):
            other.acquire(0.01)
    other.acquire(0.0)
    other.release()
    other.release()


def test_a_waiting_thread_gets_the_lock(tmp_path: Path) -> None:
    order: list[str] = []

    def wait() -> None:
        with FileLock(tmp_path / "lock"):
            order.append("second")

    with FileLock(tmp_path / "lock"):
        thread = threading.Thread(target=wait)
        thread.start()
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_a_lock_file_that_its_holder_removed_locks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder, waiter = FileLock(path), FileLock(path)
    holder.acquire()
    assert not waiter.try_acquire()
    path.unlink()
    holder.release()
    assert not waiter.try_acquire(), "it was the removed file"
    assert waiter.try_acquire() and path.exists()
    waiter.release()


def test_a_symbolic_link_is_not_a_lock_file(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        FileLock(tmp_path / "lock").acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_holding_does_not_block_the_loop(tmp_path: Path) -> None:
    async def main() -> None:
        lock = FileLock(tmp_path / "lock")
        async with FileLock(tmp_path / "lock").hold():
            with pytest.raises(TimeoutError):
                async with lock.hold(0.01):
                    raise AssertionError("both hold it")
        async with lock.hold(30.0):
            assert not FileLock(tmp_path / "lock").try_acquire()
        assert lock.try_acquire()
        lock.release()

    asyncio.run(main())


def test_shared_locks_exclude_only_exclusive_ones(tmp_path: Path) -> None:
    one, other = (FileLock(tmp_path / "lock", shared=True) for _ in range(2))
    exclusive = FileLock(tmp_path / "lock")
    assert one.try_acquire() and other.try_acquire() and not exclusive.try_acquire()
    one.release()
    assert not exclusive.try_acquire()
    other.release()
    assert exclusive.try_acquire() and not one.try_acquire()
    exclusive.release()
    one.release()
