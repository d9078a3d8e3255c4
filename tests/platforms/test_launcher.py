# SPDX-License-Identifier: Apache-2.0
"""The launcher, over real processes that behave as they are told, and over a driver that fails as it is told."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from service_programs import make_model

from headrace.core.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from headrace.core.kv_transfer import KEY_VARIABLE
from headrace.platforms import launch_plan
from headrace.platforms.contract import Check, Handle, LaunchSpec, PlatformStatus
from headrace.platforms.drivers import DriverOptions, default_state_dir
from headrace.platforms.launcher import Launcher, StartFailed, StartRequest, WaitPolicy
from headrace.platforms.processes import process_name
from headrace.platforms.registry import DEFAULT_PATH, RUNNING, STARTING, Entry, Registry
from headrace.platforms.service_client import NotReadyYet
from headrace.platforms.slurm.batch_script import node_port
from support.ports import launchers_ports
from support.waiting import eventually_async

HERE = str(Path(__file__).parent)
ARCH = "tao-dataservices"
SECRET = "wandb-" + "9" * 20
GONE = f"{process_name().split('/')[0]}/another-boot/1/1/"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(launch_plan, "TARGET", "service_programs:serve")
    with launchers_ports():
        yield tmp_path
    left = [
        process.pid for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def launcher(folder: Path, **more: Any) -> Launcher:
    """A start ends when the service answers, or has ended: how long that takes is the machine's business."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": HERE, "WANDB_API_KEY": SECRET, "WANDB_PROJECT": "mugs"}
    return Launcher(folder / "registry.json", **{"environ": environ, "settle_seconds": 120, **more})


def request(folder: Path, behaviour: str = "ready", **more: Any) -> StartRequest:
    return StartRequest(ARCH, str(make_model(folder / behaviour.partition(":")[0], behaviour)), **more)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def recorded(folder: Path) -> dict[str, Entry]:
    return Registry(folder / "registry.json").entries()


def nothing_left(folder: Path) -> bool:
    jobs = folder / "registry.json.services" / "jobs"
    return recorded(folder) == {} and (not jobs.exists() or not list(jobs.iterdir()))


def test_a_service_is_started_found_queried_and_stopped_without_a_trace(folder: Path) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            entry = await ours.start(request(folder), wait=True)
            assert entry.host_port is not None and entry.host_url == f"http://localhost:{entry.host_port}"
            assert 8080 <= entry.host_port <= 8199
            assert (entry.platform, entry.network_arch, entry.state) == ("process", ARCH, RUNNING)
            assert ours.registry.latest == entry.job_id

            [service] = await ours.list()
            assert (service.state, service.pod_phase, service.entry) == ("running", "Running", entry)
            assert (await ours.status(entry.job_id)).state == "running"
            status = await ours.fetch_status(entry.job_id)
            assert status is not None and status["environ"]["WANDB_API_KEY"] == SECRET
            job = json.loads(status["words"][status["words"].index("--job") + 1])
            assert job == {
                "job_id": entry.job_id,
                "specs": {"model_path": str(folder / "ready")},
                "neural_network_name": ARCH,
            }
            variables = json.loads(status["words"][status["words"].index("--docker_env_vars") + 1])
            assert variables == {
                "WANDB_PROJECT": "mugs",
                "TAO_EXECUTION_BACKEND": "local-process",
                "TAO_API_JOB_ID": entry.job_id,
                "CLOUD_BASED": "False",
            }

            answer = await ours.send_chat(entry.job_id, {"messages": [{"role": "user", "content": "hi"}]})
            assert json.loads(answer.text)["messages"][0]["content"] == "hi"
            assert "started with" in await ours.logs(entry.job_id)

            shown = Path(f"/proc/{entry.more['handle']['pid']}/cmdline").read_bytes().decode().split("\0")
            assert entry.job_id in shown
            assert SECRET not in str(shown) + (folder / "registry.json").read_text() + await ours.logs(entry.job_id)

            await ours.stop(entry.job_id)
            assert nothing_left(folder) and await ours.list() == []
            for asked in (ours.stop, ours.status, ours.logs, ours.fetch_status, ours.wait_ready):
                with pytest.raises(NotFound, match=r"headrace service list"):
                    await asked(entry.job_id)

    run(main)


