# SPDX-License-Identifier: Apache-2.0
"""Backups of an organisation's records in a bucket, restored into the same and into another database."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from batch.bucket_stub import Bucket, bucket_stub
from jobs_tools import ExperimentSpec, JobSpec, opened, run, started, trained

from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from headrace.jobs.backups import FOLDER, BackupLocation, backup_location
from headrace.jobs.records import WorkspaceSpec


def details(bucket: Bucket) -> dict[str, str]:
    keys = {"access_key": "AK", "secret_key": "whispered", "endpoint_url": f"http://127.0.0.1:{bucket.port}"}
    return {**keys, "cloud_bucket_name": "bucket"}


def place(bucket: Bucket) -> BackupLocation:
    return backup_location("aws", details(bucket))


def test_deleted_rows_are_restored_and_existing_ones_stay(tmp_path: Path, database_url: str) -> None:
    async def main(bucket: Bucket) -> None:
        async with opened(tmp_path, url=database_url) as service:
            workspace, _ = await service.create_workspace("org", "u", WorkspaceSpec("w", "aws", details(bucket)))
            kept = await service.create_experiment("org", "u", ExperimentSpec("arch", "kept", workspace=workspace.id))
            parent = await trained(service, tmp_path)
            served = await started(service, parent)  # is not finished, so not in it
            reported = await service.backups.backup("org", await service.backup_location("org", workspace.id), "first")
            assert reported == {"backup_file_name": "first", "workspaces": 1, "experiments": 2, "jobs": 1}
            written = bucket.objects[f"{FOLDER}/first"]
            assert b"whispered" not in written and parent.id.encode() not in written
            await service.stop("org", "u", None, served.id)
            await service.delete_job("org", served.id)
            events = await service.job_events("org", parent.id)
            await service.delete_experiment("org", parent.experiment_id)
            reported = await service.backups.restore("org", place(bucket), "first")
            assert reported == {"backup_file_name": "first", "workspaces": 0, "experiments": 1, "jobs": 1}
            assert await service.get_job("org", parent.id) == parent
            assert await service.job_events("org", parent.id) == events
            assert await service.get_experiment("org", kept.id) == kept
            again = await service.backups.restore("org", place(bucket), "first")
            assert (again["workspaces"], again["experiments"], again["jobs"]) == (0, 0, 0)
            assert (await started(service, await service.get_job("org", parent.id))).status == "Running"

    with bucket_stub() as bucket:
        run(main(bucket))


def test_into_a_new_database_with_the_old_key_file_and_not_without(tmp_path: Path) -> None:
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other"

    async def back_up(bucket: Bucket) -> str:
        async with opened(old) as service:
            workspace, _ = await service.create_workspace("org", "u", WorkspaceSpec("w", "aws", details(bucket)))
            experiment = await service.create_experiment("org", "u", ExperimentSpec("arch", workspace=workspace.id))
            await service.create_job("org", "u", experiment.id, JobSpec("train"))
            return str((await service.backups.backup("org", place(bucket), ""))["backup_file_name"])

    async def restore(bucket: Bucket, name: str) -> None:
        (new / "data").mkdir(parents=True)
        shutil.copy(old / "data" / "jobs.key", new / "data" / "jobs.key")
        async with opened(new) as service:
            # The same configuration under another id: experiments then belong to the one that is there.
            there, _ = await service.create_workspace("org", "u", WorkspaceSpec("w", "aws", details(bucket)))
            reported = await service.backups.restore("org", await service.backup_location("org", there.id), name)
            assert (reported["workspaces"], reported["experiments"], reported["jobs"]) == (0, 1, 1)
            (experiment,) = await service.list_experiments("org")
            assert experiment.workspace == there.id
            with pytest.raises(FailedPrecondition, match="not a backup of this organisation"):
                await service.backups.restore("org2", place(bucket), name)
        async with opened(other) as service:
            with pytest.raises(FailedPrecondition, match="key file"):
                await service.backups.restore("org", place(bucket), name)
            assert await service.list_experiments("org") == []

    with bucket_stub() as bucket:
        name = run(back_up(bucket))
        assert name.startswith("org-") and name.endswith(".backup")
        run(restore(bucket, name))


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 256, "a\0"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    async def main(bucket: Bucket) -> None:
        async with opened(tmp_path) as service:
            with pytest.raises(InvalidArgument, match="backup_file_name"):
                await service.backups.restore("org", place(bucket), name)

    with bucket_stub() as bucket:
        run(main(bucket))


def test_conflicts_of_a_restore(tmp_path: Path) -> None:
    async def main(bucket: Bucket) -> None:
        async with opened(tmp_path) as service:
            with pytest.raises(NotFound):
                await service.backups.restore("org", place(bucket), "missing")
            bucket.objects[f"{FOLDER}/made-up"] = b'1:{"format": 1}'
            with pytest.raises(FailedPrecondition, match="not a backup"):
                await service.backups.restore("org", place(bucket), "made-up")
            bucket.closed = True
            with pytest.raises(PermissionDenied, match="may not be written"):
                await service.backups.backup("org", place(bucket), "closed")
            for kind in ("self_hosted", "huggingface"):
                with pytest.raises(InvalidArgument, match="has no bucket"):
                    backup_location(kind, {})

    with bucket_stub() as bucket:
        run(main(bucket))
