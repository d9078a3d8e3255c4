# SPDX-License-Identifier: Apache-2.0
"""Any place as a local path: once, whole, and by one at a time."""

from __future__ import annotations

import fcntl
import io
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_stub import StoreStub
from web_stub import Handler, WebStub, reply, serve

from headrace.core.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.core.telemetry.progress import ProgressEvent
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import FetchSettings, fetch_location

LOCAL = FetchSettings(private_hosts=("127.0.0.1",))


@pytest.fixture
def store() -> Iterator[StoreStub]:
    with StoreStub({"bkt": {"m/config.json": b"{}", "m/1/model.bin": b"x" * 1000, "m.tar.gz": tar()}}) as stub:
        yield stub


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("inner/config.json")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"[]"))
    return buffer.getvalue()


def keys(store: StoreStub) -> CloudCredentials:
    return CloudCredentials.from_metadata(store.metadata("bkt"))


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".locks")


def test_a_local_path_stays_where_it_is(tmp_path: Path) -> None:
    assert fetch_location(str(tmp_path), tmp_path / "cache") == tmp_path
    assert fetch_location(f"file://{tmp_path}", tmp_path / "cache") == tmp_path
    with pytest.raises(NotFound, match="does not exist"):
        fetch_location("/no/such/model", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_store_is_fetched_once(store: StoreStub, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    path = fetch_location("s3://bkt/m", tmp_path, keys(store), events.append)
    assert (path / "1" / "model.bin").stat().st_size == 1000
    assert [event.state for event in (events[0], events[-1])] == ["running", "finished"]
    assert events[-1].done == events[-1].total == 1002
    store.seen.clear()
    assert fetch_location("s3://bkt/m", tmp_path, keys(store)) == path
    assert not any("model.bin" in seen for seen, _ in store.seen)


def test_another_state_is_another_entry(store: StoreStub, tmp_path: Path) -> None:
    before = fetch_location("s3://bkt/m", tmp_path, keys(store))
    store.buckets["bkt"]["m/config.json"] = b"[1]"
    after = fetch_location("s3://bkt/m", tmp_path, keys(store))
    assert (before / "config.json").read_bytes() == b"{}"
    assert (after / "config.json").read_bytes() == b"[1]"


def test_archives_are_unpacked(store: StoreStub, tmp_path: Path) -> None:
    path = fetch_location("s3://bkt/m.tar.gz", tmp_path, keys(store))
    assert [str(found.relative_to(path)) for found in path.rglob("*")] == ["inner", "inner/config.json"]
    with WebStub({"/m.tgz": serve(tar())}) as web:
        path = fetch_location(web.url("/m.tgz?token=1"), tmp_path, settings=LOCAL)
    assert (path / "inner" / "config.json").read_bytes() == b"[]"


def test_a_file_behind_a_url(tmp_path: Path) -> None:
    with WebStub({"/models/a%20b.onnx": serve(b"1234")}) as web:
        path = fetch_location(web.url("/models/a%20b.onnx?x=1"), tmp_path, settings=LOCAL)
        assert (path.name, path.read_bytes()) == ("a-b.onnx", b"1234")
        assert fetch_location(web.url("/models/a%20b.onnx?x=1"), tmp_path, settings=LOCAL) == path
        assert len(web.seen) == 1
        with pytest.raises(InvalidArgument, match="not public"):
            fetch_location(web.url("/models/a%20b.onnx"), tmp_path)


def test_an_interrupted_fetch_is_not_an_entry_and_is_resumed(store: StoreStub, tmp_path: Path) -> None:
    store.cut_off.add("m/1/model.bin")
    events: list[ProgressEvent] = []
    with pytest.raises(Unavailable):
        fetch_location("s3://bkt/m", tmp_path, keys(store), events.append)
    assert events[-1].state == "failed"
    assert all(name.startswith(".bringing-") for name in visible(tmp_path))
    store.cut_off.clear()
    path = fetch_location("s3://bkt/m", tmp_path, keys(store))
    assert (path / "1" / "model.bin").read_bytes() == b"x" * 1000
    assert visible(tmp_path) == [path.name]


def test_a_bad_archive_leaves_nothing(store: StoreStub, tmp_path: Path) -> None:
    store.buckets["bkt"]["m.tar.gz"] = b"not an archive"
    with pytest.raises(InvalidArgument, match=r"s3://bkt/m\.tar\.gz is not a whole"):
        fetch_location("s3://bkt/m.tar.gz", tmp_path, keys(store))
    assert visible(tmp_path) == []


def test_many_who_want_the_same_wait_for_one(tmp_path: Path) -> None:
    go = threading.Event()

    def slow(handler: Handler) -> None:
        go.wait(240)
        reply(handler, b"1234")

    with WebStub({"/m.bin": slow}) as web, ThreadPoolExecutor(4) as pool:
        waiting = threading.Semaphore(0)

        def on_progress(event: ProgressEvent) -> None:
            if "another process" in event.message:
                waiting.release()

        tasks = [
            pool.submit(fetch_location, web.url("/m.bin"), tmp_path, None, on_progress, settings=LOCAL)
            for _ in range(4)
        ]
        for _ in range(3):
            assert waiting.acquire(timeout=120)
        go.set()
        assert len({task.result() for task in tasks}) == 1
        assert len(web.seen) == 1


def test_waiting_can_be_cancelled(store: StoreStub, tmp_path: Path) -> None:
    path = fetch_location("s3://bkt/m", tmp_path, keys(store))
    with (tmp_path / ".locks" / path.name).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        events: list[ProgressEvent] = []
        with pytest.raises(Cancelled, match="waiting"):
            fetch_location("s3://bkt/m", tmp_path, keys(store), events.append, lambda: True)
    assert fetch_location("s3://bkt/m", tmp_path, keys(store)) == path


def test_an_unusable_cache_folder_is_reported(store: StoreStub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match="cache folder"):
        fetch_location("s3://bkt/m", tmp_path / "file" / "cache", keys(store))