def test_several_services_have_separate_ports_and_each_is_recorded(folder: Path) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            wanted = request(folder)
            entries = await asyncio.gather(*(ours.start(wanted) for _ in range(4)))
            assert len({entry.host_port for entry in entries}) == 4
            assert set(recorded(folder)) == {entry.job_id for entry in entries}
            assert [listed_service.state for listed_service in await ours.list()] == ["running"] * 4
            last = max(entries, key=lambda entry: entry.started)
            assert ours.registry.latest == last.job_id
            await ours.stop(last.job_id)
            others = [entry for entry in entries if entry != last]
            assert ours.registry.latest == max(others, key=lambda other: other.started).job_id
            await asyncio.gather(*(ours.stop(other.job_id) for other in others))
            assert ours.registry.latest is None and nothing_left(folder)

    run(main)


async def ended(ours: Launcher, service: Any) -> None:
    async def has_ended() -> bool:
        return (await ours.status(service.job_id)).state != "running"

    await eventually_async(has_ended)


def test_services_that_ended_or_vanished_are_reported_and_pruned(folder: Path) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            killed, vanished, living = [await ours.start(request(folder)) for _ in range(3)]
            os.kill(killed.more["handle"]["pid"], signal.SIGKILL)
            os.kill(vanished.more["handle"]["pid"], signal.SIGKILL)
            await ended(ours, vanished)
            shutil.rmtree(folder / "registry.json.services" / "jobs" / vanished.job_id)
            await ended(ours, killed)
            results = {listed_service.entry.job_id: listed_service for listed_service in await ours.list()}
            assert (results[killed.job_id].state, results[killed.job_id].pod_phase) == ("ended", "Failed")
            assert "SIGKILL" in results[killed.job_id].reason
            assert results[vanished.job_id].state == "stale" and "does not know it" in results[vanished.job_id].reason
            assert results[living.job_id].state == "running"
            removed = await ours.prune()
            assert {item.entry.job_id for item in removed} == {killed.job_id, vanished.job_id}
            assert set(recorded(folder)) == {living.job_id}
            assert await ours.prune() == []
            await ours.stop(living.job_id)
            assert nothing_left(folder)

    run(main)


def test_a_start_that_was_cut_short_is_stale_only_if_its_launcher_is_dead(folder: Path) -> None:
    async def main() -> None:
        registry = Registry(folder / "registry.json")
        dead, alive, old = (
            registry.begin(Entry(str(uuid.uuid4()), "process", ARCH, more={"launcher": name}), wants_port=True)
            for name in (GONE, process_name(), "elsewhere/boot/1/1/")
        )
        registry.put(replace(old, started_at="2020-01-01T00:00:00+00:00"))
        async with launcher(folder) as ours:
            states = {listed_service.entry.job_id: listed_service.state for listed_service in await ours.list()}
            assert states == {dead.job_id: "stale", alive.job_id: "starting", old.job_id: "stale"}
            started = await ours.start(request(folder))
            # Theirs stay taken until they are pruned: a request must never reach another service by an old record.
            assert started.host_port not in {dead.host_port, alive.host_port, old.host_port}
            await ours.stop(started.job_id)

    run(main)


def test_a_service_that_exits_at_start_is_reported_with_its_last_lines_and_removed(folder: Path) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            with pytest.raises(StartFailed, match=r"code 7; its log ends with: last reason: no weights") as caught:
                await ours.start(request(folder, "dies"))
            assert caught.value.last_lines.splitlines()[-2:] == ["first reason", "last reason: no weights"]
            assert nothing_left(folder)

    run(main)


