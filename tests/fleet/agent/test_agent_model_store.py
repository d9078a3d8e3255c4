# SPDX-License-Identifier: Apache-2.0
"""Models on a node's disk: brought through the real storage from stand-ins of stores, placed, shared, updated, removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stub import COMMIT, HubStub
from web_stub import WebStub, serve

from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, InvalidArgument
from headrace.fleet.agent.downloads import Download, download_model
from headrace.fleet.agent.model_sources import parse_source
from headrace.fleet.agent.model_store import STORE_FOLDER, ModelStore, Record
from headrace.models.storage.fetch import FetchSettings
from support.waiting import eventually

LOCAL = FetchSettings(private_hosts=("127.0.0.1",))
FILES = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode(),
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}" + b"w" * 100_000,
    "sub/tokenizer.json": b"[]",
}


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with HubStub(dict(FILES)) as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url(""))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield stub


@pytest.fixture
def model_store(tmp_path: Path) -> Iterator[ModelStore]:
    store = ModelStore(tmp_path / "models")
    store.open()
    yield store
    store.close()


def ensure_model(
    model_store: ModelStore, name: str, uri: str, path: str = "", reserved: bool = False, namespace: str = ""
) -> Record:
    where = str(model_store.root / (path or name))
    source = parse_source({"spec": {"storage": {"storageUri": uri, "path": where}}})
    record = model_store.claim((namespace, name), source, reserved=reserved)
    return download_model(model_store, record, Download((namespace, name), source), None, LOCAL)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def resolved(hub: HubStub) -> list[str]:
    return [path for path, _ in hub.seen if "/resolve/" in path]


def cached(model_store: ModelStore) -> list[Path]:
    return list((model_store.root / STORE_FOLDER / "cache").iterdir())


def test_a_model_is_downloaded_complete_and_is_readable(hub: HubStub, model_store: ModelStore) -> None:
    record = ensure_model(model_store, "a", "hf://org/name", "deep/a")
    folder = model_store.root / "deep" / "a"
    assert files_in(folder) == FILES
    assert record.revision == COMMIT and record.config["modelArchitecture"] == "LlamaForCausalLM"
    assert model_store.is_complete(record)
    # Pods are other users.
    for path in (folder, folder / "sub", folder.parent):
        assert path.stat().st_mode & 0o055 == 0o055
    assert (folder / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_an_artefact_is_not_downloaded_twice_and_takes_no_more_space(hub: HubStub, model_store: ModelStore) -> None:
    ensure_model(model_store, "a", "hf://org/name")
    hub.seen.clear()
    # By another name of the same commit, and for a namespace.
    ensure_model(model_store, "b", f"hf://org/name@{COMMIT}", namespace="team")
    assert not resolved(hub)
    assert files_in(model_store.root / "b") == FILES
    one, other = (model_store.root / name / "model.safetensors" for name in "ab")
    assert one.samefile(other)
    model_store.remove(("", "a"))
    assert not (model_store.root / "a").exists() and files_in(model_store.root / "b") == FILES
    model_store.remove(("team", "b"))
    assert not (model_store.root / "b").exists() and not cached(model_store) and not model_store.records.all()


def test_two_models_of_one_folder(hub: HubStub, model_store: ModelStore) -> None:
    ensure_model(model_store, "a", "hf://org/name", "same")
    ensure_model(model_store, "b", "hf://org/name", "same")
    model_store.remove(("", "a"))
    assert files_in(model_store.root / "same") == FILES
    model_store.remove(("", "b"))
    assert not (model_store.root / "same").exists()


def test_an_update_keeps_the_folder_that_pods_have_mounted(hub: HubStub, model_store: ModelStore) -> None:
    first = ensure_model(model_store, "a", "hf://org/name@v1")
    folder = model_store.root / "a"
    inode = folder.stat().st_ino
    with WebStub({"/model.zip": serve(_zip({"config.json": b"{}", "sub": b"was a folder"}))}) as web:
        second = ensure_model(model_store, "a", web.url("/model.zip"))
    assert folder.stat().st_ino == inode
    assert files_in(folder) == {"config.json": b"{}", "sub": b"was a folder"}
    assert second.files == {"config.json": 2, "sub": 12}
    assert not model_store.cache_folder(first).exists(), "nobody needs what the old source has left"


def test_a_folder_that_moves(hub: HubStub, model_store: ModelStore) -> None:
    ensure_model(model_store, "a", "hf://org/name", "old")
    hub.seen.clear()
    ensure_model(model_store, "a", "hf://org/name", "new")
    assert not (model_store.root / "old").exists() and files_in(model_store.root / "new") == FILES
    assert not resolved(hub)


def test_files_of_others_are_never_touched(hub: HubStub, model_store: ModelStore) -> None:
    (model_store.root / "a").mkdir()
    (model_store.root / "a" / "precious").write_text("mine")
    with pytest.raises(FailedPrecondition, match=r"did not download; move them away.*local://"):
        ensure_model(model_store, "a", "hf://org/name")
    model_store.remove(("", "a"))
    assert files_in(model_store.root / "a") == {"precious": b"mine"}
    # An empty one is nobody's.
    (model_store.root / "b" / "empty").mkdir(parents=True)
    ensure_model(model_store, "b", "hf://org/name")
    assert files_in(model_store.root / "b") == FILES


def test_reserved_files_stay_and_are_used_again(hub: HubStub, model_store: ModelStore, tmp_path: Path) -> None:
    ensure_model(model_store, "a", "hf://org/name", reserved=True)
    model_store.remove(("", "a"))
    assert files_in(model_store.root / "a") == FILES
    hub.seen.clear()
    with pytest.raises(InvalidArgument, match="files of the deleted model a"):
        ensure_model(model_store, "b", "hf://org/other", "a")
    record = ensure_model(model_store, "a", "hf://org/name")
    assert not resolved(hub) and not record.gone and model_store.is_complete(record)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/etc/passwd", "is not below"),
        ("ROOT", "is not below"),
        ("ROOT/../x", "is not below"),
        ("ROOT/.headrace/cache", "is not below"),
        ("ROOT/link/x", "leaves"),
        ("ROOT/taken", "has the model other, which has another source"),
        ("ROOT/taken/inner", "are nested"),
    ],
)
def test_paths_that_cannot_be(model_store: ModelStore, tmp_path: Path, path: str, said: str) -> None:
    (model_store.root / "link").symlink_to(tmp_path)
    there = {"spec": {"storage": {"storageUri": "hf://org/other", "path": str(model_store.root / "taken")}}}
    model_store.claim(("", "other"), parse_source(there), reserved=False)
    wrong = {"spec": {"storage": {"storageUri": "hf://org/name", "path": path.replace("ROOT", str(model_store.root))}}}
    with pytest.raises(InvalidArgument, match=said):
        model_store.claim(("", "a"), parse_source(wrong), reserved=False)
    assert model_store.records.get(("", "a")) is None


def test_a_full_disk_is_reported_before_the_download(hub: HubStub, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    shelf = ModelStore(tmp_path / "models", keep_free_bytes=free * 2)
    shelf.open()
    with pytest.raises(HeadraceError, match=r"it needs 100\.\d kB, .* has .* free, and .* must stay free"):
        ensure_model(shelf, "a", "hf://org/name")
    assert not resolved(hub) and not (shelf.root / "a").exists()
    shelf.close()


def test_what_others_were_promised_is_not_free(
    hub: HubStub, model_store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The disk of this machine has more or less room at each look.
    disk = type(shutil.disk_usage(model_store.root))(2_000_000, 1_000_000, 1_000_000)
    monkeypatch.setattr("headrace.fleet.agent.model_store.shutil.disk_usage", lambda _: disk)
    other = Record("", "other", "hf://org/other", str(model_store.root / "other"), "shelf")
    model_store.reserve(other, 999_000)
    with pytest.raises(HeadraceError, match="of it reserved for other downloads"):
        ensure_model(model_store, "a", "hf://org/name")
    model_store.update_reservation(other.key, 0)
    ensure_model(model_store, "a", "hf://org/name")


def test_a_stopped_download_is_resumed_later(hub: HubStub, model_store: ModelStore) -> None:
    source = parse_source({"spec": {"storage": {"storageUri": "hf://org/name", "path": str(model_store.root / "a")}}})
    record = model_store.claim(("", "a"), source, reserved=False)
    download = Download(("", "a"), source)
    download.stop()
    with pytest.raises(Cancelled):
        download_model(model_store, record, download, None, LOCAL)
    assert not (model_store.root / "a").exists()
    ensure_model(model_store, "a", "hf://org/name")
    assert files_in(model_store.root / "a") == FILES


def test_deleted_files_are_noticed_and_restored_from_the_cache(hub: HubStub, model_store: ModelStore) -> None:
    record = ensure_model(model_store, "a", "hf://org/name")
    (model_store.root / "a" / "model.safetensors").unlink()
    (model_store.root / "a" / "stray").write_text("x")
    assert not model_store.is_complete(record)
    hub.seen.clear()
    record = ensure_model(model_store, "a", "hf://org/name")
    assert model_store.is_complete(record) and files_in(model_store.root / "a") == FILES and not resolved(hub)


def test_one_agent_has_a_folder(model_store: ModelStore) -> None:
    with pytest.raises(FailedPrecondition, match="another agent uses"):
        ModelStore(model_store.root).open()


def test_an_impossible_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match="--models-root"):
        ModelStore(tmp_path / "file").open()


def test_unknown_files_are_swept(model_store: ModelStore) -> None:
    for name in ("cache", "new"):
        (model_store.root / STORE_FOLDER / name / "left" / "over").mkdir(parents=True)
    (model_store.root / STORE_FOLDER / "models" / "half.json").write_text('{"namespace": "')
    model_store.close()
    again = ModelStore(model_store.root)
    again.open()
    assert not cached(again) and not list((again.root / STORE_FOLDER / "new").iterdir()) and not again.records.all()
    again.close()


FETCHES = """
import os, signal, sys
from pathlib import Path
from headrace.fleet.agent.model_store import ModelStore
from headrace.fleet.agent.downloads import Download, download_model
from headrace.fleet.agent.model_sources import parse_source
from headrace.models.storage.fetch import FetchSettings

