# SPDX-License-Identifier: Apache-2.0
"""Services on a real Slurm: a real model of ours, tunnels that die, full nodes, refusals, and ssh as it must be used."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from onnx import TensorProto, helper

pytest.register_assert_rewrite("driver_contract")

from driver_contract import command  # noqa: E402
from slurm_platform import Cluster  # noqa: E402

from headrace.core.errors import AlreadyExists, FailedPrecondition, Unavailable  # noqa: E402
from headrace.platforms.contract import Container, Handle, LaunchSpec, PlatformStatus  # noqa: E402
from headrace.platforms.slurm.batch_script import PORT_TAKEN, node_port  # noqa: E402
from headrace.platforms.slurm.driver import SlurmDriver  # noqa: E402
from support.ports import free_port  # noqa: E402
from support.waiting import eventually_async  # noqa: E402

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers")]


@pytest.fixture
def jobs() -> Iterator[Path]:
    """Short, for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="hr-jobs-") as folder:
        yield Path(folder)


def spec(gpus: int = 0, program: str = "serve", **given: Any) -> LaunchSpec:
    job_id = str(uuid.uuid4())
    port = node_port(job_id)
    box = Container("", command(program, (), port=port, python=sys.executable), port)
    return LaunchSpec(job_id, container=box, gpus=gpus, **given)


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None)
    return json.load(urllib.request.urlopen(request, timeout=60))


async def answer(driver: SlurmDriver, handle: Handle, path: str = "") -> Any:
    async def answer() -> Any:
        url = await driver.endpoint(handle)
        try:
            return await asyncio.to_thread(get, url + path) if url else None
        except (OSError, ValueError):
            return None

    return await eventually_async(answer, longest_pause=0.2)


async def ended(driver: SlurmDriver, handle: Handle) -> PlatformStatus:
    async def ended() -> Any:
        observed = await driver.status(handle)
        return observed if observed.phase == "ended" else None

    result: PlatformStatus = await eventually_async(ended, longest_pause=0.2)
    return result


def left_as(slurm: Cluster, jobs: Path, before: set[str]) -> None:
    """Nothing is left, as soon as Slurm has taken note of the last end."""
    limit = time.monotonic() + 120
    while (now := slurm.resources(jobs)) != before:
        assert time.monotonic() < limit, now ^ before
        time.sleep(0.1)


def model(folder: Path) -> Path:
    """A classifier that tells which colour a picture has most of."""
    folder.mkdir()
    mean = helper.make_node("ReduceMean", ["pixels"], ["scores"], axes=[2, 3], keepdims=0)
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, 32, 32])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph([mean], "colours", [pixels], [scores])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    return folder


def test_our_microservice_serves_a_real_model_through_a_tunnel(slurm: Cluster, jobs: Path, tmp_path: Path) -> None:
    import base64
    import io

    from PIL import Image

    job_id = str(uuid.uuid4())
    port = node_port(job_id)
    arguments = [str(Path(sys.executable).with_name("headrace")), "microservice", "--job"]
    arguments += [
        json.dumps({"job_id": job_id, "specs": {"model_path": str(model(tmp_path / "colours"))}}),
        "--port",
        str(port),
    ]
    arguments += ["--models-dir", str(tmp_path / "state"), "--docker_env_vars", "{}"]
    picture = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(picture, "PNG")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()

    async def main() -> None:
        driver = slurm.driver(jobs, ssh=True, memory="2G")
        wanted = LaunchSpec(job_id, container=Container("", "umask 0 && " + shlex.join(arguments), port), gpus=1)
        handle = await driver.start(wanted)
        assert await answer(driver, handle, "/api/v1/health/readiness")
        base = await driver.endpoint(handle)
        reported = await asyncio.to_thread(get, f"{base}/api/v1/inference", {"images": [url], "batch_size": 1})
        assert reported["results"]["response"] == ["red"] or reported["results"]["response"] == "red"
        shown = await driver.describe(handle)
        assert shown.data["slurm_node"] == socket.gethostname().split(".")[0]
        assert shown.data["platform_job_id"] == handle.data["platform_job_id"]
        assert base == f"http://127.0.0.1:{shown.data['host_port']}" and psutil.pid_exists(shown.data["tunnel_pid"])
        await driver.stop(handle, 10.0)
        await driver.close()

    before = slurm.resources(jobs)
    asyncio.run(main())
    left_as(slurm, jobs, before)


