# SPDX-License-Identifier: Apache-2.0
"""Lines, states and troubles of the Brev driver, where needed against FakeBrev."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import shlex
import signal
import subprocess
import tarfile
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_contract import command, free_port, hostile
from fake_brev import FakeBrev, state

from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    Unauthenticated,
    Unavailable,
)
from headrace.platforms.brev import remote_docker
from headrace.platforms.brev.driver import BrevDriver
from headrace.platforms.brev.settings import BrevSettings
from headrace.platforms.contract import Check, Container, Handle, LaunchSpec, Mount
from headrace.platforms.processes import session_members
from support.waiting import eventually_async

JOB = "0123abcd-4567-89ab-cdef-0123456789ab"
BOX = Container("tao:1", "umask 0 && sleep 600")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeBrev]:
    fake = FakeBrev(tmp_path / "fake")
    yield fake
    assert fake.end() == set()


def driver_of(fake: FakeBrev, **more: Any) -> BrevDriver:
    given = {"instance_id": "box", "poll_seconds": 0.05, "command_seconds": 120, **more}
    return BrevDriver(BrevSettings(program=str(fake.program), state_dir=fake.root.parent / "state", **given))


def served(**more: Any) -> LaunchSpec:
    port = free_port()
    return LaunchSpec(str(uuid.uuid4()), container=Container("tao:1", command(port=port), port), **more)


async def answer(driver: BrevDriver, handle: Handle) -> Any:
    async def answered() -> Any:
        url = str(await driver.endpoint(handle))
        try:
            return await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(url, timeout=5)))
        except (OSError, ValueError):
            return None

    return await eventually_async(answered)


# Lines


def test_arguments_pass_through_both_shells_unchanged(tmp_path: Path) -> None:
    texts = hostile(tmp_path / "canary")
    show = "printf '%s\\0' \"$@\"; echo; echo; exit 7"
    line = remote_docker.exec_command(show, texts, "mark")
    # As brev does it: quoted once more, for a shell here that runs ssh, whose other end has a shell again.
    outer = "bash -c '" + line.replace("'", "'\\''") + "'"
    done = subprocess.run(["bash", "-c", outer], capture_output=True, check=True)
    reported = remote_docker.parse_outcome(done.stdout.decode() + "box\n", "mark")
    assert reported is not None and reported[0] == 7
    assert reported[1].strip("\n").split("\0")[:-1] == texts
    assert not (tmp_path / "canary").exists()


def test_a_line_that_did_not_end_has_no_outcome() -> None:
    assert remote_docker.parse_outcome("", "mark") is None
    assert remote_docker.parse_outcome("mark 0\n", "mark") is None
    assert remote_docker.parse_outcome("said\nmark x\n", "mark") is None
    assert remote_docker.parse_outcome("\nmark 1\nmore\n\nmark 0\nbox\n", "mark") == (0, "\nmark 1\nmore\n")


def test_what_is_too_long_or_has_a_zero_byte_is_refused() -> None:
    for word in ("x" * 130_000, "'" * 40_000, "a\0b"):
        with pytest.raises(InvalidArgument):
            remote_docker.exec_command("true", [word], "mark")


def test_the_arguments_for_docker() -> None:
    box = Container("nvcr.io/x:1", "umask 0 && run", 8080, (Mount('/a,b"c', "/in"),))
    spec = LaunchSpec(JOB, container=box, host_port=8085, environment={"A": "1"}, gpus=2, labels={"org": "o"})
    words = remote_docker.create_args(spec, BrevSettings(), "n1")
    assert words[-4:] == ["nvcr.io/x:1", "/bin/bash", "-c", "umask 0 && run"]
    pairs = list(zip(words[:-4:2], words[1:-4:2], strict=True))
    assert ("-p", "127.0.0.1:8085:8080") in pairs and ("--gpus", "2") in pairs and ("-e", "A=1") in pairs
    assert {("--label", f"headrace-job={JOB}"), ("--label", "headrace-start=n1"), ("--label", "org=o")} <= set(pairs)
    mount = next(csv.reader([dict(pairs)["--mount"]]))
    assert mount == ["type=bind", 'source=/a,b"c', "target=/in", "readonly"]
    public = remote_docker.create_args(LaunchSpec(JOB, container=BOX), BrevSettings(reach="public"), "n", "/bin/sh")
    assert "0.0.0.0::8080" in public and public[-5:] == ["--entrypoint", "/bin/sh", "tao:1", "-c", BOX.command]
    assert remote_docker.parse_shell_label('noise\n{"headrace.shell": "/bin/sh"}\n') == "/bin/sh"
    assert (
        remote_docker.parse_shell_label("null")
        == remote_docker.parse_shell_label("")
        == remote_docker.parse_shell_label("{}")
        == remote_docker.parse_shell_label("?")
        == ""
    )


@pytest.mark.parametrize(
    "spec",
    [
        LaunchSpec(JOB),
        LaunchSpec(JOB, container=Container("--privileged", "x")),
        LaunchSpec(JOB, container=Container("a b", "x")),
        LaunchSpec(JOB, container=Container("i", "x", mounts=(Mount("a", "/b"),))),
        LaunchSpec(JOB, container=BOX, environment={remote_docker.VARIABLES: "x"}),
    ],
)
def test_what_docker_would_misunderstand_is_refused(spec: LaunchSpec) -> None:
    with pytest.raises(InvalidArgument):
        remote_docker.create_args(spec, BrevSettings(), "n")


def test_secret_variables_are_read_by_a_shell_and_never_on_the_line(tmp_path: Path) -> None:
    texts = hostile(tmp_path / "canary")
    variables = {f"V{number}": text for number, text in enumerate(texts)}
    spec = LaunchSpec(JOB, container=BOX, secret_environment={"HF_TOKEN": "hf_x"})
    assert "hf_x" not in str(remote_docker.create_args(spec, BrevSettings(), "n"))
    with tarfile.open(fileobj=io.BytesIO(remote_docker.secrets_tar(variables))) as tar:
        assert [(member.name, member.mode) for member in tar][0][1] == 0o777
        result = tar.extractfile("headrace-variables/variables")
        assert result is not None
        (tmp_path / "variables").write_bytes(result.read())
    for shell in ("bash", "sh"):
        show = f". {shlex.quote(str(tmp_path / 'variables'))}; cat /proc/self/environ"
        raw = subprocess.run(
            [shell, "-c", show], capture_output=True, check=True, env={"PATH": os.environ["PATH"]}
        ).stdout
        got = dict(pair.split("=", 1) for pair in raw.decode().split("\0") if pair)
        assert {name: got[name] for name in variables} == variables
    assert not (tmp_path / "canary").exists()


# States


def test_what_brev_lists() -> None:
    assert remote_docker.parse_instances('{"workspaces": [{"name": "a", "status": "RUNNING"}, {"name": "b"}]}') == {
        "a": "RUNNING",
        "b": "UNKNOWN",
    }
    assert (
        remote_docker.parse_instances('{"workspaces": null}')
        == remote_docker.parse_instances("[]")
        == remote_docker.parse_instances("")
        == {}
    )
    with pytest.raises(Unavailable):
        remote_docker.parse_instances("You have 1 instances in Org x")
    assert remote_docker.job_of_instance(remote_docker.own_instance(JOB)) == JOB
    assert remote_docker.job_of_instance("headrace-box") is None and remote_docker.job_of_instance(JOB) is None


@pytest.mark.parametrize(
    ("state", "phase", "word", "told"),
    [
        ({"Status": "running"}, "running", "Running", ""),
        ({"Status": "created"}, "starting", "Pending", ""),
        ({"Status": "restarting"}, "starting", "Pending", ""),
        ({"Status": "exited", "ExitCode": 0}, "ended", "Succeeded", "code 0"),
        ({"Status": "exited", "ExitCode": 3}, "ended", "Failed", "code 3"),
        ({"Status": "exited", "ExitCode": 137, "OOMKilled": True}, "ended", "Failed", "memory"),
        ({"Status": "dead", "ExitCode": 1}, "ended", "Failed", "dead"),
    ],
)
def test_states_reported_by_docker(state: dict[str, Any], phase: str, word: str, told: str) -> None:
    ports = {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8081"}], "9/tcp": None}
    look = remote_docker.parse_listing(
        f"noise\n/{JOB} {json.dumps(state)} {json.dumps(ports)}\nfile .headrace-{JOB}-0a.tar\n"
    )
    seen = look.containers[JOB]
    assert (seen.observed.phase, seen.observed.pod_phase, seen.port) == (phase, word, 8081)
    assert told in seen.observed.reason and look.cut_short == frozenset()
    assert remote_docker.parse_listing(f"file .headrace-{JOB}-0a.key").cut_short == {JOB}


# Against the fake


def preflight(driver: BrevDriver) -> dict[str, Check]:
    return {check.name: check for check in asyncio.run(driver.preflight())}


def test_preflight_reports_what_is_missing(fake: FakeBrev, tmp_path: Path) -> None:
    none = preflight(BrevDriver(BrevSettings(program=str(tmp_path / "none"))))
    assert not none["brev"].passed and "install-latest.sh" in none["brev"].message
    assert none["BREV_API_TOKEN"].message.startswith("UNSET")
    (fake.root / "logged-in").unlink()
    out = preflight(driver_of(fake, token="brev-token"))
    assert out["BREV_API_TOKEN"].message == "SET" and not out["login"].passed and "brev login" in out["login"].message
    assert not (fake.root / "logged-in").exists(), "nobody asked for a login"
    logged_in = preflight(driver_of(fake, token="brev-token", login=True))
    assert logged_in["login"].passed and not logged_in["instance"].passed
    assert "gpu_name" in logged_in["instance"].message
    assert preflight(driver_of(fake, instance_id="", gpu_name="A100"))["instance"].passed
    fake.add_instance("box", "STOPPED")
    assert "brev start box" in preflight(driver_of(fake))["instance"].message
    with state(fake.root) as instances:
        instances["box"]["status"] = "RUNNING"
    assert all(check.passed for check in preflight(driver_of(fake)).values())
    assert "brev-token" not in repr(BrevSettings.from_environment({"BREV_API_TOKEN": "brev-token"}))


def test_stopped_instances_are_not_started_and_a_missing_login_is_reported(fake: FakeBrev) -> None:
    fake.add_instance("box", "STOPPED")

    async def main() -> None:
        driver = driver_of(fake)
        handle = Handle(JOB, "brev")
        for call in (driver.status(handle), driver.stop(handle, 1), driver.start(served())):
            with pytest.raises(Unavailable, match="brev start box"):
                await call
        assert await driver.list_services() == {} and await driver.endpoint(handle) is None
        assert {words[0] for words in fake.calls()} == {"ls"}
        (fake.root / "logged-in").unlink()
        with pytest.raises(Unauthenticated, match="brev login"):
            await driver.list_services()
        await driver.close()

    asyncio.run(main())


def test_a_service_has_its_own_instance_which_is_deleted_with_it(fake: FakeBrev) -> None:
    async def main() -> None:
        with pytest.raises(FailedPrecondition, match="gpu_name"):
            await driver_of(fake, instance_id="").start(served())
        driver = driver_of(fake, instance_id="", gpu_name="A100", cloud_cred_id="c", workspace_group_id="g")
        spec = served()
        handle = await driver.start(spec)
        own = remote_docker.own_instance(spec.job_id)
        assert handle.data["instance_id"] == own
        assert [
            "create",
            own,
            "--gpu-name",
            "A100",
            "--cloud-cred-id",
            "c",
            "--workspace-group-id",
            "g",
            "--detached",
        ] in (fake.calls())
        await answer(driver, handle)
        assert (await driver.list_services())[spec.job_id].phase == "running"
        with pytest.raises(AlreadyExists):
            await driver.start(spec)
        await driver.stop(handle, 1)
        assert await driver.list_services() == {} and fake.resources() == set()
        # One whose start was cut short after the instance was made.
        fake.add_instance(remote_docker.own_instance(JOB))
        assert (await driver.list_services())[JOB] == await driver.status(Handle(JOB, "brev"))
        assert (await driver.status(Handle(JOB, "brev"))).phase == "starting"
        await driver.stop(Handle(JOB, "brev"), 1)
        assert fake.resources() == set()
        with pytest.raises(Unavailable, match="could only create"):
            await driver_of(fake, instance_id="", gpu_name="NONE").start(served())
        await driver.close()

    asyncio.run(main())


def test_a_host_port_is_kept_and_a_taken_one_is_reported(fake: FakeBrev) -> None:
    fake.add_instance("box")

    async def main() -> None:
        driver = driver_of(fake)
        port = free_port()
        handle = await driver.start(served(host_port=port))
        assert handle.data["host_port"] == port and handle.data["docker_url"].startswith(f"http://{handle.job_id}:")
        url = await driver.endpoint(handle)
        # Both machines are one here, so that the number itself is taken on this side.
        assert url is not None and url != f"http://localhost:{port}"
        before = fake.resources()
        with pytest.raises(FailedPrecondition, match=str(port)):
            await driver.start(served(host_port=port))
        assert fake.resources() == before
        await answer(driver, handle)
        await driver.stop(handle, 1)
        await driver.close()

    asyncio.run(main())


def test_a_forwarding_that_died_is_made_again_at_the_same_port(fake: FakeBrev) -> None:
    fake.add_instance("box")

    async def main() -> None:
        driver = driver_of(fake)
        handle = await driver.start(served())
        await answer(driver, handle)
        url = await driver.endpoint(handle)
        meta = fake.root.parent / "state" / f"{handle.job_id}.json"
        session = json.loads(meta.read_text())["session"]
        os.killpg(session, signal.SIGKILL)
        await eventually_async(lambda: not session_members(session))  # until it is dead it has its port
        other = driver_of(fake)
        await answer(other, handle)
        assert await other.endpoint(handle) == url == await driver.endpoint(handle)
        assert json.loads(meta.read_text())["session"] != session
        await other.close()
        await driver.stop(handle, 1)
        assert not meta.exists()
        await driver.close()

    asyncio.run(main())


def test_an_address_that_brev_wrote_for_ssh(fake: FakeBrev, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add_instance("box")
    monkeypatch.setenv("PATH", f"{fake.root / 'bin'}:{os.environ['PATH']}")

    async def main() -> None:
        driver = driver_of(fake, reach="public")
        port = free_port()
        handle = await driver.start(served(host_port=port))
        assert await driver.endpoint(handle) == f"http://203.0.113.7:{port}"
        assert await driver_of(fake, reach="public", public_host="h").endpoint(handle) == f"http://h:{port}"
        await driver.stop(handle, 1)
        await driver.close()

    asyncio.run(main())


def test_images_that_cannot_be_pulled_and_a_key_that_is_forgotten(fake: FakeBrev) -> None:
    fake.add_instance("box")

    async def main() -> None:
        before = fake.resources()
        missing = LaunchSpec(JOB, container=Container("no-such/image:1", "x"))
        with pytest.raises(FailedPrecondition, match="NGC_KEY"):
            await driver_of(fake).start(missing)
        private = LaunchSpec(JOB, container=Container("nvcr.io/private/image:1", "sleep 600"))
        with pytest.raises(FailedPrecondition, match="right key"):
            await driver_of(fake, registry_key="nvapi-wrong").start(private)
        assert fake.resources() == before
        driver = driver_of(fake, registry_key="nvapi-right")
        handle = await driver.start(private)
        assert "nvapi-right" not in str(fake.calls())
        with pytest.raises(AlreadyExists):
            await driver.start(private)
        await driver.stop(handle, 0)
        assert fake.resources() - before == {"homes/box/pulled"}

    asyncio.run(main())


def test_a_name_that_could_be_a_flag_is_not_an_instance() -> None:
    for bad in ("--host", "a b", "a;b", "@file", "x" * 64):
        with pytest.raises(InvalidArgument):
            BrevDriver(BrevSettings(instance_id=bad))
