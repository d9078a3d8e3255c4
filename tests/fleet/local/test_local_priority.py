# SPDX-License-Identifier: Apache-2.0
"""Who starts to take another's place comes after those that answer, until it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_site import LocalSite, runtime, service

from headrace.fleet.local import process_runtime
from headrace.fleet.local.cgroups import PARENT, Cgroup
from support.waiting import eventually

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(600),
]
_PROGRAM = """
import subprocess, sys, threading, time
threads = [threading.Thread(target=time.sleep, args=(3600,), daemon=True) for _ in range(4)]
for each in threads: each.start()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print("up", flush=True)
time.sleep(3600)
"""


USUAL = getattr(os, "SCHED_OTHER", 0)


def policies(pid: int) -> set[int]:
    """Of all threads of a process."""
    return {os.sched_getscheduler(int(thread_id)) for thread_id in os.listdir(f"/proc/{pid}/task")}


def later() -> int:
    """Where one that steps back is; as all are, where this user could not bring it back."""
    return os.SCHED_IDLE if process_runtime.can_restore_priority() else USUAL


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """One with threads and a child, which has not begun before it was asked for."""
    waits = f"import sys; sys.stdin.read(1); exec({_PROGRAM!r})"
    with subprocess.Popen(
        [sys.executable, "-c", waits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        os.killpg(process.pid, 9)


def begin(process: subprocess.Popen[str]) -> list[int]:
    """Its processes."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("x")
    process.stdin.flush()
    assert process.stdout.readline() == "up\n"
    return [process.pid, *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]


def test_all_of_a_session_steps_back_and_up(program: subprocess.Popen[str]) -> None:
    assert process_runtime.lower_priority(program.pid) is (later() != USUAL)
    processes = begin(program)
    assert len(processes) == 2
    assert [policies(process) for process in processes] == [{later()}] * 2
    process_runtime.restore_priority(program.pid)
    assert [policies(process) for process in processes] == [{USUAL}] * 2
    assert policies(os.getpid()) == {USUAL}
    process_runtime.restore_priority(program.pid)  # again is nothing


def test_a_process_that_could_not_be_restored_is_not_deprioritised(
    program: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_runtime, "can_restore_priority", lambda: False)
    assert process_runtime.lower_priority(program.pid) is False
    assert policies(program.pid) == {USUAL}


def test_exited_processes() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    ended.wait(60)
    assert process_runtime.lower_priority(ended.pid) is False
    process_runtime.restore_priority(ended.pid)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path)
    site.up()
    site.apply(site.model, runtime())
    yield site
    site.close()


def gated(text: str, gate: Path, resources: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    """A service that is ready once there is a file."""
    more = {"resources": resources} if resources else {}
    probe = {"exec": {"command": ["test", "-e", str(gate)]}, "periodSeconds": 1, "timeoutSeconds": 30}
    args = ["--host=0.0.0.0", "--port=8080", f"--text={text}"]
    return service("s", runner={"name": "ome-container", "args": args, "readinessProbe": probe, **more}, **engine)


@pytest.mark.slow
def test_a_new_revision_has_low_priority_until_it_is_ready_also_for_the_next_daemon(
    site: LocalSite, tmp_path: Path
) -> None:
    old, new = tmp_path / "old-is-ready", tmp_path / "new-is-ready"
    site.apply(gated("old", old))
    (first,) = eventually(lambda: site.pids("s"))
    assert policies(first) == {USUAL}  # nobody else serves: whoever waits, waits for it
    old.touch()
    site.ready("s")
    site.apply(gated("new", new))
    (second,) = eventually(lambda: site.pids("s") - {first})
    eventually(lambda: policies(second) == {later()})
    assert policies(first) == {USUAL}
    site.kill()
    site.up()
    assert policies(second) == {later()}
    new.touch()
    eventually(lambda: site.pids("s") == {second})
    assert policies(second) == {USUAL}
    # More replicas are needed at once, and one that has died as well.
    site.apply(gated("new", new, minReplicas=2))
    site.ready("s", 2)
    assert [policies(pid) for pid in site.pids("s")] == [{USUAL}] * 2
    os.kill(second, 9)
    eventually(lambda: second not in site.pids("s") and len(site.pids("s")) == 2)
    assert [policies(pid) for pid in site.pids("s")] == [{USUAL}] * 2


class Update:
    """One from an old revision that serves to a new one that is not ready, of containers with these resources."""

    def __init__(self, site: LocalSite, folder: Path, resources: dict[str, Any]) -> None:
        self._site = site
        self._gate = folder / "new-is-ready"
        served = folder / "old-is-ready"
        served.touch()
        site.apply(gated("old", served, resources))
        site.ready("s")
        (self.first,) = site.pids("s")
        self.usual = weights(self.first)
        site.apply(gated("new", self._gate, resources))
        (self.second,) = eventually(lambda: site.pids("s") - {self.first})

    def finish(self) -> None:
        """By the next daemon."""
        self._site.kill()
        self._site.up()
        self._gate.touch()
        eventually(lambda: self._site.pids("s") == {self.second})


@pytest.mark.slow
def test_a_group_with_limits_lowers_the_priority_and_restores_the_weight(site: LocalSite, tmp_path: Path) -> None:
    update = Update(site, tmp_path, {"requests": {"cpu": "500m"}, "limits": {"cpu": "900m"}})
    if update.usual is None:
        # This machine lets it have no group, or the kernel is older.
        eventually(lambda: policies(update.second) == {later()})
    else:
        assert update.usual[0] == "0"
        eventually(lambda: (weights(update.second) or ("",))[0] == "1")
        assert policies(update.second) == {USUAL} and weights(update.first) == update.usual
    update.finish()
    assert weights(update.second) == update.usual and policies(update.second) == {USUAL}


@pytest.mark.slow
def test_a_group_with_only_weights_is_joined_when_ready(site: LocalSite, tmp_path: Path) -> None:
    update = Update(site, tmp_path, {"requests": {"cpu": "500m"}})
    if later() != USUAL:
        eventually(lambda: policies(update.second) == {later()})
        assert weights(update.second) is None and weights(update.first) == update.usual
    update.finish()
    assert weights(update.second) == update.usual and policies(update.second) == {USUAL}


def test_a_process_that_could_not_be_restored_gets_low_priority_from_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.shares").write_text("512")
    group = Cgroup((tmp_path,), (tmp_path,))
    monkeypatch.setattr(process_runtime, "can_restore_priority", lambda: True)
    assert process_runtime._lower_group_priority(group) == "" and not (tmp_path / "cpu.idle").exists()
    monkeypatch.setattr(process_runtime, "can_restore_priority", lambda: False)
    assert process_runtime._lower_group_priority(group) == "512" and (tmp_path / "cpu.idle").read_text() == "1"
    assert process_runtime._lower_group_priority(None) == ""


def weights(pid: int) -> tuple[str, str] | None:
    """Whether a process comes last by its group for the CPU, and its weight; None if it has no group that could."""
    for group in _cpu_groups(pid):
        for name in ("cpu.weight", "cpu.shares"):
            if (group / name).exists() and (group / "cpu.idle").exists():
                return (group / "cpu.idle").read_text().strip(), (group / name).read_text().strip()
    return None


def _cpu_groups(pid: int) -> list[Path]:
    """Those of ours, in whichever hierarchy."""
    paths = {line.split(":", 2)[2] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()}
    mounts = (line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines())
    roots = [Path(fields[1]) for fields in mounts if fields[2].startswith("cgroup")]
    return [root / path.lstrip("/") for path in paths if PARENT in path for root in roots]