def test_a_tunnel_that_died_is_made_again_and_no_other_is_touched(slurm: Cluster, jobs: Path) -> None:
    async def main() -> None:
        driver, other = slurm.driver(jobs, ssh=True), slurm.driver(jobs, ssh=True, multiplex=False)
        port = free_port()
        one, two = await asyncio.gather(driver.start(spec(host_port=port)), other.start(spec()))
        await asyncio.gather(answer(driver, one), answer(other, two))
        assert await driver.endpoint(one) == f"http://127.0.0.1:{port}"
        first, kept = [(await driver.describe(item)).data["tunnel_pid"] for item in (one, two)]
        os.kill(first, signal.SIGKILL)
        assert (await answer(driver, one))["pid"]
        again = await driver.describe(one)
        assert again.data["tunnel_pid"] != first and again.data["host_port"] == port
        # Two that ask at once get one tunnel.
        os.kill(again.data["tunnel_pid"], signal.SIGKILL)
        urls = await asyncio.gather(driver.endpoint(one), other.endpoint(one), driver.endpoint(one))
        assert set(urls) == {f"http://127.0.0.1:{port}"}
        await driver.stop(one, 5.0)
        assert (await other.describe(two)).data["tunnel_pid"] == kept and (await answer(other, two))["pid"]
        await other.stop(two, 5.0)
        await driver.close()
        await other.close()

    before = slurm.resources(jobs)
    asyncio.run(main())
    left_as(slurm, jobs, before)

    def shared() -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if f"ControlPath={jobs}" in " ".join(process.info["cmdline"] or ())
        ]

    limit = time.monotonic() + 120
    while shared() and time.monotonic() < limit:
        time.sleep(0.1)
    assert not shared(), "the connection that commands shared ends with the driver"