def test_a_service_whose_model_cannot_be_loaded_is_removed_and_a_slow_one_is_not(folder: Path) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            with pytest.raises(StartFailed, match="the weights are torn") as caught:
                await ours.start(request(folder, "broken"), wait=True)
            assert "started with" in caught.value.last_lines and nothing_left(folder)
            with pytest.raises(DeadlineExceeded, match="half of it is loaded.*it keeps running"):
                await ours.start(request(folder, "loading"), wait=True, wait_policy=WaitPolicy(2.0))
            [service] = await ours.list()
            assert service.state == "running"
            with pytest.raises(NotReadyYet, match="still loading"):
                await ours.send_chat(service.entry.job_id, {})
            make_model(folder / "loading", "ready")
            await ours.wait_ready(service.entry.job_id)
            await ours.stop(service.entry.job_id)

    run(main)


def test_a_start_that_is_cancelled_is_undone(folder: Path) -> None:
    async def main() -> None:
        async with launcher(folder, settle_seconds=600) as ours:
            task = asyncio.create_task(ours.start(request(folder, "mute")))
            jobs = folder / "registry.json.services" / "jobs"
            await eventually_async(lambda: list(jobs.glob("*/launch.json")))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert nothing_left(folder)

    run(main)


def test_a_log_is_followed_to_the_end_of_the_service(folder: Path) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            entry = await ours.start(request(folder))
            lines: list[str] = []

            async def follow() -> None:
                async for line in ours.follow(entry.job_id, 1):
                    lines.append(line)

            task = asyncio.create_task(follow())
            await eventually_async(lambda: lines)
            await ours.send_chat(entry.job_id, {})
            os.kill(entry.more["handle"]["pid"], signal.SIGKILL)
            await task
            assert lines[0].startswith("started with") and lines[1:] == ["asked"]
            await ours.stop(entry.job_id)

    run(main)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            ({"model_path": f"{scheme}://bucket/m"}, "no cloud-storage dependency")
            for scheme in ("s3", "gs", "az", "aws")
        ),
        ({"model_path": "hf://org/name"}, "hf_model://ORG/NAME"),
        ({"model_path": "/nowhere/at/all"}, "there is no model at"),
        ({"model_path": ""}, "no model is given"),
        ({"model_path": "/tmp\n/x"}, "no model at|control character"),
        ({"arch": "resnet"}, "use one of cosmos-predict2.5, cosmos-rl, tao-dataservices"),
        ({"arch": "$(touch CANARY)"}, "unknown architecture"),
        ({"platform": "mainframe"}, "use one of process"),
        ({"platform": "process; touch CANARY"}, "unknown platform"),
        ({"num_gpus": -1}, "GPUs, not -1"),
        ({"num_gpus": 0, "platform": "local-docker", "model_path": "/m"}, "1 to 1024 GPUs"),
        ({"nodes": 2}, "the platform process starts a service on one node"),
        ({"nodes": 65, "platform": "slurm", "model_path": "/m"}, "1 to 64 nodes"),
        ({"nodes": 2, "platform": "slurm", "model_path": "/m"}, "add --image headrace"),
        ({"job_id": "../../etc/passwd"}, "not a UUID"),
        ({"job_id": "'; touch CANARY #"}, "not a UUID"),
        ({"image": "x"}, "runs no container"),
        ({"options": {"idle_timeout_minutes": "$(touch CANARY)"}}, "whole number"),
        ({"options": {"host": "0.0.0.0"}}, "has no option"),
        ({"settings": {"partition": "x"}}, "no setting"),
        ({"platform": "local-docker", "model_path": "/m", "image": "a b;touch CANARY"}, "not the name of an image"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is_recorded(
    folder: Path, change: Mapping[str, Any], words: str
) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            with pytest.raises((InvalidArgument, NotFound), match=words):
                await ours.start(replace(request(folder), **change))

    run(main)
    assert recorded(folder) == {}
    assert not any(Path(place, "CANARY").exists() for place in (".", folder))


@pytest.mark.parametrize(
    "name",
    ["it's", 'a "quoted" one', "$(touch CANARY)", "; touch CANARY ;", "`touch CANARY`", "{port}", "é 🙂", "--port"],
)
def test_a_hostile_path_arrives_as_it_is(folder: Path, name: str) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            entry = await ours.start(StartRequest(ARCH, str(make_model(folder / name))))
            status = await ours.fetch_status(entry.job_id)
            assert status is not None
            job = json.loads(status["words"][status["words"].index("--job") + 1])
            assert job["specs"]["model_path"] == str(folder / name)
            assert entry.more["model_path"] == str(folder / name)
            await ours.stop(entry.job_id)

    run(main)
    assert not list(folder.rglob("CANARY")) and not Path("CANARY").exists()


class Fake:
    """A platform without anything behind it: does and fails as it is told."""

    name = "local-docker"
    place = "nowhere"

    def __init__(self, **more: Any) -> None:
        self.fails = more
        self.held: dict[str, PlatformStatus] = {}
        self.url: str | None = None
        self.stopped: list[str] = []

    async def preflight(self) -> list[Check]:
        return [Check("client", True, "is there"), Check("engine", "preflight" not in self.fails, "start docker")]

    async def start(self, spec: LaunchSpec) -> Handle:
        if "start" in self.fails:
            raise self.fails["start"]
        self.held[spec.job_id] = PlatformStatus("starting", pod_phase="Pending")
        self.spec = spec
        return Handle(spec.job_id, self.name, {"docker_url": f"http://{spec.job_id}:8080", "odd": object()})

    async def status(self, handle: Handle) -> PlatformStatus:
        return self.held.get(handle.job_id, PlatformStatus("gone"))

    async def logs(self, handle: Handle, tail: int) -> str:
        return ""

    async def endpoint(self, handle: Handle) -> str | None:
        return self.url

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        if "stop" in self.fails:
            raise self.fails["stop"]
        self.stopped.append(handle.job_id)
        self.held.pop(handle.job_id, None)

    async def list_services(self) -> dict[str, PlatformStatus]:
        if "found" in self.fails:
            raise self.fails["found"]
        return dict(self.held)

    async def close(self) -> None:
        pass


def faked(folder: Path, fake: Fake) -> Launcher:
    def made(platform: str, options: DriverOptions) -> Any:
        assert platform == "local-docker"
        return fake

    return launcher(folder, make_driver=made, settle_seconds=0.05)


DOCKER = StartRequest(ARCH, "/models/m", "local-docker", 2, image="headrace")


def test_a_container_gets_the_line_of_every_platform_and_an_address_when_there_is_one(folder: Path) -> None:
    async def main() -> None:
        fake = Fake()
        async with faked(folder, fake) as ours:
            entry = await ours.start(DOCKER)
            assert (entry.host_url, entry.docker_url) == ("", f"http://{entry.job_id}:8080")
            container = fake.spec.container
            assert container is not None and container.command.startswith(
                "umask 0 && exec headrace microservice start --job "
            )
            assert (container.port, fake.spec.host_port, fake.spec.gpus) == (8080, entry.host_port, 2)
            assert fake.spec.secret_environment == {"WANDB_API_KEY": SECRET}
            assert SECRET not in container.command + str(fake.spec.environment) + (folder / "registry.json").read_text()
            [service] = await ours.list()
            assert service.state == "starting"
            fake.held[entry.job_id], fake.url = PlatformStatus("running", pod_phase="Running"), "http://127.0.0.1:9"
            [service] = await ours.list()
            assert (service.state, service.entry.host_url) == ("running", "http://localhost:9")
            assert recorded(folder)[entry.job_id].host_url == "http://localhost:9"

    run(main)


class SleepingFake(Fake):
    """Tells more of a service once it has an address, and nothing of anything while it sleeps."""

    asleep = False
    tunnel = 71

    async def describe(self, handle: Handle) -> Handle:
        return replace(handle, data={**handle.data, "tunnel_pid": self.tunnel, "slurm_node": "n1", "started": 5})

    async def list_services(self) -> dict[str, PlatformStatus]:
        return {} if self.asleep else dict(self.held)

    async def status(self, handle: Handle) -> PlatformStatus:
        if self.asleep:
            raise Unavailable("the instance box is STOPPED: start it with `brev start box`")
        return await super().status(handle)


def test_what_is_known_once_there_is_an_address_is_recorded(folder: Path) -> None:
    async def main() -> None:
        fake = SleepingFake()
        async with faked(folder, fake) as ours:
            entry = await ours.start(DOCKER)
            assert entry.tunnel_pid is None
            fake.held[entry.job_id], fake.url = PlatformStatus("running", pod_phase="Running"), "http://127.0.0.1:9"
            await ours.list()
            result = recorded(folder)[entry.job_id]
            assert (result.tunnel_pid, result.slurm_node, result.more["handle"]["started"]) == (71, "n1", 5)
            # A tunnel that died is made again when its service does not answer, maybe elsewhere.
            fake.url, fake.tunnel = "http://127.0.0.1:10", 72
            with pytest.raises(DeadlineExceeded):
                await ours.wait_ready(entry.job_id, WaitPolicy(0.0, try_seconds=0.1))
            result = recorded(folder)[entry.job_id]
            assert (result.tunnel_pid, result.host_url) == (72, "http://localhost:10")
            fake.url = "http://127.0.0.1:11"
            second = await ours.start(DOCKER)
            assert recorded(folder)[second.job_id].tunnel_pid == second.tunnel_pid == 72

    run(main)


def test_what_a_sleeping_machine_has_is_neither_stale_nor_pruned(folder: Path) -> None:
    async def main() -> None:
        fake = SleepingFake()
        async with faked(folder, fake) as ours:
            entry = await ours.start(DOCKER)
            fake.asleep = True
            [service] = await ours.list()
            assert service.state == "unknown" and "brev start box" in service.reason
            assert await ours.prune() == [] and entry.job_id in recorded(folder)
            fake.asleep, fake.held = False, {}
            [service] = await ours.list()
            assert service.state == "stale"

    run(main)


def test_ours_is_started_without_a_gpu_on_every_platform(folder: Path) -> None:
    wanted = replace(DOCKER, num_gpus=0)
    assert launcher(folder)._plan(wanted).gpus == 0
    environ = {"SLURM_PARTITION": "gpu", "SLURM_CONTAINER_MODE": "bare"}
    assert launcher(folder, environ=environ)._plan(replace(wanted, platform="slurm", image="")).gpus == 0
    with pytest.raises(InvalidArgument, match="--image headrace"):
        launcher(folder)._plan(replace(wanted, image=""))


def test_the_nodes_of_a_service_share_a_secret_key(folder: Path) -> None:
    ours = launcher(folder, environ={"SLURM_PARTITION": "gpu", "SLURM_CONTAINER_MODE": "bare"})
    wanted = StartRequest(ARCH, "/models/m", "slurm", nodes=2)
    specs = [launch_plan.launch_spec(ours._plan(wanted), None, folder) for _ in range(2)]
    assert [spec.nodes for spec in specs] == [2, 2]
    keys = {spec.secret_environment[KEY_VARIABLE] for spec in specs}
    assert len(keys) == 2  # of each service its own
    assert all(len(key) == 64 for key in keys)
    assert all(key not in repr(spec) for key in keys for spec in specs)
    one = launch_plan.launch_spec(ours._plan(replace(wanted, nodes=1)), None, folder)
    assert KEY_VARIABLE not in one.secret_environment


@pytest.mark.parametrize(
    "error",
    [
        FailedPrecondition("the image x cannot be pulled"),
        ResourceExhausted("the node is full"),
        Unavailable("docker does not answer"),
    ],
)
def test_a_platforms_refusal_is_reported_and_undone(folder: Path, error: Exception) -> None:
    async def main() -> None:
        fake = Fake(start=error)
        async with faked(folder, fake) as ours:
            with pytest.raises(type(error), match=str(error)):
                await ours.start(DOCKER)
        assert recorded(folder) == {} and len(fake.stopped) == 1

    run(main)


def test_a_stranger_of_the_same_name_is_not_stopped(folder: Path) -> None:
    async def main() -> None:
        fake = Fake(start=AlreadyExists("there is a container of this name"))
        async with faked(folder, fake) as ours:
            with pytest.raises(AlreadyExists, match="container of this name"):
                await ours.start(DOCKER)
        assert recorded(folder) == {} and fake.stopped == []

    run(main)


def test_what_cannot_be_undone_or_stopped_stays_recorded(folder: Path) -> None:
    async def main() -> None:
        fake = Fake(start=Unavailable("no answer"), stop=Unavailable("still none"))
        async with faked(folder, fake) as ours:
            with pytest.raises(Unavailable, match="no answer"):
                await ours.start(DOCKER)
            [entry] = recorded(folder).values()
            assert entry.state == STARTING
            with pytest.raises(Unavailable, match="still none"):
                await ours.stop(entry.job_id)
            assert len(recorded(folder)) == 1
            await ours.stop(entry.job_id, forget=True)
            assert recorded(folder) == {}

    run(main)


def test_a_platform_that_does_not_answer_hides_no_other(folder: Path) -> None:
    async def main() -> None:
        registry = Registry(folder / "registry.json")
        registry.put(Entry(str(uuid.uuid4()), "local-docker", ARCH, "http://localhost:8080", state=RUNNING))
        registry.put(Entry(str(uuid.uuid4()), "vms", "other", "http://localhost:1", more={"of": "another tool"}))
        fake = Fake(found=Unavailable("docker does not answer"))

        def made(platform: str, options: DriverOptions) -> Any:
            from headrace.platforms.drivers import create_driver

            return fake if platform == "local-docker" else create_driver(platform, options)

        async with launcher(folder, make_driver=made) as ours:
            ours.registry.begin(Entry(str(uuid.uuid4()), "process", ARCH, more={"launcher": GONE}), wants_port=True)
            results = {listed_service.entry.platform: listed_service for listed_service in await ours.list()}
            assert {name: item.state for name, item in results.items()} == {
                "local-docker": "unknown",
                "vms": "unknown",
                "process": "stale",
            }
            assert "does not answer" in results["local-docker"].reason and "unknown platform" in results["vms"].reason
            assert len(await ours.prune()) == 1 and len(recorded(folder)) == 2

    run(main)


def test_running_out_of_ports_is_reported(folder: Path) -> None:
    registry = Registry(folder / "registry.json")
    for port in range(8080, 8200):
        registry.put(Entry(str(uuid.uuid4()), "process", ARCH, "http://x", "2020-01-01", RUNNING, port))

    async def main() -> None:
        async with launcher(folder) as ours:
            with pytest.raises(ResourceExhausted, match="prune"):
                await ours.start(request(folder))

    run(main)


def test_the_preflight_reports_what_is_there_and_never_values_of_variables(folder: Path) -> None:
    async def main() -> None:
        async with launcher(folder) as ours:
            result = await ours.preflight("process")
            assert result.passed and dict(result.variables)["WANDB_API_KEY"] == "SET"
            assert dict(result.variables)["HF_TOKEN"] == "UNSET" and SECRET not in repr(result)
            with pytest.raises(InvalidArgument):
                await ours.preflight("mainframe")
            wrong = await ours.preflight("process", {"x": "y"})
            assert not wrong.passed and "no setting" in wrong.checks[0].message
        async with faked(folder, Fake(preflight=True)) as ours:
            assert not (await ours.preflight("local-docker")).passed
            with pytest.raises(
                FailedPrecondition, match=r"local-docker is not ready for services\. engine: start docker"
            ):
                await ours.start(DOCKER)
            assert recorded(folder) == {}
            entry = await ours.start(DOCKER, preflight=False)
            await ours.stop(entry.job_id)

    run(main)


def test_files_of_services_are_in_the_users_folder_and_never_in_a_strangers(folder: Path) -> None:
    assert default_state_dir(DEFAULT_PATH, {"HOME": "/home/a"}) == Path("/home/a/.local/state/headrace/services")
    assert default_state_dir(DEFAULT_PATH, {"XDG_STATE_HOME": "/s"}) == Path("/s/headrace/services")
    assert default_state_dir(Path("/a/r.json"), {}) == Path("/a/r.json.services")
    open_to_all = folder / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)

    async def main() -> None:
        async with launcher(folder, state_dir=open_to_all) as ours:
            with pytest.raises(PermissionDenied, match="--state-dir"):
                await ours.start(request(folder))
        async with launcher(folder) as ours:
            entry = await ours.start(request(folder))
            assert (folder / "registry.json.services").stat().st_mode & 0o077 == 0
            await ours.stop(entry.job_id)

    run(main)


