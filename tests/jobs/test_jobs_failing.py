# SPDX-License-Identifier: Apache-2.0
"""A service that failed says so at every moment; and what NVIDIA's clients ask for beyond the rest.

That is a start with a workspace of its own, experiments that change, and jobs that take their experiment along.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs_tools import ExperimentSpec, FakeDriver, JobSpec, opened, run, started, trained
from store_stub import StoreStub

from headrace.core.errors import InvalidArgument, NotFound
from headrace.jobs.records import ExperimentChange, WorkspaceSpec
from headrace.jobs.service import JobService
from headrace.jobs.service_status import FinalState
from headrace.jobs.services import STOPPED

FAILED = FinalState("Error", "Model failed to load: no such operator", {"model_load_error": "no such operator"})
NOBODY = "99999999-9999-4999-8999-999999999999"


def test_a_failed_service_states_the_reason_while_it_is_stopped(tmp_path: Path, database_url: str) -> None:
    async def work() -> None:
        async with opened(tmp_path, url=database_url) as service:
            job = await started(service, await trained(service, tmp_path))
            ids = job.org, job.experiment_id, job.id
            for status in ("Canceling", "Error"):
                if status == "Canceling":
                    await service.services.request_stop(job.id, FAILED, "the service")
                else:
                    await service.services.finish_stop(job.id)
                assert (await service.get_job(job.org, job.id)).status == status
                body = (await service.status(*ids)).body
                assert (body["status"], body["model_load_error"]) == ("error", "no such operator")
                assert body["initialization_error"] is None and body["server_initializing"] is False
                result = await service.endpoint(*ids)
                assert (result.url, result.state, result.error) == (None, "failed", FAILED.reason)
            await service.stop(job.org, "user", job.experiment_id, job.id)
            for ask in (service.status, service.endpoint):
                with pytest.raises(NotFound):
                    await ask(*ids)

    run(work())


def test_one_that_a_user_stops_is_not_there_while_it_is_ended(tmp_path: Path, database_url: str) -> None:
    async def work() -> None:
        async with opened(tmp_path, url=database_url) as service:
            job = await started(service, await trained(service, tmp_path))
            await service.services.request_stop(job.id, STOPPED, "user")
            with pytest.raises(NotFound):
                await service.endpoint(job.org, job.experiment_id, job.id)

    run(work())


def test_a_start_may_name_its_own_workspace(tmp_path: Path, database_url: str) -> None:
    """As v2's clients do: there is no experiment that has one."""

    async def work(store: StoreStub) -> None:
        driver = FakeDriver()
        async with opened(tmp_path, driver, url=database_url) as service:
            details = {"cloud_bucket_name": "b", **store.metadata("b")["aws"]["b"]}
            wish = WorkspaceSpec("w", "aws", details)
            workspace, _ = await service.create_workspace("org", "user", wish)
            path = {"model_path": "aws://b/models/m", "network_arch": "classification_pyt"}
            with pytest.raises(InvalidArgument):
                await service.start("org", "user", None, None, path)
            with pytest.raises(NotFound):
                await service.start("org", "user", None, None, {**path, "workspace": NOBODY})
            with pytest.raises(NotFound):
                await service.start("other", "user", None, None, {**path, "workspace": workspace.id})
            job = await service.start("org", "user", None, None, {**path, "workspace": workspace.id})
            assert (await service.get_experiment("org", job.id)).workspace == workspace.id
            assert '"b"' in driver.running[job.id].secrets["job"]
            # Which checkpoint is told with the start, too.
            parent = await trained_in(service, workspace.id)
            claims = {"workspace": workspace.id, "checkpoint_choose_method": "from_epoch_number"}
            numbers = {f"from_epoch_number_{parent}": 2}
            job = await service.start("org", "user", None, parent, {**claims, "checkpoint_epoch_number": numbers})
            assert "model_epoch_002.pth" in driver.running[job.id].secrets["job"]

    async def trained_in(service: JobService, workspace: str) -> str:
        experiment = await service.create_experiment(
            "org", "user", ExperimentSpec("classification_pyt", workspace=workspace)
        )
        wish = JobSpec("train", checkpoint="aws://b/results")
        return str((await service.create_job("org", "user", experiment.id, wish)).id)

    results = {f"results/model_epoch_{number:03}.pth": b"x" for number in (1, 2, 3)}
    with StoreStub({"b": {"models/m/model.onnx": b"x", **results}}) as store:
        run(work(store))


def test_experiments_are_changed_and_deleted_with_their_only_job(tmp_path: Path, database_url: str) -> None:
    async def work() -> None:
        async with opened(tmp_path, url=database_url) as service:
            created = await service.create_experiment(
                "org", "user", ExperimentSpec("x", "old", details={"tags": ["a"]})
            )
            change = ExperimentChange("new", details={"checkpoint_choose_method": "latest_model", "tags": None})
            changed = await service.update_experiment("org", created.id, change)
            assert (changed.name, changed.details) == ("new", {"checkpoint_choose_method": "latest_model"})
            assert await service.get_experiment("org", created.id) == changed
            with pytest.raises(NotFound):
                await service.update_experiment("other", created.id, change)
            with pytest.raises(NotFound):
                await service.update_experiment("org", created.id, ExperimentChange(workspace=NOBODY))
            parent = await trained(service, tmp_path)
            job = await service.start("org", "user", None, parent.id, {})
            await service.stop("org", "user", None, job.id)
            assert job.experiment_id == job.id
            await service.delete_job("org", job.id)
            with pytest.raises(NotFound):
                await service.get_experiment("org", job.id)
            await service.delete_job("org", parent.id)
            await service.get_experiment("org", parent.experiment_id)  # a user's own stays

    run(work())


def test_a_workspace_needs_a_bucket_that_is_there(tmp_path: Path) -> None:
    async def work(store: StoreStub) -> None:
        async with opened(tmp_path) as service:
            details = {"cloud_bucket_name": "none", **store.metadata("b")["aws"]["b"]}
            with pytest.raises(InvalidArgument, match="there is no bucket none"):
                await service.create_workspace("org", "user", WorkspaceSpec("w", "aws", details))

    with StoreStub({"b": {}}) as store:
        run(work(store))
