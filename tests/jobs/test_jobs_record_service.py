# SPDX-License-Identifier: Apache-2.0
"""Workspaces, experiments and records of jobs, on both databases; hostile texts in every field; long lists."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jobs_tools import FakeDriver, model_file, opened, run, started, trained
from sqlalchemy import insert, text
from store_stub import ACCESS, SECRET, StoreStub

from headrace.api.access.users import User, UserKey
from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unimplemented,
)
from headrace.jobs.records import ExperimentSpec, JobSpec, WorkspaceSpec
from headrace.jobs.secrets import Vault
from headrace.jobs.service import JobService
from headrace.jobs.store.database import jobs
from headrace.jobs.store.store import Store


def aws(store: StoreStub, bucket: str = "bkt", **more: str) -> WorkspaceSpec:
    details = {
        "access_key": ACCESS,
        "secret_key": SECRET,
        "cloud_region": "us-west-1",
        "endpoint_url": store.url(""),
        "cloud_bucket_name": bucket,
    }
    return WorkspaceSpec("mine", "aws", details | more)


def test_a_workspace(tmp_path: Path, database_url: str) -> None:
    async def main(store: StoreStub) -> None:
        async with opened(tmp_path, url=database_url) as service:
            workspace, new = await service.create_workspace("org", "u", aws(store))
            assert new and (workspace.bucket, workspace.cloud_type, workspace.version) == ("bkt", "aws", "1.0.0")
            assert (await service.create_workspace("org", "u2", aws(store))) == (workspace, False)
            other, new = await service.create_workspace("org2", "u", aws(store))
            assert new and other.id != workspace.id
            with pytest.raises(InvalidArgument, match="^Provided cloud credentials are invalid") as refused:
                await service.create_workspace("org", "u", aws(store, secret_key="wrong-secret-1"))
            assert "wrong-secret-1" not in str(refused.value)
            with pytest.raises(NotFound):
                await service.get_workspace("org", other.id)
            changed = await service.update_workspace("org", workspace.id, WorkspaceSpec(name="new"))
            assert changed.name == "new" and (await service.list_workspaces("org")) == [changed]
            with pytest.raises(InvalidArgument):
                await service.update_workspace("org", workspace.id, aws(store, access_key="other"))
            experiment = await service.create_experiment("org", "u", ExperimentSpec("arch", workspace=workspace.id))
            with pytest.raises(FailedPrecondition):
                await service.delete_workspace("org", workspace.id)
            await service.delete_experiment("org", experiment.id)
            await service.delete_workspace("org", workspace.id)
            with pytest.raises(NotFound):
                await service.get_workspace("org", workspace.id)
            rows = await service.store.database.read(
                lambda connection: repr(connection.execute(text("SELECT * FROM workspaces")).all())
            )
            assert SECRET not in rows and ACCESS not in rows and other.id in rows

    with StoreStub({"bkt": {}}) as store:
        run(main(store))


def test_a_checkpoint_in_the_workspaces_bucket(tmp_path: Path) -> None:
    driver, trained_elsewhere = FakeDriver(), str(uuid.uuid4())

    async def main(store: StoreStub) -> None:
        async with opened(tmp_path, driver) as service:
            workspace, _ = await service.create_workspace("org", "u", aws(store))
            wish = ExperimentSpec(
                "classification_pyt", workspace=workspace.id, details={"checkpoint_choose_method": "latest_model"}
            )
            experiment = await service.create_experiment("org", "u", wish)
            parent = await service.create_job("org", "u", experiment.id, JobSpec("train", id=trained_elsewhere))
            assert parent.status == "Done" and parent.id == trained_elsewhere
            job = await started(service, parent)
            spec = driver.running[job.id]
            document = json.loads(spec.secrets["job"])
            assert document["specs"]["model_path"] == f"aws://bkt/results/{parent.id}/m_002.pth"
            assert document["specs"]["results_dir"] == f"aws://bkt/results/{job.id}"
            assert document["cloud_metadata"]["aws"]["bkt"]["secret_key"] == SECRET
            assert SECRET not in repr(spec) and SECRET not in " ".join(spec.argv)
            empty = await service.create_job("org", "u", experiment.id, JobSpec("train"))
            with pytest.raises(InvalidArgument, match="No model path"):
                await started(service, empty)
            with pytest.raises(AlreadyExists):
                await service.create_job("org", "u", experiment.id, JobSpec("train", id=trained_elsewhere))

    objects = {f"results/{trained_elsewhere}/m_{number:03}.pth": b"x" for number in range(3)}
    with StoreStub({"bkt": objects}) as store:
        run(main(store))


@pytest.mark.parametrize(
    ("kind", "details", "text"),
    [
        ("ftp", {}, "cloud_type"),
        ("aws", {"access_key": "a"}, "needs secret_key"),
        ("azure", {"access_key": "a"}, "needs account_name"),
        ("slurm", {}, "needs slurm_user"),
        ("aws", {"access_key": "a", "secret_key": "b", "cloud_bucket_name": "../x"}, "bucket"),
        ("aws", {"access_key": "a", "secret_key": "b", "cloud_bucket_name": "b/c"}, "bucket"),
        (
            "aws",
            {"access_key": "a", "secret_key": "b", "cloud_bucket_name": "b", "endpoint_url": "ftp://x"},
            "endpoint_url",
        ),
        ("aws", {"access_key": ["a"], "secret_key": "b", "cloud_bucket_name": "b"}, "access_key"),
        ("aws", {"access_key": "a\0", "secret_key": "b"}, "NUL"),
    ],
)
def test_a_workspace_that_cannot_be(tmp_path: Path, kind: str, details: dict[str, Any], text: str) -> None:
    async def main() -> None:
        async with opened(tmp_path) as service:
            with pytest.raises(InvalidArgument, match=text):
                await service.create_workspace("org", "u", WorkspaceSpec("n", kind, details))
            assert await service.list_workspaces("org") == []

    run(main())


def test_jobs_and_their_list(tmp_path: Path, database_url: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, url=database_url) as service:
            experiment, first = await service.register("org", "u", str(model_file(tmp_path)), "arch", name="n")
            assert (first.status, first.action, first.checkpoint) == ("Done", "train", str(tmp_path / "trained"))
            assert first.experiment_id == experiment.id and first.network_arch == "arch"
            with pytest.raises(PermissionDenied):
                await service.create_job("org", "u", experiment.id, JobSpec("train", checkpoint=str(tmp_path)))
            for wish, kind in (
                (JobSpec("train"), InvalidArgument),
                (JobSpec(""), InvalidArgument),
                (JobSpec("inference_microservice"), InvalidArgument),
                (JobSpec("evaluate"), Unimplemented),
                (JobSpec("train", checkpoint="s3://b/k", num_gpu=10**9), InvalidArgument),
                (JobSpec("train", checkpoint="s3://b/k", parent_id=str(uuid.uuid4())), NotFound),
            ):
                with pytest.raises(kind):
                    await service.create_job("org", "u", experiment.id, wish)
            with pytest.raises(InvalidArgument, match="no model"):
                await service.register("org", "u", str(tmp_path / "nowhere"), "arch")
            work = await service.create_job("org", "u", experiment.id, JobSpec("inference", specs={"a": [1, None]}))
            assert work.status == "Pending" and work.specs == {"a": [1, None]}
            running = await service.set_job_status(
                work.id, "Running", "begun", actor="runner", details={"progress": 0.5}
            )
            assert running.details["progress"] == 0.5
            with pytest.raises(FailedPrecondition):
                await service.delete_job("org", work.id)
            assert (await service.cancel_job("org", "u", work.id)).status == "Canceling"
            await service.set_job_status(work.id, "Canceled", "gave up", actor="runner")
            with pytest.raises(FailedPrecondition):
                await service.set_job_status(work.id, "Running", "again", actor="runner")
            with pytest.raises(FailedPrecondition):
                await service.cancel_job("org", "u", work.id)
            page = await service.list_jobs("org", experiment.id, size=1)
            assert (len(page.jobs), page.total) == (1, 2)
            assert (await service.list_jobs("org", skip=1)).total == 2
            assert [job.id for job in (await service.list_jobs("org", status="Done")).jobs] == [first.id]
            await service.delete_experiment("org", experiment.id)
            assert (await service.list_jobs("org")).total == 0

    run(main())


def test_an_experiment_with_a_running_service_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as service:
            job = await started(service, await trained(service, tmp_path))
            with pytest.raises(FailedPrecondition):
                await service.delete_experiment("org", job.experiment_id)
            with pytest.raises(FailedPrecondition):
                await service.delete_job("org", job.id)
            await service.cancel_job("org", "u", job.id)
            await service.delete_experiment("org", job.experiment_id)

    run(main())


def test_ten_thousand_jobs_are_listed_quickly(tmp_path: Path, database_url: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, url=database_url) as service:
            job = await trained(service, tmp_path)
            names = [column.name for column in jobs.columns]
            rows = [
                dict(zip(names, job._replace(id=str(uuid.uuid4()), created_on=float(number)), strict=True))
                for number in range(10_000)
            ]
            await service.store.database.write(lambda connection: connection.execute(insert(jobs), rows).rowcount)
            for _ in range(2):  # again from what is remembered
                page = await service.list_jobs("org")
                assert page.total == len(page.jobs) == 10_001
            part = await service.list_jobs("org", skip=5000, size=100)
            assert part.total == 10_001 and part.jobs == page.jobs[5000:5100]

    run(main())


def test_a_list_is_the_same_until_something_of_it_changes_wherever_it_was_changed(
    tmp_path: Path, database_url: str
) -> None:
    async def main() -> None:
        async with opened(tmp_path, url=database_url) as service, opened(tmp_path, url=database_url) as other:
            job = await trained(service, tmp_path)
            first = await service.list_jobs("org")
            assert await service.list_jobs("org") is first
            assert (await service.list_jobs("org", status="Running")).jobs == []
            work = await other.create_job("org", "u", job.experiment_id, JobSpec("inference"))
            second = await service.list_jobs("org")
            assert {job.id for job in second.jobs} == {job.id, work.id} and first.total == 1
            await other.set_job_status(work.id, "Running", "begun", actor="runner")
            third = await service.list_jobs("org")
            assert {job.id: job.status for job in third.jobs} == {job.id: "Done", work.id: "Running"}
            assert [job.id for job in (await service.list_jobs("org", status="Running")).jobs] == [work.id]
            await other.set_job_status(work.id, "Error", "broken", actor="runner")
            await other.delete_job("org", work.id)
            assert (await service.list_jobs("org")).jobs == first.jobs
            # One that was made again under the same id, and is as old in versions, is another one.
            await other.delete_job("org", job.id)
            row = dict(
                zip([column.name for column in jobs.columns], job._replace(created_on=5.0, name="new"), strict=True)
            )
            await other.store.database.write(lambda connection: connection.execute(insert(jobs), [row]).rowcount)
            assert [job.name for job in (await service.list_jobs("org")).jobs] == ["new"]
            for number in range(6):  # more lists than are remembered
                assert (await service.list_jobs("org", action=f"of another kind {number}")).total == 0
            assert (await service.list_jobs("org")).total == 1

    run(main())


HOSTILE = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        ["\0", "\ud800", "'; DROP TABLE jobs; --", "%s", "../../x", "\r\nX: y", "x" * 5000, "\u202e", "{secret:job}"]
    ),
)
ANYTHING = st.one_of(HOSTILE, st.none(), st.integers(), st.floats(), st.lists(HOSTILE, max_size=2))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(HOSTILE, min_size=8, max_size=8), things=st.lists(ANYTHING, min_size=6, max_size=6))
def test_hostile_texts_are_kept_as_they_are_or_refused(hostile: Any, texts: list[str], things: list[Any]) -> None:
    loop, service, parent = hostile
    # Texts of the program itself are among those that are drawn, and this organisation is the one whose all of it is.
    assume(texts[0] != "org")

    async def tried(work: Any) -> Any:
        try:
            return await work
        except HeadraceError as error:
            error.message.encode()  # can be told
            return None

    async def main() -> None:
        name, more = texts[0], texts[1]
        created = await tried(
            service.create_experiment("org", "u", ExperimentSpec("arch", name, more, details={texts[2]: things[0]}))
        )
        if created is not None:
            result = await service.get_experiment("org", created.id)
            assert (result.name, result.description) == (name, more)
            assert json.dumps(result.details) == json.dumps({texts[2]: things[0]})
        wish = JobSpec(
            "train", name=name, description=more, specs={texts[3]: things[1]}, checkpoint=f"hf_model://{texts[4]}"
        )
        job = await tried(service.create_job("org", "u", parent.experiment_id, wish))
        assert job is None or await service.get_job("org", job.id) == job
        await tried(service.create_job("org", "u", parent.experiment_id, JobSpec(texts[5], parent_id=texts[6])))
        await tried(service.create_workspace("org", "u", WorkspaceSpec(name, "self_hosted", {texts[2]: things[2]})))
        await tried(service.create_workspace("org", "u", WorkspaceSpec(name, more, {}, version=texts[7])))
        await tried(service.create_experiment(texts[5], "u", ExperimentSpec(more)))
        extra = {
            texts[3]: things[3],
            "model_path": things[4],
            "docker_env_vars": {texts[2]: texts[3], "HF_TOKEN": things[5]},
        }
        job = await tried(service.start("org", "u", parent.experiment_id, parent.id, extra))
        if job is not None:
            await service.stop("org", "u", None, job.id)
        for org, wanted in ((texts[0], parent.id), ("org", texts[1])):
            for call in (
                service.get_job(org, wanted),
                service.endpoint(org, None, wanted),
                service.list_jobs(org, wanted),
            ):
                assert await tried(call) is None
        assert await tried(service.list_jobs("org", status=texts[2], action=texts[3])) is None or True
        assert (await service.get_job("org", parent.id)) == parent

    loop.run_until_complete(main())


@pytest.fixture
def hostile(tmp_path: Path, database_url: str) -> Any:
    import asyncio

    loop = asyncio.new_event_loop()
    context = opened(tmp_path, url=database_url)
    service: JobService = loop.run_until_complete(context.__aenter__())
    yield loop, service, loop.run_until_complete(trained(service, tmp_path))
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize(
    "bad", ["", "x", "{6f1c1c5e-5d5b-4d1e-8a4e-000000000000}", "6f1c1c5e5d5b4d1e8a4e000000000000", "\0"]
)
def test_ids_that_are_none(tmp_path: Path, bad: str) -> None:
    async def main() -> None:
        async with opened(tmp_path) as service:
            with pytest.raises(InvalidArgument, match="^Job ID passed is not a valid UUID$"):
                await service.get_job("org", bad)
            with pytest.raises(InvalidArgument, match="^Experiment ID passed is not a valid UUID$"):
                await service.get_experiment("org", bad)

    run(main())


def test_users_are_kept_whole(tmp_path: Path, database_url: str) -> None:
    async def main() -> None:
        store = await Store.open(database_url)
        rows = store.users
        key = UserKey("k1", "abcdefghijkl", "$argon2id$x", 1.5, None)
        user = User("id1", "ann", 1.25, {"org": "operator", "*": "viewer"}, (key,), "a@b", 2.000001, 0)
        await rows.insert_user(user)
        assert await rows.access_changes() == 1
        assert await rows.find_user(name="ann") == await rows.find_user(lookup="abcdefghijkl") == user
        with pytest.raises(AlreadyExists):
            await rows.insert_user(User("id2", "ann", 1.0, {}))
        more = User("id1", "ann", 1.25, {"org": "admin"}, (UserKey("k2", "other", "h", 2.0, 3.0), key), "", 3.5, 0)
        assert await rows.update_user(more) and not await rows.update_user(more)
        result = await rows.find_user(id="id1")
        assert (
            result is not None and result.version == 1 and result.keys == more.keys and result.roles == {"org": "admin"}
        )
        await rows.insert_user(User("id0", "abe", 1.0, {"org": "viewer", "second": "viewer"}))
        assert [list_user.name for list_user in await rows.list_users()] == ["abe", "ann"]
        assert [list_user.name for list_user in await rows.list_users("second")] == ["abe"]
        assert [organisation.name for organisation in await store.organisations()] == ["org", "second"]
        assert await rows.delete_user("id1") and not await rows.delete_user("id1")
        assert await rows.find_user(lookup="other") is None
        now = time.time()
        for _ in range(2):
            await rows.revoke_token("jti", now + 60)
        assert await rows.access_changes() == 7  # two inserts, an update, two deletes, two tokens
        assert await rows.is_token_revoked("jti") and not await rows.is_token_revoked("other")
        await store.close()

    run(main())


def test_the_database_is_opened_again_and_a_newer_one_refused(tmp_path: Path, database_url: str) -> None:
    async def main() -> None:
        for _ in range(2):
            await (await Store.open(database_url)).close()
        store = await Store.open(database_url)
        await store.database.write(
            lambda connection: connection.execute(text("INSERT INTO schema_steps VALUES (999, 0)")).rowcount
        )
        await store.close()
        with pytest.raises(FailedPrecondition, match="newer headrace"):
            await Store.open(database_url)

    run(main())


@pytest.mark.parametrize("url", ["mysql://u:pw-secret@h/x", "://", "postgresql://u:pw-secret@127.0.0.1:1/x"])
def test_a_database_that_cannot_be_opened(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(HeadraceError) as refused:
        run(Store.open(url))
    assert "pw-secret" not in refused.value.message + caplog.text


def test_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "jobs.key"
    vault = Vault.open(path)
    sealed = vault.encrypt({"a": "value-to-hide"}, "row 1")
    assert "value-to-hide" not in sealed and sealed != vault.encrypt({"a": "value-to-hide"}, "row 1")
    assert Vault.open(path).decrypt(sealed, "row 1") == {"a": "value-to-hide"}
    assert vault.encrypt({}, "x") == "" and vault.decrypt("", "x") == {}
    for text_, about in ((sealed, "row 2"), (sealed[:-4] + "AAAA", "row 1"), ("1:x", "row 1")):
        with pytest.raises(FailedPrecondition, match="key file"):
            vault.decrypt(text_, about)
    assert vault.callback_key("a") != vault.callback_key("b")
    path.chmod(0o644)
    with pytest.raises(FailedPrecondition, match="chmod 600"):
        Vault.open(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(FailedPrecondition):
        Vault.open(path)
