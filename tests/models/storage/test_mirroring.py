# SPDX-License-Identifier: Apache-2.0
"""A folder that is kept like a prefix of a store: what changed comes, what is gone goes, and nothing is ever half."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_stub import StoreStub

from headrace.core.errors import FailedPrecondition, NotFound, PermissionDenied
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectLocation
from headrace.models.storage.mirror import Mirror, mirror_folder
from headrace.models.storage.object_stores import ObjectLimits

OBJECTS = {
    "models/a/config.pbtxt": b"config",
    "models/a/1/model.bin": b"1" * 1000,
    "models/a/2/": b"",
    "models/b/1/deep/x": b"x",
    "models/empty/1/": b"",
    "models/.mirror.json": b"of someone else",
    "other/c": b"",
}


@pytest.fixture
def store() -> Iterator[StoreStub]:
    with StoreStub({"bkt": dict(OBJECTS)}) as stub:
        yield stub


def mirror(store: StoreStub, folder: Path, key: str = "models") -> Mirror:
    limits = ObjectLimits(idle_seconds=30, retry_seconds=0.1)
    return Mirror(
        ObjectLocation("aws", "bkt", key), folder, CloudCredentials.from_metadata(store.metadata("bkt")), limits
    )


def tree(folder: Path) -> dict[str, bytes | None]:
    """None for a folder that is empty."""
    document: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        if inside.parts[0] in {".lock", ".mirror.json"}:
            continue
        if path.is_file():
            document[str(inside)] = path.read_bytes()
        elif not any(path.iterdir()):
            document[str(inside)] = None
    return document


WANTED = {
    "a/config.pbtxt": b"config",
    "a/1/model.bin": b"1" * 1000,
    "a/2": None,
    "b/1/deep/x": b"x",
    "empty/1": None,
}


def fetched(store: StoreStub) -> list[str]:
    return [path for path, _ in store.seen if not path.startswith("/bkt?")]


def test_the_folder_becomes_what_the_prefix_is(store: StoreStub, tmp_path: Path) -> None:
    mirror(store, tmp_path / "m").start()
    assert tree(tmp_path / "m") == WANTED


def test_only_changes_are_downloaded(store: StoreStub, tmp_path: Path) -> None:
    first = mirror(store, tmp_path)
    first.start()
    before = os.stat(tmp_path / "a" / "1" / "model.bin")
    store.seen.clear()
    mirror(store, tmp_path).start()
    assert not [path for path in fetched(store) if not path.endswith("/models")]
    objects = store.buckets["bkt"]
    objects["models/a/config.pbtxt"] = b"changed"  # of another content
    objects["models/b/2/model.bin"] = b"2"
    store.seen.clear()
    first.refresh()
    assert tree(tmp_path) == {**WANTED, "a/config.pbtxt": b"changed", "b/2/model.bin": b"2"}
    assert not any("a/1/model.bin" in path for path in fetched(store))
    assert os.stat(tmp_path / "a" / "1" / "model.bin") == before


def test_a_locally_changed_file_is_downloaded_again(store: StoreStub, tmp_path: Path) -> None:
    both = mirror(store, tmp_path)
    both.start()
    (tmp_path / "a" / "1" / "model.bin").write_bytes(b"short")
    (tmp_path / "a" / "config.pbtxt").unlink()
    both.refresh()
    assert tree(tmp_path) == WANTED


def test_removed_versions_and_models_are_deleted(store: StoreStub, tmp_path: Path) -> None:
    kept = mirror(store, tmp_path)
    kept.start()
    objects = store.buckets["bkt"]
    for key in ("models/a/1/model.bin", "models/b/1/deep/x"):
        del objects[key]
    kept.refresh()
    assert tree(tmp_path) == {"a/config.pbtxt": b"config", "a/2": None, "empty/1": None}
    assert not (tmp_path / "b").exists()


def test_a_folder_that_becomes_a_file_and_back(store: StoreStub, tmp_path: Path) -> None:
    kept = mirror(store, tmp_path)
    objects = store.buckets["bkt"] = {"models/a/1/x": b"file"}
    kept.start()
    for wanted in ({"models/a/1/x/y": b"below"}, {"models/a/1/x": b"file again"}):
        objects.clear()
        objects.update(wanted)
        kept.refresh()
        assert tree(tmp_path) == {key.removeprefix("models/"): body for key, body in wanted.items()}


def test_a_replaced_file_stays_whole_for_who_has_it_open(store: StoreStub, tmp_path: Path) -> None:
    kept = mirror(store, tmp_path)
    kept.start()
    with (tmp_path / "a" / "1" / "model.bin").open("rb") as file:
        store.buckets["bkt"]["models/a/1/model.bin"] = b"2" * 1000
        kept.refresh()
        assert file.read() == b"1" * 1000
    assert (tmp_path / "a" / "1" / "model.bin").read_bytes() == b"2" * 1000


def test_a_failed_listing_keeps_everything_and_is_reported_once(
    store: StoreStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kept = mirror(store, tmp_path)
    kept.start()
    caplog.clear()
    store.down = True
    for _ in range(3):
        kept.refresh()
    received = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(received) == 1 and "the models stay as they are" in received[0]
    objects, store.buckets["bkt"], store.down = store.buckets["bkt"], {}, False
    kept.refresh()
    assert tree(tmp_path) == WANTED  # a prefix that is empty all of a sudden is a mistake, not a wish
    store.buckets["bkt"] = objects
    kept.refresh()
    assert "is mirrored again" in caplog.text


def test_an_interrupted_download_is_invisible_and_is_resumed(store: StoreStub, tmp_path: Path) -> None:
    kept = mirror(store, tmp_path)
    kept.start()
    store.buckets["bkt"]["models/a/3/model.bin"] = b"3" * 5000
    store.cut_off.add("models/a/3/model.bin")
    kept.refresh()
    assert not (tmp_path / "a" / "3").exists()
    store.cut_off.clear()
    kept.refresh()
    assert tree(tmp_path) == {**WANTED, "a/3/model.bin": b"3" * 5000}


def test_wrong_locations_are_reported_at_the_start(store: StoreStub, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing at s3://bkt/none"):
        mirror(store, tmp_path / "1", "none").start()
    with pytest.raises(FailedPrecondition, match="is one object"):
        mirror(store, tmp_path / "2", "models/a/config.pbtxt").start()
    store.down = True
    with pytest.raises(PermissionDenied):
        mirror(store, tmp_path / "3").start()


def test_an_unreachable_store_does_not_stop_a_second_start(store: StoreStub, tmp_path: Path) -> None:
    mirror(store, tmp_path).start()
    credentials = CloudCredentials.from_metadata(store.metadata("bkt"))
    store.__exit__(None, None, None)
    limits = ObjectLimits(idle_seconds=1, retry_seconds=0.1)
    Mirror(ObjectLocation("aws", "bkt", "models"), tmp_path, credentials, limits).start()
    assert tree(tmp_path) == WANTED


@pytest.fixture
def gate(store: StoreStub) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A store whose objects do not come: `reached` is set when one is asked for, `go` lets them come."""
    reached, go = threading.Event(), threading.Event()

    def before(key: str) -> None:
        reached.set()
        go.wait(240)

    store.before = before
    yield reached, go
    go.set()


def test_stopping_ends_a_refresh(
    store: StoreStub, tmp_path: Path, gate: tuple[threading.Event, threading.Event]
) -> None:
    reached, go = gate
    kept = mirror(store, tmp_path)
    thread = threading.Thread(target=kept.refresh)
    thread.start()
    assert reached.wait(120)
    kept.stop()
    go.set()
    thread.join(120)
    assert not thread.is_alive()
    assert not (tmp_path / "a").exists()
    store.seen.clear()
    kept.refresh()
    assert store.seen == []


def test_the_same_place_has_the_same_folder_and_others_have_not(monkeypatch: pytest.MonkeyPatch) -> None:
    place, base = ObjectLocation("aws", "bkt", "models"), Path("/cache")
    first = mirror_folder(base, place)
    assert mirror_folder(base, place) == first
    assert mirror_folder(base, ObjectLocation("aws", "bkt", "models/a")) != first
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert mirror_folder(base, place) != first
