# SPDX-License-Identifier: Apache-2.0
"""Batches as records: turns, restarts, cancels, killed gateways. In memory; tests/jobs/gateway has real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from jobs_tools import FakeDriver, GatewayKilled, JobSpec, opened, run, started, trained

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.jobs.batch.output import parse_output
from headrace.jobs.batch.progress import ProgressFile, progress_file_path, write_progress_file
from headrace.jobs.batch.settings import BatchSettings, Shard
from headrace.jobs.batch_process import classify_exit, progress_path, read_progress
from headrace.jobs.records import Job
from headrace.jobs.service import JobService
from headrace.platforms.contract import Handle, PlatformStatus

SUMMARY = {
    "state": "finished",
    "reason": "",
    "output": "/r.jsonl",
    "total": 9,
    "succeeded": 8,
    "failed": 1,
    "seconds": 2.0,
}
FINISHED = "INFO loaded\n" + json.dumps(SUMMARY)
KILLED = PlatformStatus("ended", pod_phase="Failed", exit_code=-9, reason="the process was ended by SIGKILL")


class Platform(FakeDriver):
    """What ends here was killed, unless its log has a summary."""

    def __init__(self) -> None:
        super().__init__()
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        await self.may_stop.wait()
        await super().stop(handle, grace_seconds)

    async def status(self, handle: Handle) -> PlatformStatus:
        status = await super().status(handle)
        if status.phase != "ended":
            return status
        return PlatformStatus("ended", pod_phase="Succeeded") if "state" in self.ended[handle.job_id] else KILLED


async def settled(service: JobService) -> None:
    """One look, and what it began in the background."""
    await service.reconcile()
    await service.batches.close()


async def batch(service: JobService, parent: Job, output: str = "r.jsonl", **specs: Any) -> Job:
    wish = JobSpec("inference", parent.id, specs={"input": "items.jsonl", "output": output, **specs})
    job = await service.create_batch("org", "user", parent.experiment_id, wish)
    await service.batches.close()
    return await service.get_job("org", job.id)


def given(folder: Path) -> None:
    files = folder / "data/batches/org/files"
    files.mkdir(parents=True, exist_ok=True)
    (files / "items.jsonl").write_text("{}\n")


def test_turns_results_and_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver, max_batches=2) as service:
            parent = await trained(service, tmp_path)
            jobs = [await batch(service, parent, f"{number}.jsonl") for number in range(3)]
            assert [job.status for job in jobs] == ["Running", "Running", "Pending"]
            served = await started(service, parent)
            assert await service.counts() == {"Running": 1}  # of services
            driver.crash(jobs[0].id, FINISHED)
            await settled(service)
            first, _, third = [await service.get_job("org", job.id) for job in jobs]
            assert (first.status, third.status) == ("Done", "Running")
            assert first.reason == "9 items: 8 done, 1 failed; results: /r.jsonl"
            assert first.details["progress"] == {"done": 9, "failed": 1, "total": 9}
            assert set(driver.running) == {jobs[1].id, jobs[2].id, served.id} and not driver.ended
            assert '"state"' in await service.job_logs("org", first.id)

    run(main())


def test_user_text_is_not_on_the_command_line(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver) as service:
            parent = await trained(service, tmp_path)
            specs = {"parameters": {"prompt": "whisper"}, "limit": 5, "ordered": True, "shard": "2/4"}
            job = await batch(service, parent, "out-{shard}.jsonl", **specs)
            spec = driver.running[job.id]
        words = " ".join(spec.argv)
        assert not any(entry in words for entry in ("whisper", "items.jsonl", "out-", "trained"))
        for item in ("--limit 5", "--ordered", "--shard 2/4", "--credentials {file:credentials}", "--json"):
            assert item in words
        assert spec.secrets["input"] == str(tmp_path / "data/batches/org/files/items.jsonl")
        assert json.loads(spec.secrets["parameters"]) == {"prompt": "whisper"}
        assert spec.files == {"credentials": {}}

    run(main())


def test_a_killed_one_is_started_again_and_not_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver, batch_restarts=2) as service:
            job = await batch(service, await trained(service, tmp_path))
            for deaths in (1, 2):
                driver.crash(job.id)
                job = await service.refresh_job("org", job.id)
                assert (job.status, job.details["deaths"]) == ("Running", deaths) and job.id in driver.running
            driver.crash(job.id)
            await settled(service)
            job = await service.get_job("org", job.id)
            assert job.status == "Error" and "SIGKILL, 3 times" in job.reason
            assert not driver.running and not driver.ended

    run(main())


def test_cancel_at_every_point(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver, max_batches=1) as service:
            parent = await trained(service, tmp_path)
            running, waiting = await batch(service, parent), await batch(service, parent, "2.jsonl")
            assert (await service.cancel_job("org", "u", waiting.id)).status == "Canceled"
            write_progress_file(
                progress_path(running, service.settings), ProgressFile({}, 7, "cancelled", finished=3, failed=1)
            )
            assert (await service.cancel_job("org", "u", running.id)).status == "Canceling"
            await service.batches.close()
            running = await service.get_job("org", running.id)
            assert running.status == "Canceled" and "3 of 7 items are done and kept" in running.reason
            with pytest.raises(FailedPrecondition):
                await service.cancel_job("org", "u", running.id)
            late = await batch(service, parent, "3.jsonl")
            driver.crash(late.id, FINISHED)
            await service.cancel_job("org", "u", late.id)
            await service.batches.close()
            assert (await service.get_job("org", late.id)).status == "Done"  # it was, before anybody canceled it
            assert not driver.running and not driver.ended

    run(main())


def test_a_claimed_batch_is_cancelled_when_its_owner_releases_it(tmp_path: Path) -> None:
    """Not only when records are next held against what runs: it computes meanwhile, and may be done by then."""

    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver) as service:
            job = await batch(service, await trained(service, tmp_path))
            async with service.services.locks.hold(job.id):
                assert (await service.cancel_job("org", "u", job.id)).status == "Canceling"
                await asyncio.sleep(0.05)
                assert job.id in driver.running
            await service.batches.close()
            assert (await service.get_job("org", job.id)).status == "Canceled"
            assert not driver.running and not driver.ended

    run(main())


@pytest.mark.parametrize("where", ["start", "started"])
def test_a_gateway_killed_while_it_launches(tmp_path: Path, where: str) -> None:
    driver = Platform()

    async def first() -> str:
        given(tmp_path)
        async with opened(tmp_path, driver) as service:
            parent = await trained(service, tmp_path)
            wish = JobSpec("inference", parent.id, specs={"input": "items.jsonl", "output": "r.jsonl"})
            service.batches.wake = lambda: None  # type: ignore[method-assign]
            job = await service.create_batch("org", "u", parent.experiment_id, wish)
            driver.killed_at = where
            with pytest.raises(GatewayKilled):
                await service.batches.launch_waiting()
            return job.id

    async def second(job_id: str) -> None:
        async with opened(tmp_path, driver) as service:
            await settled(service)
            job = await service.get_job("org", job_id)
            assert job.status == "Running" and list(driver.running) == [job_id]
            assert ("adopted" in job.reason) == (where == "started")

    run(second(run(first())))


def test_batches_end_with_the_gateway_and_are_resumed_by_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver) as service:
            job = await batch(service, await trained(service, tmp_path))
            await service.stop_all()
            assert (await service.get_job("org", job.id)).status == "Paused" and not driver.running
        async with opened(tmp_path, driver) as service:
            await settled(service)
            assert (await service.get_job("org", job.id)).status == "Running" and job.id in driver.running
            received = [event.status for event in await service.job_events("org", job.id)]
            assert received == ["Pending", "Running", "Pausing", "Paused", "Resuming", "Running"]

    run(main())


def test_paused_by_a_user_waits_for_a_user(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver, max_batches=1) as service:
            parent = await trained(service, tmp_path)
            first, second = await batch(service, parent), await batch(service, parent, "2.jsonl")
            driver.may_stop.clear()
            assert (await service.pause_job("org", "u", first.id)).status == "Pausing"
            assert (await service.pause_job("org", "u", first.id)).status == "Pausing"  # again does nothing
            with pytest.raises(FailedPrecondition, match="being paused"):
                await service.resume_job("org", "u", first.id)
            driver.may_stop.set()
            await service.batches.close()
            result = await service.get_job("org", first.id)
            assert (result.status, result.reason) == ("Paused", "continues when a user resumes it")
            assert list(driver.running) == [second.id]  # there was room for it
        async with opened(tmp_path, driver, max_batches=1) as service:
            driver.crash(second.id, FINISHED)
            await settled(service)
            assert (await service.get_job("org", first.id)).status == "Paused" and not driver.running
            with pytest.raises(InvalidArgument, match="continues with its own specs"):
                await service.resume_job("org", "u", first.id, specs={"input": "others.jsonl"})
            assert (await service.resume_job("org", "u", first.id, specs=first.specs)).status == "Resuming"
            await service.batches.close()
            assert (await service.get_job("org", first.id)).status == "Running" and first.id in driver.running
            with pytest.raises(FailedPrecondition, match="is Running: only a Paused job can be resumed"):
                await service.resume_job("org", "u", first.id)
            received = [event.status for event in await service.job_events("org", first.id)]
            assert received == ["Pending", "Running", "Pausing", "Paused", "Resuming", "Running"]

    run(main())


def test_pause_at_every_other_point(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver, max_batches=1) as service:
            parent = await trained(service, tmp_path)
            running, pending = await batch(service, parent), await batch(service, parent, "2.jsonl")
            assert (await service.pause_job("org", "u", pending.id)).status == "Paused"
            # Resumed, but it is not its turn; then paused again, and again resumed.
            assert (await service.resume_job("org", "u", pending.id)).status == "Resuming"
            await service.batches.close()
            assert (await service.pause_job("org", "u", pending.id)).status == "Pausing"
            await service.batches.close()
            assert (await service.get_job("org", pending.id)).status == "Paused"
            assert (await service.cancel_job("org", "u", pending.id)).status == "Canceled"
            with pytest.raises(FailedPrecondition, match="is Canceled: there is nothing left to pause"):
                await service.pause_job("org", "u", pending.id)
            # A gateway that is ended has its batches paused too: those go on by themselves unless a user holds them.
            await service.stop_all()
            assert (await service.pause_job("org", "u", running.id)).status == "Paused"
            await settled(service)
            assert (await service.get_job("org", running.id)).status == "Paused" and not driver.running
            served = await started(service, parent)
            for job in (served, parent):
                for verb in (service.pause_job, service.resume_job, service.retry_job):
                    with pytest.raises(FailedPrecondition, match="cannot be"):
                        await verb("org", "u", job.id)

    run(main())


def test_a_gateway_killed_while_it_pauses(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver) as service:
            job = await batch(service, await trained(service, tmp_path))
            service.batches._pause_and_wake = lambda job_id: asyncio.sleep(0)  # type: ignore[method-assign]
            assert (await service.pause_job("org", "u", job.id)).status == "Pausing"
        async with opened(tmp_path, driver) as service:
            await settled(service)
            assert (await service.get_job("org", job.id)).status == "Paused" and not driver.running
            await settled(service)
            assert (await service.get_job("org", job.id)).status == "Paused"

    run(main())


def test_a_failed_one_is_retried_as_a_new_job_with_the_same_output(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        async with opened(tmp_path, driver) as service:
            parent = await trained(service, tmp_path)
            job = await batch(service, parent, limit=3)
            with pytest.raises(FailedPrecondition, match="is Running: cancel it first"):
                await service.retry_job("org", "u", job.id)
            await service.cancel_job("org", "u", job.id)
            await service.batches.close()
            new = await service.retry_job("org", "other", job.id)
            await service.batches.close()
            new = await service.get_job("org", new.id)
            assert new.id != job.id and new.status == "Running" and new.user_id == "other"
            assert (new.specs, new.parent_id, new.details["output"]) == (job.specs, parent.id, job.details["output"])
            assert (await service.get_job("org", job.id)).status == "Canceled"
            driver.crash(new.id, FINISHED)
            await settled(service)
            with pytest.raises(FailedPrecondition, match="it has finished"):
                await service.retry_job("org", "u", new.id)

    run(main())


def test_a_launch_that_fails_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        given(tmp_path)
        driver = Platform()
        driver.fail_start = FailedPrecondition("no room")
        async with opened(tmp_path, driver) as service:
            job = await batch(service, await trained(service, tmp_path))
            assert (job.status, job.reason) == ("Error", "could not be launched: no room")
            wish = JobSpec("inference", specs={"input": "items.jsonl", "output": "r.jsonl"})
            (tmp_path / "data/batches/org/files/own.parquet").write_bytes(b"somebody's own")
            with pytest.raises(InvalidArgument, match=r"specs\.output exists and was not written by a batch"):
                await batch(service, await trained(service, tmp_path), "own.parquet")
            with pytest.raises(InvalidArgument, match="model_path is required"):
                await service.create_batch("org", "u", job.experiment_id, wish)

    run(main())


@pytest.mark.parametrize(
    ("code", "log", "status", "reason"),
    [
        (0, FINISHED, "Done", "8 done"),
        (3, FINISHED, "Done", "1 failed"),
        (None, FINISHED, "Done", "9 items"),
        (-9, FINISHED, "", "ended"),
        (1, FINISHED.replace("finished", "failed").replace('"reason": ""', '"reason": "full"'), "Error", "full"),
        (2, "x\nerror: no such model", "Error", "no such model"),
        (1, "Traceback\nboom", "Error", "Traceback | boom"),
        (None, "loading", "", "ended"),
        (143, FINISHED.replace("finished", "cancelled"), "", "ended"),
        (None, '{"state": "finished"}', "", "ended"),
    ],
)
def test_the_meaning_of_exit_codes(code: int | None, log: str, status: str, reason: str) -> None:
    verdict = classify_exit(PlatformStatus("ended", exit_code=code, reason="it has ended"), log)
    assert verdict.status == status and reason in verdict.reason


@pytest.mark.parametrize("output", ["/o/r.jsonl", "/o/r.parquet", "/o/r-{shard}.jsonl", "s3://bucket/a/r.jsonl"])
def test_progress_is_read_where_the_batch_writes_it(
    tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.jobs.batch.output._store", lambda place, settings: None)
    monkeypatch.setattr("headrace.jobs.batch.sources.pyarrow_for", lambda what: None)

    async def main() -> None:
        given(tmp_path)
        async with opened(tmp_path, Platform()) as service:
            job = await batch(service, await trained(service, tmp_path), shard="2/4")
            job = job._replace(details_json=json.dumps({**job.details, "output": output}))
            folder = service.settings.batch_cache("org")
            settings = BatchSettings("m", "i", output, shard=Shard(2, 4), folder=folder)
            assert progress_path(job, service.settings) == progress_file_path(parse_output(settings).results)

    run(main())


def test_progress_is_read_from_what_the_batch_wrote(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.job.json"
    assert read_progress(path) is None
    write_progress_file(path, ProgressFile({}, 7, finished=3, failed=1))
    assert read_progress(path) == {"done": 3, "failed": 1, "total": 7}
    write_progress_file(path, ProgressFile({}, 7, "finished", finished=7))
    assert read_progress(path) is None  # of an earlier job with the same output
    path.write_text("half")
    assert read_progress(path) is None
