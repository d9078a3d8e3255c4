# SPDX-License-Identifier: Apache-2.0
"""Starting, asking and stopping services, on both databases; what is wrong, and what other organisations see."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from jobs_tools import FakeDriver, JobSpec, model_file, opened, run, started, trained

from headrace.core.clock import ManualClock
from headrace.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from headrace.jobs.records import ExperimentSpec
from support.waiting import eventually_async


def test_a_service_from_start_to_stop(tmp_path: Path, database_url: str) -> None:
    driver = FakeDriver()

    async def ask(url: str, seconds: float) -> dict[str, Any]:
        (job_id,) = driver.running
        return {"job_id": job_id, "status": "healthy", "model_loaded": True, "server_initializing": False, "extra": 1}

    async def main() -> None:
        async with opened(tmp_path, driver, url=database_url, fetch_status=ask) as service:
            parent = await trained(service, tmp_path)
            job = await started(service, parent, torch_dtype="float16", num_gpus=2)
            assert (job.status, job.action, job.parent_id, job.num_gpu) == (
                "Running",
                "inference_microservice",
                parent.id,
                2,
            )
            assert job.specs == {"torch_dtype": "float16", "num_gpus": 2}
            spec = driver.running[job.id]
            document = json.loads(spec.secrets["job"])
            assert document["job_id"] == job.id and document["neural_network_name"] == "classification_pyt"
            assert (
                document["specs"]["model_path"] == str(tmp_path / "trained")
                and document["specs"]["torch_dtype"] == "float16"
            )
            assert "cloud_metadata" not in document and job.id in spec.argv

            status = await service.status("org", job.experiment_id, job.id)
            assert status.body["model_loaded"] is True and status.body["extra"] == 1
            assert status.body["initialization_error"] is None and status.body["model_load_error"] is None
            assert (status.body["pod_status"], status.body["status"]) == ("Running", "healthy")
            result = await service.endpoint("org", job.experiment_id, job.id)
            assert (result.url, result.state) == ("http://127.0.0.1:9", "running")
            assert service.cached_endpoint("org", None, job.id) is result
            assert service.cached_endpoint("other", None, job.id) is None
            assert await service.counts() == {"Running": 1}

            done = await service.stop("org", "user", job.experiment_id, job.id)
            assert done.status == "Done" and done.stopped_on is not None and not driver.running
            for late in (
                service.stop("org", "user", job.experiment_id, job.id),
                service.status("org", job.experiment_id, job.id),
                service.endpoint("org", job.experiment_id, job.id),
            ):
                with pytest.raises(NotFound):
                    await late
            events = await service.job_events("org", job.id)
            assert [event.status for event in events] == ["Pending", "Running", "Canceling", "Done"]
            assert all(event.reason for event in events) and events[2].by == "user"
            assert await service.job_logs("org", job.id) == "alive"
            assert (await service.get_job("org", job.id)).status == "Done"

    run(main())


def test_before_it_answers_a_service_is_initializing(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as service:
            job = await started(service, await trained(service, tmp_path))
            body = (await service.status("org", job.experiment_id, job.id)).body
            assert (body["server_initializing"], body["model_loaded"], body["pod_status"]) == (True, False, "Running")
            assert {"pod_name", "progress", "idle_time_minutes", "model_state", "job_id"} <= body.keys()

    run(main())


def test_another_organisation_sees_nothing(tmp_path: Path, database_url: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, url=database_url) as service:
            parent = await trained(service, tmp_path)
            job = await started(service, parent)
            experiment, stranger = job.experiment_id, "other"
            await service.endpoint("org", experiment, job.id)
            for call in (
                service.get_experiment(stranger, experiment),
                service.delete_experiment(stranger, experiment),
                service.get_job(stranger, job.id),
                service.delete_job(stranger, parent.id),
                service.cancel_job(stranger, "u", job.id),
                service.job_logs(stranger, job.id),
                service.job_events(stranger, job.id),
                service.list_jobs(stranger, experiment),
                service.status(stranger, experiment, job.id),
                service.endpoint(stranger, experiment, job.id),
                service.endpoint(stranger, None, job.id),
                service.stop(stranger, "u", experiment, job.id),
                service.start(stranger, "u", experiment, parent.id, {}),
                service.create_job(stranger, "u", experiment, JobSpec("train", checkpoint="hf_model://a/b")),
                service.create_experiment(stranger, "u", ExperimentSpec("x", workspace=str(uuid.uuid4()))),
            ):
                with pytest.raises(NotFound):
                    await call
            with pytest.raises(InvalidArgument, match=f"parent job {parent.id} not found"):
                await service.start(stranger, "u", None, parent.id, {})
            with pytest.raises(NotFound):
                await service.status("org", str(uuid.uuid4()), job.id)
            assert (await service.list_jobs(stranger)).total == 0 and await service.list_experiments(stranger) == []
            assert await service.counts() == {"Running": 1}

    run(main())


def test_what_cannot_be_started(tmp_path: Path) -> None:
    driver = FakeDriver()

    async def main() -> None:
        async with opened(tmp_path, driver, max_services=1) as service:
            parent = await trained(service, tmp_path)
            experiment = parent.experiment_id

            async def refused(kind: type[Exception], text: str, parent_id: Any = parent.id, **extra: Any) -> None:
                with pytest.raises(kind, match=text):
                    await service.start("org", "u", experiment, parent_id, extra)

            await refused(InvalidArgument, "not a valid UUID", parent_id="nope")
            await refused(InvalidArgument, "parent_id is required", parent_id=None)
            await refused(InvalidArgument, "not found", parent_id=str(uuid.uuid4()))
            pending = await service.create_job("org", "u", experiment, JobSpec("inference"))
            await refused(InvalidArgument, r"not in 'Done' state \(current status: Pending\)", parent_id=pending.id)
            await refused(PermissionDenied, "ask the operator to register it", model_path="/etc/passwd")
            await refused(PermissionDenied, "ask the operator to register it", model_path=f"file://{tmp_path}")
            await refused(PermissionDenied, "ask the operator to register it", base_model_path=str(tmp_path))
            await refused(PermissionDenied, "ask the operator to register it", parameters={"adapters": f"a={tmp_path}"})
            await refused(PermissionDenied, "ask the operator to register it", parameters={"deep": ["../../x"]})
            await refused(PermissionDenied, "trust_remote_code", parameters={"trust_remote_code": "true"})
            await refused(InvalidArgument, "no credentials", model_path="s3://bucket/key")
            await refused(InvalidArgument, "scheme", model_path="ftp://x/y")
            await refused(InvalidArgument, "Invalid network arch", network_arch="a b")
            await refused(InvalidArgument, "num_gpus", num_gpus="many")
            await refused(InvalidArgument, "idle_timeout_minutes", idle_timeout_minutes=-1)
            await refused(InvalidArgument, "TAO_ADMIN_KEY", docker_env_vars={"TAO_ADMIN_KEY": "x"})
            await refused(InvalidArgument, "LD_PRELOAD", docker_env_vars={"LD_PRELOAD": "x"})
            await refused(InvalidArgument, "HF_TOKEN", docker_env_vars={"HF_TOKEN": "x" * 501})
            for file in (tmp_path / "trained").iterdir():
                file.unlink()
            await refused(InvalidArgument, "No model path")
            model_file(tmp_path, "notes.txt")
            await refused(InvalidArgument, "No model path")
            with pytest.raises(NotFound, match="Experiment"):
                await service.start("org", "u", str(uuid.uuid4()), parent.id, {})
            assert not driver.running and (await service.list_jobs("org", action="inference_microservice")).total == 0

            model_file(tmp_path)
            driver.fail_start = FailedPrecondition("no room")
            await refused(FailedPrecondition, "no room")
            (failed,) = (await service.list_jobs("org", action="inference_microservice")).jobs
            assert failed.status == "Error" and "no room" in failed.reason
            driver.fail_start = None
            await started(service, parent)
            await refused(ResourceExhausted, "1 services run already")

    run(main())


def test_models_that_need_no_parent(tmp_path: Path) -> None:
    driver = FakeDriver()

    async def main() -> None:
        folder = model_file(tmp_path)
        async with opened(tmp_path, driver, checkpoint_folders=(tmp_path,)) as service:
            for extra, path in (
                ({"hf_model": "org/model"}, "hf_model://org/model"),
                ({"model_path": "org/model"}, "hf_model://org/model"),
                ({"model_path": "hf://org/model@v1"}, "hf_model://org/model@v1"),
                ({"hf_model": "hf://org/model"}, "hf_model://org/model"),
                ({"model_path": str(folder), "network_arch": "cosmos-rl"}, str(folder)),
            ):
                job = await service.start("org", "u", None, None, extra)
                assert job.experiment_id == job.id  # as the v2 API has it
                assert json.loads(driver.running[job.id].secrets["job"])["specs"]["model_path"] == path
                await service.stop("org", "u", None, job.id)
            with pytest.raises(PermissionDenied):
                await service.start("org", "u", None, None, {"model_path": f"{folder}/../../../etc"})

    run(main())


def test_secrets_are_in_no_record_and_on_no_command_line(tmp_path: Path) -> None:
    driver = FakeDriver()
    secret = "hf_verysecretvalue"

    async def main() -> None:
        async with opened(tmp_path, driver, callback_url="http://127.0.0.1:1") as service:
            wish = ExperimentSpec("cosmos-rl", docker_env_vars={"HF_TOKEN": secret, "WANDB_PROJECT": "p"})
            experiment = await service.create_experiment("org", "u", wish)
            job = await service.start(
                "org", "u", experiment.id, None, {"hf_model": "a/b", "docker_env_vars": {"JOB_ID": 3}}
            )
            spec = driver.running[job.id]
            document = json.loads(spec.secrets["docker_env_vars"])
            assert document["HF_TOKEN"] == secret and document["JOB_ID"] == "3" and document["TAO_API_JOB_ID"] == job.id
            assert document["TAO_LOGGING_SERVER_URL"].endswith(
                f"/api/v1/orgs/org/experiments/{experiment.id}/jobs/{job.id}"
            )
            shown = repr((spec, spec.argv, job, experiment, await service.get_experiment("org", experiment.id)))
            assert secret not in shown and document["TAO_ADMIN_KEY"] not in shown
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or secret.encode() not in file.read_bytes(), file
            assert file.stat().st_mode & 0o077 == 0 or not file.is_file(), file

    run(main())


def test_stops_at_the_same_time_all_succeed(tmp_path: Path, database_url: str) -> None:
    driver = FakeDriver()

    async def main() -> None:
        async with opened(tmp_path, driver, url=database_url) as service:
            parent = await trained(service, tmp_path)
            jobs = await asyncio.gather(*(started(service, parent) for _ in range(20)))
            assert len(driver.running) == 20
            calls = [service.stop("org", "u", job.experiment_id, job.id) for job in jobs for _ in range(2)]
            done = await asyncio.gather(*calls, return_exceptions=True)
            # The second of each comes in time and waits, or comes too late and is told so.
            assert all(isinstance(item, NotFound) or item.status == "Done" for item in done)
            assert sum(not isinstance(item, NotFound) for item in done) >= 20
            assert not driver.running and await service.counts() == {} and await leases(service) == 0

    run(main())


async def leases(service: Any) -> int:
    from sqlalchemy import text

    return int(
        await service.store.database.read(
            lambda connection: connection.execute(text("SELECT count(*) FROM leases")).scalar()
        )
    )


def test_a_dead_service_states_the_reason_and_can_be_deleted(tmp_path: Path, database_url: str) -> None:
    driver = FakeDriver()

    async def main() -> None:
        async with opened(tmp_path, driver, url=database_url) as service:
            parent = await trained(service, tmp_path)
            job = await started(service, parent)
            other = await started(service, parent)
            driver.crash(job.id, "first\nCUDA out of memory")
            driver.crash(other.id, "died too")
            body = (await service.status("org", None, job.id)).body
            assert (body["status"], body["pod_status"], body["model_loaded"]) == ("error", "Failed", False)
            assert (
                "it fell over" in body["initialization_error"] and "CUDA out of memory" in body["initialization_error"]
            )
            result = await service.endpoint("org", None, other.id)
            assert (result.state, result.url) == ("failed", None) and "died too" in result.error
            assert not driver.ended and await service.job_logs("org", job.id, tail=1) == "CUDA out of memory"
            assert (await service.get_job("org", job.id)).status == "Error"
            assert (await service.stop("org", "u", None, job.id)).status == "Error"
            with pytest.raises(NotFound):
                await service.status("org", None, job.id)
            await service.delete_job("org", job.id)
            with pytest.raises(NotFound):
                await service.get_job("org", job.id)

    run(main())


def update(reason: str, **more: Any) -> dict[str, Any]:
    document = {"status": "AUTO_DELETION_REQUESTED", "message": "AUTO_DELETION_REQUESTED", "reason": reason, **more}
    return {"experiment_number": "0", "status": json.dumps(document)}


def test_an_idle_service_requests_its_stop(tmp_path: Path) -> None:
    driver = FakeDriver()

    async def main() -> None:
        async with opened(tmp_path, driver, callback_url="http://127.0.0.1:1") as service:
            parent = await trained(service, tmp_path)
            jobs = [await started(service, parent) for _ in range(4)]
            keys = [json.loads(driver.running[job.id].secrets["docker_env_vars"])["TAO_ADMIN_KEY"] for job in jobs]

            async def send_status(number: int, payload: dict[str, Any], key: str = "") -> bool:
                job = jobs[number]
                return await service.status_update("org", job.experiment_id, job.id, payload, key=key or keys[number])

            for wrong in ("x", keys[1], "ключ"):
                with pytest.raises(Unauthenticated):
                    await send_status(0, update("idle_timeout_exceeded"), wrong)
            with pytest.raises(NotFound):
                await service.status_update("other", jobs[0].experiment_id, jobs[0].id, {}, key=keys[0])
            assert await send_status(0, {"status": "RUNNING"}) is False
            assert await send_status(0, {"status": '{"status": "SUCCESS"}'}) is False
            for bad in (update("because"), {"status": "{"}):
                with pytest.raises(InvalidArgument):
                    await send_status(0, bad)
            assert len(driver.running) == 4

            assert await send_status(0, update("idle_timeout_exceeded", idle_timeout_minutes=30.0))
            assert await send_status(1, update("initialization_failed", error="no network\0"))
            assert await send_status(2, update("model_loading_failed", error="CUDA out of memory"))
            await service.services.close()
            assert list(driver.running) == [jobs[3].id]
            records = [await service.get_job("org", job.id) for job in jobs]
            assert [record.status for record in records] == ["Done", "Error", "Error", "Running"]
            assert "30 minutes" in records[0].reason
            with pytest.raises(NotFound):
                await service.status("org", None, jobs[0].id)
            assert (await service.status("org", None, jobs[1].id)).body["initialization_error"] == "no network?"
            assert (await service.status("org", None, jobs[2].id)).body["model_load_error"] == "CUDA out of memory"
            assert (await service.endpoint("org", None, jobs[2].id)).error == "Model failed to load: CUDA out of memory"
            assert await send_status(1, update("idle_timeout_exceeded")) is False

    run(main())


def test_two_gateways_on_one_database(tmp_path: Path, database_url: str) -> None:
    driver, clock = FakeDriver(), ManualClock()

    async def main() -> None:
        async with (
            opened(tmp_path, driver, url=database_url, clock=clock) as one,
            opened(tmp_path, driver, url=database_url, clock=clock) as two,
        ):
            job = await started(one, await trained(two, tmp_path))
            assert (await two.status("org", None, job.id)).job.status == "Running"
            await asyncio.gather(*(item.reconcile() for item in (one, two) for _ in range(3)))
            assert [job_event.status for job_event in await one.job_events("org", job.id)] == ["Pending", "Running"]
            async with one.services.locks.hold(job.id):
                driver.crash(job.id)
                await two.reconcile()  # one is at it
                assert (await two.get_job("org", job.id)).status == "Running"
            await asyncio.gather(one.reconcile(), two.reconcile())
            events = await one.job_events("org", job.id)
            assert [event.status for event in events] == ["Pending", "Running", "Error"]

    run(asyncio.wait_for(main(), 60))


def test_a_service_of_another_machine_is_stopped_by_its_own_gateway(tmp_path: Path, database_url: str) -> None:
    here, there = FakeDriver(), FakeDriver()
    there.place = "fake:elsewhere"

    async def main() -> None:
        async with opened(tmp_path, here, url=database_url) as one, opened(tmp_path, there, url=database_url) as two:
            job = await started(one, await trained(one, tmp_path))
            await two.reconcile()
            assert (await one.get_job("org", job.id)).status == "Running"
            stopping = asyncio.create_task(two.stop("org", "u", None, job.id))

            async def is_canceling() -> bool:
                return (await one.get_job("org", job.id)).status == "Canceling"

            await eventually_async(is_canceling)
            await one.reconcile()
            assert (await stopping).status == "Done" and not here.running

    run(asyncio.wait_for(main(), 60))


def test_stop_all(tmp_path: Path) -> None:
    driver = FakeDriver()

    async def main() -> None:
        async with opened(tmp_path, driver) as service:
            parent = await trained(service, tmp_path)
            for _ in range(5):
                await started(service, parent)
            await service.stop_all()
            assert not driver.running and await service.counts() == {}

    run(main())


def test_a_caller_that_leaves_does_not_leave_it_half_done(tmp_path: Path) -> None:
    driver = FakeDriver()

    async def main() -> None:
        async with opened(tmp_path, driver) as service:
            job = await started(service, await trained(service, tmp_path))
            stopping = asyncio.create_task(service.stop("org", "u", None, job.id))

            async def is_stopping() -> bool:
                return (await service.get_job("org", job.id)).status != "Running"

            await eventually_async(is_stopping)
            stopping.cancel()
            await service.services.close()
            assert (await service.get_job("org", job.id)).status == "Done" and not driver.running

    run(main())
