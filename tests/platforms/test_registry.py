# SPDX-License-Identifier: Apache-2.0
"""The registry: TAO's file, kept whole and private while many write it."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from headrace.platforms.registry import RUNNING, STARTING, Entry, Registry


def _id() -> str:
    return str(uuid.uuid4())


def _entry(platform: str = "local-docker", **more: object) -> Entry:
    return replace(Entry(_id(), platform, "cosmos-rl", "http://localhost:1", "2026-01-01T00:00:00+00:00"), **more)  # type: ignore[arg-type]


def _every_port(_port: int) -> bool:
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


@pytest.fixture
def registry(path: Path) -> Registry:
    return Registry(path)


def test_an_entry_is_written_with_the_keys_of_tao(registry: Registry, path: Path) -> None:
    entry = _entry(
        "slurm", state=RUNNING, host_port=8081, platform_job_id="17", slurm_node="n1", tunnel_pid=5, more={"gpus": 2}
    )
    registry.put(entry)
    assert json.loads(path.read_text()) == {
        entry.job_id: {
            "job_id": entry.job_id,
            "platform": "slurm",
            "network_arch": "cosmos-rl",
            "host_url": "http://localhost:1",
            "started_at": "2026-01-01T00:00:00+00:00",
            "state": "running",
            "host_port": 8081,
            "platform_job_id": "17",
            "slurm_node": "n1",
            "tunnel_pid": 5,
            "gpus": 2,
        },
        "latest": entry.job_id,
    }
    assert path.read_text().startswith('{\n  "')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert registry.entries() == {entry.job_id: entry}


def test_what_other_tools_wrote_is_kept(registry: Registry, path: Path) -> None:
    theirs = {
        "job_id": "x",
        "platform": "local-docker",
        "network_arch": "cosmos-rl",
        "host_url": "http://localhost:8080",
        "host_port": "8080",
        "started_at": "2026-01-01T00:00:00Z",
        "owner": {"deep": [1]},
        "platform_job_id": 17,
        "namespace": None,
    }
    path.write_text(json.dumps({"x": theirs, "latest": "x", "note": "by hand"}))
    assert registry.entries()["x"].host_port == 8080
    assert registry.entries()["x"].platform_job_id == "17"
    registry.put(_entry())
    document = json.loads(path.read_text())
    assert document["x"] == theirs
    assert document["note"] == "by hand"
    registry.update("x", lambda entry: replace(entry, host_url="http://localhost:9"))
    document = json.loads(path.read_text())
    assert document["x"]["owner"] == {"deep": [1]}
    assert document["x"]["namespace"] is None
    assert document["x"]["host_url"] == "http://localhost:9"


def test_a_missing_file_is_an_empty_registry_and_reading_creates_none(registry: Registry, path: Path) -> None:
    assert registry.read() == ({}, None)
    assert not registry.remove(_id())
    assert not path.exists()
    deep = Registry(path.parent / "none" / "state.json")
    assert deep.entries() == {}
    assert not deep.path.parent.exists()
    deep.put(_entry())
    assert stat.S_IMODE(deep.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("text", ["{", "[]", "\x00\xff", "3", "[" * 100_000])
def test_what_cannot_be_read_is_put_aside(
    registry: Registry, path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(text)
    entry = _entry()
    with caplog.at_level(logging.WARNING, "headrace.launch"):
        assert registry.entries() == {}
    registry.put(entry)
    assert list(registry.entries()) == [entry.job_id]
    (aside,) = path.parent.glob("state.json.broken-*")
    assert aside.read_text() == text
    assert str(aside) in caplog.text


def test_an_empty_file_is_valid(registry: Registry, path: Path) -> None:
    path.write_text("\n")
    assert registry.entries() == {}
    assert not list(path.parent.glob("*.broken-*"))


def test_latest_is_what_was_started_last(registry: Registry) -> None:
    first, second, third = (_entry(started_at=f"2026-01-0{day}T00:00:00Z") for day in (1, 2, 3))
    registry.put(second)
    assert registry.latest == second.job_id
    registry.put(first)
    assert registry.latest == second.job_id
    registry.put(third)
    assert registry.latest == third.job_id
    registry.update(first.job_id, lambda entry: replace(entry, slurm_node="n"))
    assert registry.latest == third.job_id
    assert list(registry.entries()) == [first.job_id, second.job_id, third.job_id]
    assert registry.remove(third.job_id)
    assert registry.latest == second.job_id
    assert registry.remove(first.job_id)
    assert registry.latest == second.job_id
    assert registry.remove(second.job_id)
    assert registry.read() == ({}, None)
    assert json.loads(registry.path.read_text()) == {}


def test_times_are_compared_however_they_are_written(registry: Registry) -> None:
    later, earlier = _entry(started_at="2026-01-01T12:00:00"), _entry(started_at="2026-01-01T13:00:00+02:00")
    unknown, odd = _entry(started_at="yesterday"), _entry(started_at="")
    for item in (unknown, odd, later, earlier):
        registry.put(item)
    assert registry.latest == later.job_id


def test_what_is_being_started_is_not_the_latest(registry: Registry) -> None:
    running = _entry(state=RUNNING)
    registry.put(running)
    begun = registry.begin(_entry(started_at=""), wants_port=True, free=_every_port)
    assert begun.state == STARTING
    assert begun.started_at
    assert registry.latest == running.job_id
    registry.update(begun.job_id, lambda entry: replace(entry, state=RUNNING))
    assert registry.latest == begun.job_id
    third = registry.begin(_entry(), wants_port=False)
    assert third.host_port is None
    registry.remove(begun.job_id)
    assert registry.latest == running.job_id


def test_a_removed_service_stays_removed(registry: Registry) -> None:
    assert registry.update(_id(), lambda entry: entry) is None
    assert not registry.path.exists() or registry.entries() == {}


def test_a_job_is_begun_once_and_named_by_a_uuid(registry: Registry) -> None:
    entry = registry.begin(_entry(), wants_port=True)
    with pytest.raises(AlreadyExists, match=entry.job_id):
        registry.begin(entry, wants_port=True)
    for job_id in ("latest", "", "../x", entry.job_id.upper()):
        with pytest.raises(InvalidArgument, match="UUID"):
            registry.begin(replace(entry, job_id=job_id), wants_port=True)
        with pytest.raises(InvalidArgument, match="UUID"):
            registry.put(replace(entry, job_id=job_id))


def test_ports_are_the_lowest_of_platform_and_instance(registry: Registry) -> None:
    def reserve(platform: str, instance: str = "", free: Callable[[int], bool] = _every_port) -> int:
        return registry.reserve_port(platform, instance, _id(), free=free)

    assert [reserve("brev", "a"), reserve("brev", "a"), reserve("brev", "b")] == [8080, 8081, 8080]
    # Strangers on this machine say nothing of another one's ports.
    assert reserve("brev", "b", lambda port: False) == 8081
    assert [reserve("local-docker"), reserve("local-docker")] == [8080, 8081]
    # Another platform of this machine: what is being started there may not listen yet.
    assert reserve("process") == 8082
    for job_id, entry in registry.entries().items():
        if entry.platform == "local-docker" and entry.host_port == 8080:
            registry.remove(job_id)
        elif entry.platform == "local-docker":
            registry.update(job_id, lambda entry: replace(entry, state=RUNNING))
    assert reserve("local-docker") == 8080
    assert reserve("process", free=lambda port: port != 8081) == 8083


def test_a_stranger_who_listens_keeps_the_port(registry: Registry) -> None:
    with socket.socket() as stranger:
        for port in range(8080, 8200):
            try:
                stranger.bind(("127.0.0.1", port))
                break
            except OSError:
                continue
        stranger.listen()
        taken = stranger.getsockname()[1]
        given = {registry.reserve_port("process", "", _id()) for _ in range(taken - 8080 + 2)}
    assert taken not in given


def test_running_out_of_ports_is_reported(registry: Registry) -> None:
    with pytest.raises(ResourceExhausted, match="no port from 8080 to 8199"):
        registry.reserve_port("process", "", _id(), free=lambda port: False)
    assert registry.entries() == {}


def test_ten_concurrent_processes_get_ten_ports(path: Path) -> None:
    program = (
        "import sys, uuid; from dataclasses import replace; from pathlib import Path;"
        "from headrace.platforms.registry import *; registry = Registry(Path(sys.argv[1])); sys.stdin.read();"
        "entry = registry.begin(Entry(str(uuid.uuid4()), 'process', 'a'), wants_port=True);"
        "registry.update(entry.job_id, lambda entry: replace(entry, state=RUNNING)); print(entry.host_port)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(10)
    ]
    for service in started:
        if service.stdin is not None:
            service.stdin.close()
            service.stdin = None
    ports = {int(item.communicate(timeout=240)[0]) for item in started}
    assert len(ports) == 10
    entries, latest = Registry(path).read()
    assert {entry.host_port for entry in entries.values()} == ports
    assert {entry.state for entry in entries.values()} == {RUNNING}
    assert latest == max(entries.values(), key=lambda entry: entry.started).job_id
    assert sorted(path.name for path in path.parent.iterdir()) == ["state.json", "state.json.lock"]


def test_a_held_lock_is_reported_and_ends_with_its_holder(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from headrace.platforms import registry\n"
        "with registry.locked(Path(sys.argv[1]), 30): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Unavailable, match="keeps the registry locked"):
            Registry(path, lock_seconds=0.05).put(_entry())
        holder.kill()
    Registry(path, lock_seconds=30).put(_entry())


@pytest.mark.parametrize("name", ["state.json", "state.json.lock"])
def test_a_link_is_not_followed(registry: Registry, path: Path, name: str) -> None:
    canary = path.parent / "canary"
    canary.write_text("{}")
    (path.parent / name).symlink_to(canary)
    for act in (lambda: registry.put(_entry()), lambda: registry.begin(_entry(), wants_port=True)):
        with pytest.raises(PermissionDenied, match="symbolic link"):
            act()
    assert canary.read_text() == "{}"


def test_a_dangling_link_is_refused_when_reading(registry: Registry, path: Path) -> None:
    path.symlink_to(path.parent / "none")
    with pytest.raises(PermissionDenied, match="symbolic link"):
        registry.entries()


def test_a_file_of_another_user_is_refused(registry: Registry, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.put(_entry())
    before = path.read_bytes()
    somebody = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: somebody)
    for act in (registry.entries, lambda: registry.put(_entry())):
        with pytest.raises(PermissionDenied, match="belongs to another user"):
            act()
    assert path.read_bytes() == before


def test_special_files_are_refused(registry: Registry, path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(PermissionDenied, match="not a plain file"):
        registry.entries()
    path.unlink()
    path.mkdir()
    with pytest.raises(PermissionDenied, match="not a plain file"):
        registry.entries()


def test_a_file_that_others_may_read_is_made_private(registry: Registry, path: Path) -> None:
    path.write_text("{}")
    path.chmod(0o666)
    assert registry.entries() == {}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match="cannot be used as the registry"):
        Registry(tmp_path / "file" / "state.json").put(_entry())


def test_a_write_that_fails_leaves_the_file_as_it_was(
    registry: Registry, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _entry()
    registry.put(entry)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FailedPrecondition, match="No space left"):
        registry.put(_entry())
    assert list(registry.entries()) == [entry.job_id]
    assert sorted(path.name for path in path.parent.iterdir()) == ["state.json", "state.json.lock"]
