# SPDX-License-Identifier: Apache-2.0
"""The Docker driver on a real engine, beyond the contract of all drivers; and our own image, built and run."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import shlex
import shutil
import socket
import subprocess
import urllib.request
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("driver_contract")

from docker_platform import IMAGE, DockerEngine  # noqa: E402
from driver_contract import command  # noqa: E402

from headrace.core.errors import FailedPrecondition, ResourceExhausted, Unavailable  # noqa: E402
from headrace.platforms.contract import Container, Handle, LaunchSpec, Mount  # noqa: E402
from headrace.platforms.docker.driver import DockerDriver  # noqa: E402
from headrace.platforms.docker.settings import DockerSettings  # noqa: E402
from support.ports import free_port  # noqa: E402
from support.waiting import eventually_async  # noqa: E402

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers")]

ROOT = Path(__file__).parents[2]
OWN = "headrace-test/own:1"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def driver_of(engine: DockerEngine, **more: Any) -> DockerDriver:
    return DockerDriver(DockerSettings(host=engine.host, pull_seconds=30, **more))


def spec_of(line: str, image: str = IMAGE, mounts: tuple[Mount, ...] = (), **more: Any) -> LaunchSpec:
    return LaunchSpec(str(uuid.uuid4()), container=Container(image, line, mounts=mounts), **more)


async def answer(url: str, path: str = "", seconds: float = 120) -> bytes:
    async def answered() -> tuple[bytes] | None:
        try:
            return (await asyncio.to_thread(lambda: urllib.request.urlopen(url + path, timeout=5).read()),)
        except OSError:
            return None

    (content,) = await eventually_async(answered, within=seconds)  # which may be empty
    return bytes(content)


async def ended(driver: DockerDriver, handle: Handle) -> str:
    async def has_ended() -> bool:
        return (await driver.status(handle)).phase == "ended"

    await eventually_async(has_ended)
    return (await driver.status(handle)).reason


def test_states_of_the_handle_and_the_engine(engine: DockerEngine) -> None:
    async def main() -> None:
        driver, port = driver_of(engine), free_port()
        spec = spec_of(command(), host_port=port, labels={"org": "o$(id)"})
        handle = await driver.start(spec)
        assert handle.data["host_port"] == port and handle.data["docker_url"] == f"http://{spec.job_id}:8080"
        assert await driver.endpoint(Handle(spec.job_id, driver.name)) == f"http://localhost:{port}"
        await answer(f"http://localhost:{port}")
        (shown,) = json.loads(engine.docker("inspect", spec.job_id))
        assert shown["Name"] == f"/{spec.job_id}" and shown["Config"]["Labels"]["headrace.org"] == "o$(id)"
        assert shown["NetworkSettings"]["Ports"]["8080/tcp"] == [{"HostIp": "127.0.0.1", "HostPort": str(port)}]
        assert list(shown["NetworkSettings"]["Networks"]) == ["tao_default"]
        assert shown["HostConfig"]["ShmSize"] == 16 * 1024**3
        # Its neighbours reach it by its job id.
        ask = f"import urllib.request as u; print(u.urlopen('{handle.data['docker_url']}').status)"
        assert engine.docker("run", "--rm", "--network", "tao_default", IMAGE, "python3", "-c", ask) == "200"
        await driver.stop(handle, 5)
        assert "tao_default" not in engine.docker("network", "ls")

    run(main())


def test_a_network_that_was_there_stays(engine: DockerEngine) -> None:
    async def main() -> None:
        engine.docker("network", "create", "mine")
        before = engine.resources()
        driver = driver_of(engine, network="mine")
        assert [check.message for check in await driver.preflight() if check.name == "network"] == ["mine exists"]
        handle = await driver.start(spec_of(command()))
        await driver.stop(handle, 0.5)
        assert engine.resources() == before
        engine.docker("network", "rm", "mine")

    run(main())


def test_a_taken_port_and_a_missing_mount_leave_nothing(engine: DockerEngine) -> None:
    async def main() -> None:
        driver, before = driver_of(engine), engine.resources()
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.listen()
            with pytest.raises(ResourceExhausted, match="port is taken"):
                await driver.start(spec_of(command(), host_port=stranger.getsockname()[1]))
        with pytest.raises(FailedPrecondition, match="/nowhere"):
            await driver.start(spec_of(command(), mounts=(Mount("/nowhere", "/x"),)))
        with pytest.raises(FailedPrecondition, match="cannot be started.*bin/nothing"):
            await driver_of(engine, shell_path="/bin/nothing").start(spec_of("true", secret_environment={"A": "b"}))
        with pytest.raises(FailedPrecondition, match="NVIDIA container toolkit"):
            await driver.start(spec_of(command(), gpus=1))
        with pytest.raises(FailedPrecondition, match="runtime"):
            await driver_of(engine, gpu_way="tegra").start(spec_of(command(), gpus=1))
        assert engine.resources() == before

    run(main())


def test_mounts_are_read_only_whatever_their_names(engine: DockerEngine, tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "a,b \"c\" $(id) 'd'"
        folder.mkdir()
        (folder / "weights").write_text("here")
        driver = driver_of(engine)
        line = 'cat "/mo,dels/weights" && ! touch /mo,dels/new'
        handle = await driver.start(spec_of(line, mounts=(Mount(str(folder), "/mo,dels"),)))
        await ended(driver, handle)
        log = await driver.logs(handle, 10)
        assert "here" in log and "Read-only" in log and (await driver.status(handle)).pod_phase == "Succeeded"
        await driver.stop(handle, 1)
        assert [path.name for path in folder.iterdir()] == ["weights"]

    run(main())


def test_a_service_that_exits_at_start_is_reported_with_its_last_lines(engine: DockerEngine) -> None:
    async def main() -> None:
        driver = driver_of(engine)
        handle = await driver.start(spec_of("for n in 1 2 3 4; do echo out $n; done; exec >&2; echo why; exit 9"))
        reason = await ended(driver, handle)
        # The engine reads both streams, and in which order is its own business.
        assert "code 9; the log ends with: " in reason and "out 4" in reason and "why" in reason
        assert sorted((await driver.logs(handle, 100)).splitlines()) == ["out 1", "out 2", "out 3", "out 4", "why"]
        assert len((await driver.logs(handle, 3)).splitlines()) == 3
        await driver.stop(handle, 1)

    run(main())


def test_a_service_stops_with_grace_and_leaves_no_secrets(engine: DockerEngine) -> None:
    async def main() -> None:
        driver = driver_of(engine)
        line = "umask 0 && " + shlex.join(["python3", "-c", "import signal; print('up', flush=True); signal.pause()"])
        spec = spec_of(line, secret_environment={"HF_TOKEN": "hf_secret"})
        handle = await driver.start(spec)

        async def is_up() -> bool:
            return "up" in await driver.logs(handle, 5)

        await eventually_async(is_up)
        assert engine.docker("exec", spec.job_id, "ls", "/headrace-secrets") == ""
        first = engine.docker("exec", spec.job_id, "cat", "/proc/1/cmdline")
        assert first.startswith("python3"), "the shell has given its place to the service, which so gets SIGTERM"
        await driver.stop(handle, 1)

    run(main())


def test_preflight_reports_what_is_missing(engine: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def checks(**more: Any) -> dict[str, tuple[bool, str]]:
        driver = DockerDriver(DockerSettings(**{"host": engine.host, **more}))
        return {check.name: (check.passed, check.message) for check in await driver.preflight()}

    async def main() -> None:
        fine = await checks()
        assert list(fine) == ["docker", "version", "network"] and all(passed for passed, _ in fine.values())
        passed, said = (await checks(check_gpus=True, gpu_image=IMAGE))["gpus"]
        assert not passed and "NVIDIA container toolkit" in said
        silent = await checks(host="unix:///nowhere.sock")
        assert list(silent) == ["docker"] and not silent["docker"][0] and "DOCKER_HOST" in silent["docker"][1]
        with pytest.raises(Unavailable, match="no Docker engine answers"):
            await driver_of(DockerEngine("unix:///nowhere.sock")).list_services()
        monkeypatch.setenv("PATH", "/nowhere")
        missing = await checks()
        assert not missing["docker"][0] and "install Docker" in missing["docker"][1]

    run(main())


SSHD = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/user.pub
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
UsePAM no
SetEnv DOCKER_HOST={host}
"""


