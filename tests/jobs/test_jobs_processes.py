# SPDX-License-Identifier: Apache-2.0
"""Job service and process driver together, with real processes: a real `headrace microservice`, gateways that are killed."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from jobs_tools import RANGE, run, settings_of, started
from onnx import TensorProto, helper
from PIL import Image

from headrace.jobs.records import Job
from headrace.jobs.service import JobService
from headrace.jobs.settings import JobSettings
from headrace.platforms.processes import read_stat
from support.waiting import eventually_async

HERE = str(Path(__file__).parent)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield tmp_path
    left = processes(tmp_path)
    for item in left:
        item.kill()
    assert left == []


def processes(folder: Path) -> list[psutil.Process]:
    """Everything that was started with a word of this folder, zombies apart.

    One whose words the kernel is about to give it is known by the folder that it was started in.
    """

    def describe_process(each: psutil.Process) -> str:
        return " ".join(each.info["cmdline"] or [each.info["cwd"] or ""])

    return [process for process in psutil.process_iter(["cmdline", "cwd"]) if str(folder) in describe_process(process)]


def onnx_classifier(folder: Path) -> Path:
    """The mean of each colour as the logit of its class."""
    folder.mkdir()
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["pixels"], ["scores"], axes=[2, 3], keepdims=0)],
        "test",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ("batch", 3, 16, 16))],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ("batch", 3))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    return folder


def picture() -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), (250, 3, 3), np.uint8)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("POST", path, json.dumps(body))
    response = connection.getresponse()
    received = response.status, json.loads(response.read())
    connection.close()
    return received


async def until_loaded(service: JobService, job: Job) -> dict[str, Any]:
    async def loaded() -> dict[str, Any] | None:
        body = dict((await service.status(job.org, job.experiment_id, job.id)).body)
        if body["initialization_error"] is not None or body["model_load_error"] is not None:
            raise RuntimeError(body)
        return body if body["model_loaded"] else None

    return dict(await eventually_async(loaded))


def leftovers(folder: Path) -> list[str]:
    """Files of services, beside locks."""
    data = folder / "data"
    results = [*(data / "launch").rglob("*"), *(data / "models").rglob("*")]
    return [str(result.relative_to(data)) for result in results if result.is_file() and not result.name.startswith(".")]


@pytest.mark.timeout(300)
def test_a_real_microservice(folder: Path) -> None:
    async def main() -> None:
        real = JobSettings(folder / "data", port_range=RANGE, callback_url="http://127.0.0.1:1")
        service = await JobService.open(real)
        experiment, parent = await service.register(
            "org", "u", str(onnx_classifier(folder / "m")), "classification_pyt"
        )
        job = await service.start(
            "org", "u", experiment.id, parent.id, {"docker_env_vars": {"WANDB_API_KEY": "w-secret-w"}}
        )
        body = await until_loaded(service, job)
        assert (body["status"], body["pod_status"], body["job_id"]) == ("healthy", "Running", job.id)
        (process,) = processes(folder)
        assert "w-secret-w" not in " ".join(process.cmdline()) and body["pod_name"].endswith(str(process.pid))
        result = await service.endpoint("org", experiment.id, job.id)
        assert result.url is not None
        code, told = await asyncio.to_thread(post, result.url, "/api/v1/inference", {"images": [picture()]})
        assert code == 200 and "red" in json.dumps(told["results"]), told
        assert "The model is ready" in await service.job_logs("org", job.id)
        assert (await service.stop("org", "u", experiment.id, job.id)).status == "Done"
        assert processes(folder) == [] and leftovers(folder) == []

        other = await started(service, parent)
        await until_loaded(service, other)
        (process,) = processes(folder)
        os.kill(process.pid, signal.SIGKILL)
        await eventually_async(lambda: (stat := read_stat(process.pid)) is None or not stat.is_alive)
        await service.reconcile()
        record = await service.get_job("org", other.id)
        assert record.status == "Error" and "SIGKILL" in record.reason and "The log ends" in record.reason
        assert leftovers(folder) == []
        await service.close()

    run(main())


@pytest.mark.slow  # quick: test_jobs_failing.py, tests/jobs/microservice/test_microservice_lifecycle.py
@pytest.mark.timeout(300)
def test_a_model_that_cannot_be_loaded_is_reported(folder: Path) -> None:
    async def main() -> None:
        service = await JobService.open(JobSettings(folder / "data", port_range=RANGE))
        (folder / "m").mkdir()
        (folder / "m" / "model.onnx").write_bytes(b"no model")
        _, parent = await service.register("org", "u", str(folder / "m"), "classification_pyt")
        job = await started(service, parent)

        async def is_loaded() -> bool:
            body = (await service.status("org", None, job.id)).body
            if body["model_loaded"] or body["initialization_error"] is not None:
                raise RuntimeError(body)
            return body["model_load_error"] is not None

        await eventually_async(is_loaded)
        await service.stop("org", "u", None, job.id)
        assert processes(folder) == [] and leftovers(folder) == []
        await service.close()

    run(main())


@pytest.mark.slow  # quick: test_jobs_services.py, with a platform in memory
def test_twenty_concurrent_services_leave_nothing(folder: Path, database_url: str) -> None:
    async def main() -> None:
        service = await JobService.open(settings_of(folder, database_url=database_url))
        _, parent = await service.register("org", "u", str(onnx_classifier(folder / "m")), "arch")
        jobs = await asyncio.gather(*(started(service, parent) for _ in range(20)))
        assert len(processes(folder)) == 20 and len({job.id for job in jobs}) == 20
        await asyncio.gather(*(until_loaded(service, job) for job in jobs[:10]))
        # Ten of them before they have come up.
        done = await asyncio.gather(*(service.stop("org", "u", None, job.id) for job in jobs))
        assert {job.status for job in done} == {"Done"}
        assert processes(folder) == [] and leftovers(folder) == []
        for port in range(*RANGE):
            with socket.socket() as sock:
                assert sock.connect_ex(("127.0.0.1", port)) != 0
        assert await service.counts() == {}
        for job in jobs:
            await service.delete_job("org", job.id)
        for table in ("leases", "job_logs"):
            assert await count(service, table) == 0
        assert await count(service, "events") == await count(service, "jobs") == 1  # of the trained model
        await service.close()

    run(main())


async def count(service: JobService, table: str) -> int:
    from sqlalchemy import text

    query = text(f"SELECT count(*) FROM {table}")
    return int(await service.store.database.read(lambda connection: connection.execute(query).scalar_one()))


GATEWAY = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from headrace.jobs.service import JobService
from headrace.platforms.process import ProcessDriver
from jobs_tools import settings_of

def die():
    print("died", flush=True)
    os.kill(os.getpid(), 9)

async def main():
    step, parent_id = sys.argv[2], sys.argv[3]
    service = await JobService.open(settings_of(Path(sys.argv[1])))
    driver = service.driver
    def dying(name, before):
        real = getattr(driver, name)
        async def call(*arguments):
            if before:
                die()
            await real(*arguments)
            die()
        setattr(driver, name, call)
    if step in ("before the launch", "after the launch"):
        dying("start", step.startswith("before"))
    job = await service.start("org", "u", None, parent_id, {})
    if step in ("before the stop", "after the stop"):
        dying("stop", step.startswith("before"))
        await service.stop("org", "u", None, job.id)
    die()
asyncio.run(main())
"""


