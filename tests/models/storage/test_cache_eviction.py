# SPDX-License-Identifier: Apache-2.0
"""A cache of bounded size: what was not wanted for the longest time goes, and never what is in use; and what is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_stub import StoreStub
from web_stub import WebStub, serve

from headrace.core.errors import FailedPrecondition
from headrace.core.telemetry.progress import ProgressEvent
from headrace.models.storage.cache import CacheUse, DownloadProgress, readable_seconds
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import FetchSettings, fetch_location

SMALL = FetchSettings(cache_bytes=2500, private_hosts=("127.0.0.1",))
HOLDER = """
import sys
from pathlib import Path
from headrace.models.storage.fetch import fetch_location
print(fetch_location(sys.argv[1], Path(sys.argv[2])).name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store() -> Iterator[StoreStub]:
    with StoreStub({"bkt": {name: name.encode() * 1000 for name in "abcd"}}) as stub:
        yield stub


class CacheUser:
    def __init__(self, store: StoreStub, folder: Path) -> None:
        self._credentials = CloudCredentials.from_metadata(store.metadata("bkt"))
        self._folder = folder
        self._time = 1_000_000

    def fetch(self, name: str, use: CacheUse) -> Path:
        path = fetch_location(f"s3://bkt/{name}", self._folder, self._credentials, settings=SMALL, use=use)
        # Later than all before, whatever the clock's steps are.
        self._time += 10
        os.utime(self._folder / ".locks" / f"{path.parent.name}.use", (self._time, self._time))
        return path

    def kept(self) -> str:
        return "".join(sorted(path.name[0] for path in self._folder.iterdir() if not path.name.startswith(".")))


@pytest.fixture
def cache_user(store: StoreStub, tmp_path: Path) -> CacheUser:
    return CacheUser(store, tmp_path)


def test_the_least_recently_used_is_evicted(cache_user: CacheUser) -> None:
    for name, kept in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("d", "cd"), ("b", "bd")):
        with CacheUse() as use:
            assert cache_user.fetch(name, use).read_bytes() == name.encode() * 1000
        assert cache_user.kept() == kept


def test_what_is_in_use_stays(cache_user: CacheUser) -> None:
    with CacheUse() as use:
        held = cache_user.fetch("a", use)
        for name in "bcd":
            with CacheUse() as other:
                cache_user.fetch(name, other)
        assert cache_user.kept() == "ad" and held.exists()
        with CacheUse() as other:
            cache_user.fetch("d", other)
            with pytest.raises(
                FailedPrecondition, match=r"needs 1\.0 kB, the cache may hold 2\.5 kB, and 2\.0 kB of it are"
            ):
                cache_user.fetch("b", other)
    with CacheUse() as use:
        cache_user.fetch("b", use)
    assert cache_user.kept() == "bd"


def test_what_another_process_uses_stays_until_it_ends(cache_user: CacheUser, tmp_path: Path) -> None:
    with WebStub({"/w.bin": serve(b"w" * 1000)}) as web:
        with CacheUse() as use:
            brought = fetch_location(web.url("/w.bin"), tmp_path, settings=SMALL, use=use)
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, web.url("/w.bin"), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None and child.stdout.readline().strip() == brought.name
    os.utime(tmp_path / ".locks" / f"{brought.parent.name}.use", (1, 1))
    for name in "abc":
        with CacheUse() as use:
            cache_user.fetch(name, use)
        assert brought.exists()
    child.kill()
    child.communicate()
    for name in "ab":
        with CacheUse() as use:
            cache_user.fetch(name, use)
    assert not brought.exists()


def test_what_can_never_fit_is_refused_before_it_is_downloaded(cache_user: CacheUser, store: StoreStub) -> None:
    store.buckets["bkt"]["e"] = b"e" * 2501
    with CacheUse() as use:
        cache_user.fetch("a", use)
    with CacheUse() as use, pytest.raises(FailedPrecondition, match=r"has 2\.5 kB and the cache .* may hold"):
        cache_user.fetch("e", use)
    assert cache_user.kept() == "a"


def test_a_deleted_entry_is_fetched_again(cache_user: CacheUser) -> None:
    with CacheUse() as use:
        path = cache_user.fetch("a", use)
        path.unlink()
        path.parent.rmdir()
        assert cache_user.fetch("a", use) == path and path.exists()


def test_rate_and_remaining_time_are_reported() -> None:
    events: list[ProgressEvent] = []
    now = 0.0
    progress = DownloadProgress(events.append, "download m", 10_000_000, lambda: now)
    progress.report("running")
    progress.add(4_000_000)  # of an earlier try
    for _ in range(4):
        now += 0.5
        progress.add(500_000)
    assert events[-1].message == "downloading at 1.0 MB/s, 4 s left"
    assert (events[-1].done, events[-1].total) == (6_000_000, 10_000_000)
    now += 0.01
    progress.add(1)
    assert events[-1].done == 6_000_000  # not too often
    assert [readable_seconds(seconds) for seconds in (0.2, 75, 7300)] == ["0 s", "1 min 15 s", "2 h 1 min"]
