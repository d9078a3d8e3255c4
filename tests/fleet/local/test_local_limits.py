# SPDX-License-Identifier: Apache-2.0
"""Limits of containers: held by the kernel where this machine allows it, and by looking where it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_site import LocalSite, fetch_text, runtime, service

from headrace.core.files import read_json
from headrace.fleet.local.cgroups import PARENT, Cgroup, Cgroups, find_cgroups, parse_cgroup
from headrace.fleet.local.container_runtime import (
    THREAD_VARIABLES,
    ExitStatus,
    ResourceLimits,
    resource_limits,
    thread_environment,
)
from headrace.fleet.local.process_runtime import LimitWatcher, ProcessRuntime
from headrace.platforms.kubernetes_client.objects import get_list
from support.waiting import eventually

pytestmark = pytest.mark.timeout(900)  # it starts many programs, one after the other
MEBIBYTE = 1 << 20


# What a container says


def test_limits_are_those_of_the_container() -> None:
    claims = {"resources": {"limits": {"cpu": "1500m", "memory": "64Mi"}, "requests": {"cpu": "250m"}}}
    assert resource_limits(claims, 20) == ResourceLimits(64 * MEBIBYTE, 1.5, 0.25, 20)
    assert resource_limits({"resources": {"limits": {"cpu": "2"}}}) == ResourceLimits(None, 2.0, 2.0, None)
    assert not resource_limits({}) and not resource_limits({"resources": {"limits": {"memory": "much", "cpu": "-1"}}})


def test_libraries_get_their_thread_count_unless_the_user_sets_one() -> None:
    assert set(thread_environment(ResourceLimits(cores=1.5), 8, {}).items()) == {
        (name, "2") for name in THREAD_VARIABLES
    }
    assert thread_environment(ResourceLimits(cores=0.1), 8, {})["OMP_NUM_THREADS"] == "1"
    assert not thread_environment(ResourceLimits(share=1), 8, {})  # it may use more
    assert thread_environment(ResourceLimits(cores=64), 8, {})["OMP_NUM_THREADS"] == "8"
    assert not thread_environment(ResourceLimits(memory=1), 8, {}) and not thread_environment(
        ResourceLimits(cores=2), 8, {THREAD_VARIABLES[0]: "1"}
    )


# Groups of the kernel: folders of files, as it shows them


def fake_kernel(folder: Path, mounts: str, own: str) -> Cgroups:
    """FakeKernel: files where the kernel's would be."""
    (folder / "mounts").write_text(mounts)
    (folder / "own").write_text(own)
    return find_cgroups(folder / "mounts", folder / "own")