@pytest.mark.slow  # quick: test_jobs_states.py, with a platform in memory
@pytest.mark.parametrize(
    ("step", "status"),
    [
        ("before the launch", "Error"),
        ("after the launch", "Running"),
        ("between", "Running"),
        ("before the stop", "Done"),
        ("after the stop", "Done"),
    ],
)
def test_a_gateway_killed_at_any_step(folder: Path, step: str, status: str) -> None:
    async def prepare() -> Job:
        service = await JobService.open(settings_of(folder))
        _, parent = await service.register("org", "u", str(onnx_classifier(folder / "m")), "arch")
        await service.close()
        return parent

    parent = run(prepare())
    arguments = [sys.executable, "-c", GATEWAY, str(folder), step, parent.id, HERE]
    env = os.environ | {"PYTHONPATH": f"{HERE}:{Path(HERE).parent}"}
    killed = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "died\n"), killed.stderr

    async def after() -> None:
        service = await JobService.open(settings_of(folder))
        await service.reconcile()
        (job,) = (await service.list_jobs("org", action="inference_microservice")).jobs
        assert job.status == status, job.reason
        if status == "Running":
            assert "adopted" in job.reason
            await until_loaded(service, job)
            await service.stop("org", "u", None, job.id)
        await service.reconcile()
        assert processes(folder) == [] and leftovers(folder) == [] and await count(service, "leases") == 0
        await service.close()

    run(after())


def test_services_without_a_record_are_stopped(folder: Path) -> None:
    async def main() -> None:
        service = await JobService.open(settings_of(folder))
        _, parent = await service.register("org", "u", str(onnx_classifier(folder / "m")), "arch")
        kept, lost = await started(service, parent), await started(service, parent)
        await service.store.jobs.delete(lost.id)
        await service.reconcile()
        assert len(processes(folder)) == 1
        await until_loaded(service, kept)
        await service.stop_all()
        assert processes(folder) == [] and leftovers(folder) == []
        await service.close()

    run(main())