root = Path(sys.argv[1])

def fetch(uri, at):
    count = 0
    def watch(event, details):
        nonlocal count
        if event in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir") and str(root) in str(details):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
    shelf = ModelStore(root)
    shelf.open()
    sys.addaudithook(watch)
    source = parse_source({"spec": {"storage": {"storageUri": uri, "path": str(root / "a")}}})
    record = shelf.claim(("", "a"), source, reserved=False)
    download_model(shelf, record, Download(("", "a"), source), None, FetchSettings(private_hosts=("127.0.0.1",)))

for line in sys.stdin:
    uri, at = line.split()
    child = os.fork()
    if not child:
        fetch(uri, int(at))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported everything, and fetches in children of its own, which end before a change of the disk."""


class Fetches:
    """`fetch(uri, at)`: the exit code of one that is killed before its change number `at`; 0 for none."""

    def __init__(self, root: Path) -> None:
        arguments = [sys.executable, "-c", FETCHES, root]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def __enter__(self) -> Fetches:
        return self

    def __exit__(self, *told: object) -> None:
        self.process.communicate(timeout=90)

    def start(self, uri: str, at: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{uri} {at}\n")

    def fetch(self, uri: str, at: int = 0) -> int:
        self.start(uri, at)
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


def test_a_kill_before_any_change_of_the_disk_leaves_what_the_next_try_puts_right(tmp_path: Path) -> None:
    old, new = _zip({"a": b"old", "both": b"old", "d/e": b"old"}), _zip({"b": b"new", "both": b"new", "d/f": b"new"})
    kills, root = 0, tmp_path / "models"
    stub = WebStub({"/old.zip": serve(old), "/new.zip": serve(new)})
    with stub as web, Fetches(root) as process:
        assert process.fetch(web.url("/old.zip")) == 0
        root.rename(tmp_path / "before")
        for at in range(1, 200):
            shutil.rmtree(root, ignore_errors=True)
            subprocess.run(["cp", "-a", tmp_path / "before", root], check=True)  # which keeps links
            ended = process.fetch(web.url("/new.zip"), at)
            if ended == 0:
                break
            assert ended == -signal.SIGKILL
            kills += 1
            # Whatever is there is a whole file of one or the other.
            assert set(files_in(root / "a").values()) <= {b"old", b"new"}
            assert process.fetch(web.url("/new.zip")) == 0
            assert files_in(root / "a") == {"b": b"new", "both": b"new", "d/f": b"new"}
            shelf = ModelStore(root)
            shelf.open()
            assert len(cached(shelf)) == 1
            shelf.close()
    assert kills > 20


def test_a_killed_download_is_resumed(tmp_path: Path) -> None:
    body = os.urandom(2_000_000)
    served: list[int] = []
    over = threading.Event()

    def slowly(handler: Any) -> None:
        start = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-").split("-")[0])
        served.append(start)
        handler.send_response(206 if start else 200)
        handler.send_header("ETag", '"one"')
        handler.send_header("Content-Length", str(len(body) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        handler.end_headers()
        handler.wfile.write(body[start : start + 1_000_000] if len(served) == 1 else body[start:])
        if len(served) == 1:
            handler.wfile.flush()
            over.wait(200)

    root = tmp_path / "models"
    with WebStub({"/model.safetensors": slowly}) as web:
        arguments = [sys.executable, "-c", FETCHES.replace("for line in sys.stdin:", "for line in sys.argv[2:]:"), root]
        arguments.append(f"{web.url('/model.safetensors')} 0")
        process = subprocess.Popen(arguments, start_new_session=True, stdout=subprocess.DEVNULL)
        eventually(lambda: process.poll() is not None or (served and _largest_file_bytes(tmp_path) >= 500_000))
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        over.set()
        assert not (root / "a").exists()
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "models" / "a" / "model.safetensors").read_bytes() == body
    assert served[1] >= 500_000


def _largest_file_bytes(folder: Path) -> int:
    result = 0
    for path in folder.rglob("*"):
        try:
            result = max(result, path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:
            continue
    return result


def _zip(files: dict[str, bytes]) -> bytes:
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return buffer.getvalue()