@pytest.fixture
def over_ssh(engine: DockerEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerEngine]:
    """The same engine, on the other side of ssh."""
    if not Path("/usr/sbin/sshd").exists():
        pytest.fail("there is no sshd: bash scripts/platforms/slurm.sh install")
    port = free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "sshd_config").write_text(SSHD.format(port=port, folder=tmp_path, host=engine.host))
    # The docker program calls ssh by its name and knows none of its options.
    options = f"-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -i {tmp_path}/user"
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=subprocess.DEVNULL)
    try:
        yield DockerEngine(f"ssh://{getpass.getuser()}@127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(30)


def test_an_engine_behind_ssh(over_ssh: DockerEngine) -> None:
    async def main() -> None:
        driver = driver_of(over_ssh)

        async def passes() -> bool:
            return (await driver.preflight())[0].passed

        await eventually_async(passes)  # sshd needs a moment
        checks = await driver.preflight()
        assert all(check.passed for check in checks), checks
        handle = await driver.start(spec_of(command(), secret_environment={"HF_TOKEN": "over there"}))
        url = await driver.endpoint(handle)
        assert url is not None
        assert json.loads(await answer(url))["environ"]["HF_TOKEN"] == "over there"
        await driver.stop(handle, 5)
        assert (await driver.status(handle)).phase == "gone"

    run(main())


@pytest.fixture(scope="module")
def own_image(engine: DockerEngine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Built by the repository's Dockerfile, from what git would hand over."""
    context = tmp_path_factory.mktemp("context")
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context)
    shutil.copytree(ROOT / "headrace", context / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "requirements", context / "requirements")
    (context / "secret.txt").write_text("not for the image")
    # Without ONNX Runtime, to be quicker: what is served here needs none.
    arguments = ("--build-arg", f"BASE={IMAGE}", "--build-arg", "EXTRAS=")
    engine.docker("build", *arguments, "--tag", OWN, str(context), seconds=300)
    return OWN


@pytest.mark.timeout(360)
def test_our_image_is_small_and_runs_without_rights(engine: DockerEngine, own_image: str, tmp_path: Path) -> None:
    hard = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    version = subprocess.check_output([shutil.which("headrace") or ROOT / ".venv/bin/headrace", "--version"], text=True)
    assert engine.docker("run", "--rm", *hard, own_image, "--version").split()[:2] == version.split()[:2]
    base, ours = (int(engine.docker("image", "inspect", "--format", "{{.Size}}", name)) for name in (IMAGE, own_image))
    assert ours - base < 400 * 2**20
    models = tmp_path / "models"
    models.mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    shutil.copytree(ROOT / "examples" / "models" / "repeat", models / "repeat")
    port = free_port()
    publish, mount = f"127.0.0.1:{port}:8000", f"type=bind,source={models},target=/models,readonly"
    # As the image itself says it: everything in /models.
    engine.docker("run", "--detach", "--name", "own", *hard, "--publish", publish, "--mount", mount, own_image)
    url = f"http://127.0.0.1:{port}"
    asyncio.run(answer(url, "/v2/health/ready"))
    assert json.loads(asyncio.run(answer(url, "/v2/models/repeat")))["name"] == "repeat"
    assert engine.docker("exec", "own", "id", "--user") == "10001"
    assert engine.docker("exec", "own", "python", "-c", "import os; print(os.path.exists('/secret.txt'))") == "False"
    engine.docker("stop", "--time", "60", "own")  # 137 would be its end if it did not listen
    assert engine.docker("inspect", "--format", "{{.State.ExitCode}}", "own") == "0", engine.docker("logs", "own")
    engine.docker("rm", "own")


@pytest.mark.timeout(360)
def test_our_image_is_started_by_the_driver(engine: DockerEngine, own_image: str) -> None:
    async def main() -> None:
        driver = driver_of(engine)
        line = "umask 0 && headrace serve --host 0.0.0.0 --http-port 8080"
        spec = spec_of(line, own_image, host_port=free_port(), secret_environment={"HF_TOKEN": "it's a secret"})
        handle = await driver.start(spec)
        url = await driver.endpoint(handle)
        assert url is not None
        await answer(url, "/v2/health/ready")
        raw = engine.docker("exec", spec.job_id, "cat", "/proc/1/environ")
        assert "HF_TOKEN=it's a secret" in raw.split("\0")
        assert "it's a secret" not in engine.docker("inspect", spec.job_id)
        assert engine.docker("exec", spec.job_id, "ls", "/headrace-secrets") == ""
        await driver.stop(handle, 20)
        assert await driver.list_services() == {}

    run(main())