ONE = """
import asyncio, sys
from pathlib import Path
from headrace.platforms import launch_plan
from headrace.platforms.launcher import Launcher, StartRequest
launch_plan.TARGET = "service_programs:serve"
async def main():
    async with Launcher(Path(sys.argv[1])) as ours:
        print((await ours.start(StartRequest("tao-dataservices", sys.argv[2]))).host_port, flush=True)
asyncio.run(main())
"""


def test_launchers_of_several_processes_do_not_clash(folder: Path) -> None:
    async def main() -> None:
        model = str(make_model(folder / "m"))
        arguments = [sys.executable, "-c", ONE, str(folder / "registry.json"), model]
        started = await asyncio.gather(
            *(
                asyncio.create_subprocess_exec(
                    *arguments, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": HERE}
                )
                for _ in range(3)
            )
        )
        ports = [(await service.communicate())[0] for service in started]
        assert len(set(ports)) == 3 and all(service.returncode == 0 for service in started)
        async with launcher(folder) as ours:
            results = await ours.list()
            assert [result.state for result in results] == ["running"] * 3
            await asyncio.gather(*(ours.stop(result.entry.job_id) for result in results))
        assert nothing_left(folder)

    run(main)


def test_the_token_of_a_lepton_endpoint_is_sent_only_there(folder: Path) -> None:
    ours = launcher(folder, environ={"LEPTON_AUTH_TOKEN": "t1"})
    job = str(uuid.uuid4())
    assert ours._headers(Entry(job, "lepton", host_url="https://x.lepton.run")) == {"authorization": "Bearer t1"}
    assert ours._headers(Entry(job, "lepton", host_url="http://x.lepton.run")) == {}
    assert ours._headers(Entry(job, "process", host_url="https://x")) == {}
    ours = launcher(folder, environ={"LEPTON_AUTH_TOKEN": "t1", "LEPTON_ENDPOINT_TOKEN": "t2"})
    assert ours._headers(Entry(job, "lepton", host_url="https://x")) == {"authorization": "Bearer t2"}


def test_a_bare_job_of_slurm_is_planned_by_the_variable_too(folder: Path) -> None:
    wanted = StartRequest(ARCH, "/models/m", "slurm", image="headrace")
    for mode, image in (("bare", ""), ("apptainer", "headrace")):
        environ = {"SLURM_PARTITION": "gpu", "SLURM_CONTAINER_MODE": mode}
        plan = launcher(folder, environ=environ)._plan(wanted)
        assert plan.settings == {"partition": "gpu", "mode": mode}
        container = launch_plan.launch_spec(plan, 8085, folder).container
        assert container is not None and container.image.partition(":")[0] == image
        # The node's network is shared: the service listens where nobody else does.
        port = node_port(plan.job_id)
        assert container.port == port and f" --port {port}" in container.command