def test_a_full_node_is_reported_and_a_manual_cancel_too(slurm: Cluster, jobs: Path) -> None:
    async def main() -> None:
        driver = slurm.driver(jobs)
        first = await driver.start(spec(gpus=4))
        result = await answer(driver, first)
        assert result["environ"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        waits = await driver.start(spec(gpus=1, secret_environment={"HF_TOKEN": "hf_waits"}))

        async def full() -> bool:
            observed = await driver.status(waits)
            assert observed.pod_phase == "Pending"
            return "no node has enough free GPUs" in observed.reason

        await eventually_async(full, longest_pause=0.2)
        assert await driver.endpoint(waits) is None and await driver.logs(waits, 10) == ""
        variables = jobs / "jobs" / waits.job_id / "env"
        assert variables.stat().st_mode & 0o777 == 0o600 and variables.parent.stat().st_mode & 0o777 == 0o700
        with pytest.raises(AlreadyExists):
            await driver.start(dataclasses.replace(spec(), job_id=waits.job_id))
        await asyncio.to_thread(slurm.tool, "scancel", waits.data["platform_job_id"])
        observed = await ended(driver, waits)
        assert (observed.pod_phase, observed.reason) == ("Failed", "the job was cancelled")
        assert not variables.exists(), "secrets that nobody will read any more are not kept"
        # By hand, one that runs; and one whose process is killed on its node.
        await asyncio.to_thread(slurm.tool, "scancel", first.data["platform_job_id"])
        assert (await ended(driver, first)).pod_phase == "Failed" and await driver.endpoint(first) is None
        killed = await driver.start(spec())
        os.kill((await answer(driver, killed))["pid"], signal.SIGKILL)
        observed = await ended(driver, killed)
        assert (observed.pod_phase, observed.exit_code) == ("Failed", 137) and "SIGKILL" in observed.reason
        for handle in (first, waits, killed):
            await driver.stop(handle, 1.0)
        await driver.close()

    before = slurm.resources(jobs)
    asyncio.run(main())
    left_as(slurm, jobs, before)


def test_a_service_whose_port_is_taken_is_not_confused_with_another(slurm: Cluster, jobs: Path) -> None:
    async def main() -> None:
        driver = slurm.driver(jobs)
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.listen()
            box = dataclasses.replace(spec().container or Container("", ""), port=stranger.getsockname()[1])
            handle = await driver.start(LaunchSpec(str(uuid.uuid4()), container=box))
            observed = await ended(driver, handle)
        assert observed.exit_code == PORT_TAKEN and "taken on its node" in observed.reason
        assert "is taken by another program" in await driver.logs(handle, 10)
        await driver.stop(handle, 1.0)

    asyncio.run(main())
    left_as(slurm, jobs, set())


def test_a_refusal_of_slurm_is_reported_and_leaves_nothing(slurm: Cluster, jobs: Path) -> None:
    async def refused(told: str, wanted: LaunchSpec, **given: Any) -> None:
        with pytest.raises(FailedPrecondition, match=told):
            await slurm.driver(jobs, **given).start(wanted)
        assert not slurm.resources(jobs)

    async def main() -> None:
        await refused("set SLURM_PARTITION", spec(), partition="")
        await refused("nvalid partition", spec(), partition="nowhere")
        await refused("configuration is not available", spec(gpus=64))
        await refused("configuration is not available", spec(), memory="900G")
        slurm.tool("scontrol", "update", "PartitionName=main", "State=DRAIN")
        try:
            await refused("not available|drain", spec())
        finally:
            slurm.tool("scontrol", "update", "PartitionName=main", "State=UP")
        checks = {check.name: check for check in await slurm.driver(jobs, partition="").preflight()}
        assert (
            not checks["partition"].passed
            and "SLURM_PARTITION is not set: the cluster has main" in checks["partition"].message
        )
        assert not {check.name: check for check in await slurm.driver(jobs, mode="pyxis").preflight()}["pyxis"].passed

    asyncio.run(main())


def test_ssh_trusts_no_stranger_and_another_login_node_is_tried(slurm: Cluster, jobs: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "known_hosts"
    port = (slurm.folder / "ssh_port").read_text().strip()
    kind, key = (slurm.folder / "client_key.pub").read_text().split()[:2]
    wrong.write_text(f"[127.0.0.1]:{port} {kind} {key}\n")

    async def main() -> None:
        for known in (str(wrong), "/dev/null"):
            driver = slurm.driver(jobs, ssh=True, known_hosts=known)
            assert [check.passed for check in await driver.preflight()] == [False]
            with pytest.raises(FailedPrecondition, match="host key"):
                await driver.start(spec())
        with pytest.raises(FailedPrecondition, match="refuses the login"):
            await slurm.driver(jobs, ssh=True, key_file=str(slurm.folder / "host_key")).list_services()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await slurm.driver(jobs, ssh=True, ssh_port=1).list_services()
        driver = slurm.driver(jobs, ssh=True, hosts=("no-such-host.invalid", "127.0.0.1"))
        assert all(check.passed for check in await driver.preflight())
        assert await driver.list_services() == {}
        await driver.close()

    asyncio.run(main())
    left_as(slurm, jobs, set())


def test_apptainer_is_given_the_image_and_the_command(slurm: Cluster, jobs: Path, tmp_path: Path) -> None:
    """With a stand-in for apptainer, which Debian has not: it notes its words, and runs what follows the image."""
    stand_in = tmp_path / "apptainer"
    lines = [
        "#!/bin/bash",
        f'printf "%s\\n" "$@" >{tmp_path}/words',
        'while [ "$1" != docker://an/image:1 ]; do shift; done',
        'exec "${@:2}"',
    ]
    stand_in.write_text("\n".join(lines) + "\n")
    stand_in.chmod(0o755)

    async def main() -> None:
        driver = slurm.driver(jobs, mode="apptainer", tools=str(tmp_path))
        plain = spec(environment={"A": "b $(c)"})
        box = dataclasses.replace(plain.container or Container("", ""), image="an/image:1")
        handle = await driver.start(dataclasses.replace(plain, container=box))
        assert (await answer(driver, handle))["environ"]["A"] == "b $(c)"
        assert (tmp_path / "words").read_text().splitlines()[:4] == [
            "exec",
            "--no-home",
            "--writable-tmpfs",
            "docker://an/image:1",
        ]
        await driver.stop(handle, 5.0)

    asyncio.run(main())
    left_as(slurm, jobs, set())