def files(folder: Path, **contents: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


ALL = ResourceLimits(64 * MEBIBYTE, 1.5, 0.5, 30)


def test_version_2_below_the_nearest_folder_that_is_delegated(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files(root / "user" / "app" / "own.scope", cgroup__controllers="memory pids", cgroup__procs="1\n2\n")
    app = files(root / "user" / "app", cgroup__controllers="memory pids io", cgroup__subtree_control="memory pids")
    # The kernel writes these when a group is made.
    files(app / PARENT, cgroup__controllers="memory pids", cgroup__subtree_control="")
    (root / "user" / "app" / "own.scope" / "cgroup.subtree_control").mkdir()  # it has processes, and refuses
    result = fake_kernel(tmp_path, f"cgroup2 {root} cgroup2 rw 0 0\n", "0::/user/app/own.scope\n")
    assert result.places == {"memory": app / PARENT, "pids": app / PARENT}
    group = result.create("pod-main", ALL)
    assert group.paths == (app / PARENT / "pod-main",)
    written = {path.name: path.read_text() for path in group.paths[0].iterdir()}
    assert written == {
        "memory.max": str(64 * MEBIBYTE),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "30",
    }
    files(group.paths[0], memory__events="low 0\nmax 4\noom 1\noom_kill 1\n", cgroup__procs="")
    assert group.out_of_memory()
    group.join(4711)
    assert group.members() == {4711}


def test_version_2_as_root_has_cores_too(tmp_path: Path) -> None:
    root = files(tmp_path / "cgroup", cgroup__controllers="cpu memory pids", cgroup__subtree_control="")
    files(root / PARENT, cgroup__controllers="cpu memory pids", cgroup__subtree_control="")
    result = fake_kernel(tmp_path, f"cgroup2 {root} cgroup2 rw 0 0\n", "0::/\n")
    assert set(result.places) == {"memory", "cpu", "pids"}
    (path,) = result.create("pod-main", ALL).paths
    assert (path / "cpu.max").read_text() == "150000 100000" and (path / "cpu.weight").read_text() == "20"


def test_a_late_joiner_is_limited_immediately_and_weighted_later(tmp_path: Path) -> None:
    one = files(tmp_path / PARENT / "limits", cgroup__procs="")
    other = files(tmp_path / PARENT / "weighs", cgroup__procs="")
    group = Cgroup((one, other), (other,))
    group.join(11, late=True)
    assert [(item / "cgroup.procs").read_text() for item in (one, other)] == ["11", ""]
    (other / "cgroup.procs").write_text("11")
    looks = iter([[11, 12], [11, 12], [12]])
    # A file keeps the last one alone: 11 is missing again, until it has ended.
    group.join_all(lambda: next(looks, [12]))
    assert (other / "cgroup.procs").read_text() == "12" and (one / "cgroup.procs").read_text() == "11"
    assert parse_cgroup([str(one), str(other)], [str(other)]) == group
    assert parse_cgroup([], [str(other)]) is None and parse_cgroup(["/etc"], ["/etc"]) is None


@pytest.mark.parametrize(
    ("limits", "weighing"),
    [
        (ResourceLimits(None, None, 0.5, None), {"cpu"}),
        (ResourceLimits(None, 1.5, 0.5, None), set()),
        (ResourceLimits(64 * MEBIBYTE, None, 0.5, 30), {"cpu"}),
        (ResourceLimits(64 * MEBIBYTE, None, None, 30), set()),
    ],
)
def test_what_only_weighs_in_version_1(tmp_path: Path, limits: ResourceLimits, weighing: set[str]) -> None:
    group = Cgroups({controller: tmp_path / controller / PARENT for controller in ("memory", "cpu", "pids")}).create(
        "pod-main", limits
    )
    assert {folder.parent.parent.name for folder in group.weighing} == weighing


def test_in_version_2_a_folder_that_limits_anything_does_not_only_weigh(tmp_path: Path) -> None:
    every = ("memory", "cpu", "pids")
    cgroups = Cgroups(dict.fromkeys(every, tmp_path / PARENT), frozenset(every))
    assert cgroups.create("both", ResourceLimits(64 * MEBIBYTE, None, 0.5, None)).weighing == ()
    assert cgroups.create("weighs", ResourceLimits(None, None, 0.5, None)).weighing == (tmp_path / PARENT / "weighs",)


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    for name in ("memory/own", "cpu,cpuacct", "pids", "freezer"):
        (root / name).mkdir(parents=True)
    mounts = "".join(
        f"cgroup {root}/{name} cgroup rw,{name} 0 0\n" for name in ("memory", "cpu,cpuacct", "pids", "freezer")
    )
    result = fake_kernel(tmp_path, mounts, "3:memory:/own\n2:cpu,cpuacct:/\n1:pids:/gone\n")
    assert result.places == {
        "memory": root / "memory" / "own" / PARENT,
        "cpu": root / "cpu,cpuacct" / PARENT,
        "pids": root / "pids" / PARENT,
    }
    group = result.create("pod-main", ALL)
    assert len(group.paths) == 3
    written = {item.name: item.read_text() for path in group.paths for item in path.iterdir()}
    assert written == {
        "memory.limit_in_bytes": str(64 * MEBIBYTE),
        "memory.memsw.limit_in_bytes": str(64 * MEBIBYTE),
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
        "cpu.shares": "512",
        "pids.max": "30",
    }
    # Nothing is made for what is not limited.
    assert len(result.create("pod-other", ResourceLimits(memory=MEBIBYTE * 8)).paths) == 1


def test_a_deprioritised_group_gets_its_weight_back(tmp_path: Path) -> None:
    newer = Cgroup((files(tmp_path / "memory"), files(tmp_path / "cpu", cpu__weight="20\n", cpu__idle="0\n")))
    assert newer.lower_priority() == "20"
    assert (tmp_path / "cpu" / "cpu.idle").read_text() == "1"
    files(tmp_path / "cpu", cpu__weight="0")  # as the kernel does
    newer.restore_priority("20")
    assert [(tmp_path / "cpu" / f"cpu.{name}").read_text() for name in ("idle", "weight")] == ["0", "20"]
    # A kernel before 5.15, and a group that is not for the CPU.
    older = files(tmp_path / "older", cpu__shares="512\n")
    (older / "cpu.idle").mkdir()
    assert [Cgroup((item,)).lower_priority() for item in (older, tmp_path / "memory")] == ["", ""]
    Cgroup((older,)).restore_priority("")
    assert (older / "cpu.shares").read_text() == "512\n"


def test_a_leftover_group_is_treated_like_a_new_one(tmp_path: Path) -> None:
    left = files(tmp_path / "pod-main", cpu__idle="1\n", cpu__shares="3\n")
    assert Cgroups({"cpu": tmp_path}).create("pod-main", ResourceLimits(share=0.5)).paths == (left,)
    assert [(left / f"cpu.{name}").read_text() for name in ("idle", "shares")] == ["0", "512"]


def test_where_nothing_is_allowed_nothing_is_used(tmp_path: Path) -> None:
    assert find_cgroups(tmp_path / "none", tmp_path / "none").places == {}
    blocked = tmp_path / "memory"
    blocked.write_text("")  # no folder can be made below a file
    assert fake_kernel(tmp_path, f"cgroup {blocked} cgroup rw,memory 0 0\n", "1:memory:/\n").places == {}


# By looking


@contextlib.contextmanager
def session(line: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a session of its own, which has said that it is where it wanted to be."""
    arguments = [sys.executable, "-c", f"{line}; print('there', flush=True); time.sleep(3600)"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def judged(pid: int, limits: ResourceLimits) -> ExitStatus | None:
    """What a watch says of a session after one look."""
    return LimitWatcher()._poll({pid: limits}).get(pid)


def test_who_uses_more_memory_than_its_limit_is_found() -> None:
    with session("import os, time; kept = os.urandom(1 << 20) * 96") as process:
        result = judged(process.pid, ResourceLimits(memory=64 * MEBIBYTE))
        assert result is not None and result.reason == "OOMKilled" and result.code == -9
        assert "its limit is 64 MiB" in result.message
        assert judged(process.pid, ResourceLimits(memory=512 * MEBIBYTE)) is None


def test_pages_that_processes_share_count_once() -> None:
    forks = "[os.fork() or time.sleep(3600) for _ in range(5)]"
    with session(f"import os, time; kept = os.urandom(1 << 20) * 96; {forks}") as process:
        assert judged(process.pid, ResourceLimits(memory=256 * MEBIBYTE)) is None
        assert judged(process.pid, ResourceLimits(memory=64 * MEBIBYTE)) is not None


def test_who_has_more_processes_and_threads_than_it_may_is_found() -> None:
    starts = "[threading.Thread(target=time.sleep, args=(3600,), daemon=True).start() for _ in range(20)]"
    with session(f"import threading, time; {starts}") as process:
        result = judged(process.pid, ResourceLimits(tasks=10))
        assert result is not None and "may have 10: raise --max-processes" in result.message
        assert judged(process.pid, ResourceLimits(tasks=50)) is None


def test_a_watch_runs_while_it_has_subscribers() -> None:
    async def run(pid: int) -> None:
        watch = LimitWatcher(0.01)
        waiting = asyncio.ensure_future(watch.wait_exceeded(pid, ResourceLimits(memory=1 << 50)))
        over = await asyncio.wait_for(watch.wait_exceeded(os.getsid(0), ResourceLimits(memory=MEBIBYTE)), 30)
        assert over.reason == "OOMKilled" and not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while watch._task is not None:  # noqa: ASYNC110  it ends at its next look
            await asyncio.sleep(0.01)
        await watch.close()

    with session("import time") as process:
        asyncio.run(run(process.pid))


def test_cores_are_those_that_fewest_are_tied_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from headrace.fleet.local.container_command import ContainerCommand
    from headrace.fleet.local.container_runtime import ContainerSpec

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    driver = ProcessRuntime(Cgroups({}))

    def cores(name: str, limit: float) -> tuple[int, ...]:
        spec = ContainerSpec(
            "uid", name, tmp_path / name, ContainerCommand((), {}, False), tmp_path, limits=ResourceLimits(cores=limit)
        )
        return driver._choose_cores(spec)

    assert [cores("a", 1.5), cores("b", 1), cores("c", 2)] == [(0, 1), (2,), (3, 0)]
    driver.release_cores(tmp_path / "a")
    assert cores("d", 2) == (1, 0) and cores("e", 4) == () and cores("f", 0.1) == (1,)
    assert (
        ProcessRuntime(Cgroups({"cpu": tmp_path}))._choose_cores(
            ContainerSpec(
                "uid", "x", tmp_path, ContainerCommand((), {}, False), tmp_path, limits=ResourceLimits(cores=1)
            )
        )
        == ()
    )


# Services


@pytest.fixture(scope="module", params=[False, True], ids=["as-this-machine-allows", "by-looking"])
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LocalSite]:
    folder = tmp_path_factory.mktemp("limits")
    site = LocalSite(folder, without_cgroups=request.param, max_processes=40)
    site.up()
    site.apply(site.model, runtime())
    yield site
    site.close()


def limited(name: str, **limits: str) -> dict[str, Any]:
    return service(name, runner={"name": "ome-container", "resources": {"limits": limits}})


@pytest.mark.slow
def test_a_replica_that_leaks_is_ended_as_kubernetes_would_and_others_serve(site: LocalSite) -> None:
    site.apply(limited("leaky", memory="128Mi"), service("well"))
    url, other = site.ready("leaky"), site.ready("well")
    with contextlib.suppress(OSError):
        fetch_text(url, "/leak?200")
    result = eventually(
        lambda: get_list(site.pods("leaky")[0], "status", "containerStatuses")[0]["lastState"].get("terminated")
    )
    assert (result["reason"], result["exitCode"]) == ("OOMKilled", 137) and "limit" in result["message"]
    assert fetch_text(other).startswith("well ")
    pods = site.pods("leaky")
    answer = site.ask(lambda fleet: fleet.events(pods))
    assert any(item["reason"] == "Ended" and "OOMKilled" in item["message"] for item in answer)
    assert site.ready("leaky") == url
    groups = _groups(site)
    assert bool(groups) == _by_kernel(site, "memory")
    site.delete("leaky")
    site.delete("well")
    assert not any(group.exists() for group in groups)


@pytest.mark.slow
def test_a_replica_with_too_many_threads_does_not_get_them(site: LocalSite) -> None:
    site.apply(service("threads"))
    url = site.ready("threads")
    (before,) = site.pids("threads")
    with contextlib.suppress(OSError):
        fetch_text(url, "/threads?60")
    if _by_kernel(site, "pids"):
        assert _tasks(before) <= 40 and site.pids("threads") == {before}
    else:
        eventually(lambda: before not in site.pids("threads"))
        result = eventually(lambda: get_list(site.pods("threads")[0], "status", "containerStatuses")[0]["lastState"])
        result = result["terminated"]
        assert "processes and threads, and may have 40" in result["message"]
    site.ready("threads")
    site.delete("threads")


@pytest.mark.slow
def test_a_core_limit_is_enforced_and_passed_to_libraries(site: LocalSite) -> None:
    site.apply(limited("slow", cpu="500m"))
    site.ready("slow")
    (pid,) = site.pids("slow")
    environment = dict(part.partition("=")[::2] for part in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    assert environment["OMP_NUM_THREADS"] == "1"
    if _by_kernel(site, "cpu"):
        assert f"/{PARENT}/" in Path(f"/proc/{pid}/cgroup").read_text()
    else:
        assert len(os.sched_getaffinity(pid)) == 1
    site.delete("slow")


def _tasks(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 1000


def _groups(site: LocalSite) -> list[Path]:
    """Those of the pods that are there."""
    results = [read_json(path) or {} for path in site.root.glob("pods/*/containers/*/process.json")]
    return [Path(path) for record in results for path in record.get("groups", [])]


def _by_kernel(site: LocalSite, controller: str) -> bool:
    return controller in find_cgroups().places and not site._settings["without_cgroups"]
