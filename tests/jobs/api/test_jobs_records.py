# SPDX-License-Identifier: Apache-2.0
"""Workspaces, experiments and jobs over HTTP, with a real database behind them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_api import Api, JobAnswer, job_api
from sqlalchemy import select

from headrace.jobs.records import JobSpec
from headrace.jobs.store.database import jobs

V1, V2 = "/api/v1/orgs/acme", "/api/v2/orgs/acme"
NOBODY = "99999999-9999-4999-8999-999999999999"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(None, tmp_path_factory.mktemp("records")) as made:
        yield made


@pytest.fixture(scope="module")
def token(api: Api) -> str:
    return api.login("alice")


def checked_json(got: JobAnswer, status: int = 200) -> Any:
    assert got.status == status, got.body
    return got.json


def experiment(api: Api, token: str, **more: Any) -> str:
    created = checked_json(
        api.ask("POST", f"{V1}/experiments", {"network_arch": "classification", "name": "e", **more}, token)
    )
    return str(created["id"])


def trained(api: Api, folder: Path, experiment_id: str = "") -> tuple[str, str]:
    """A registered model: ids of its experiment and its job."""
    model = folder / "model.onnx"
    model.write_bytes(b"not looked at here")
    answer = api.server.call(api.jobs.register, "acme", "op", str(model), "classification", "", "m")
    return answer[0].id, answer[1].id


def test_a_workspace_from_its_birth_to_its_end_never_shows_its_keys(api: Api, token: str) -> None:
    wish = {"name": "w", "cloud_type": "self_hosted", "cloud_specific_details": {"secret_key": "very-secret-thing"}}
    got = api.ask("POST", f"{V1}/workspaces", wish, token)
    created = checked_json(got)
    assert created.keys() == {"id", "user_id", "created_on", "last_modified", "name", "shared", "version", "cloud_type"}
    assert created["created_on"].endswith("Z")
    path = f"{V1}/workspaces/{created['id']}"
    assert checked_json(api.ask("GET", path, token=token)) == created
    assert checked_json(api.ask("PATCH", path, {"name": "other"}, token))["name"] == "other"
    assert checked_json(api.ask("PUT", path, {"name": "third"}, token))["name"] == "third"
    listed = checked_json(api.ask("GET", f"{V1}/workspaces?name=third", token=token))
    assert [workspace["id"] for workspace in listed["workspaces"]] == [created["id"]]
    assert listed["pagination_info"]["total_records"] == 1
    everything = [api.ask("GET", f"{V1}/workspaces", token=token).body, got.body]
    assert checked_json(api.ask("DELETE", path, token=token))["id"] == created["id"]
    assert api.ask("GET", path, token=token).status == 404
    assert b"very-secret-thing" not in b"".join(everything)


def test_the_same_workspace_again_is_the_one_there_was(api: Api, token: str) -> None:
    wish = {"name": "same", "cloud_type": "self_hosted", "cloud_specific_details": {"a": "b"}}
    first = checked_json(api.ask("POST", f"{V2}/workspaces", wish, token), 201)
    again = checked_json(api.ask("POST", f"{V2}/workspaces", wish, token), 200)
    assert (again["id"], again["_duplicate"]) == (first["id"], True)


def test_experiments(api: Api, token: str) -> None:
    created = checked_json(
        api.ask("POST", f"{V1}/experiments", {"network_arch": "cosmos-rl", "name": "x", "tags": ["a"]}, token)
    )
    assert (created["network_arch"], created["tags"], created["workspace"]) == ("cosmos-rl", ["a"], None)
    path = f"{V1}/experiments/{created['id']}"
    assert checked_json(api.ask("GET", path, token=token))["id"] == created["id"]
    listed = checked_json(api.ask("GET", f"{V1}/experiments?skip=0&size=1", token=token))
    assert len(listed["experiments"]) == 1
    assert checked_json(api.ask("DELETE", path, token=token))["id"] == created["id"]
    assert api.ask("GET", path, token=token).status == 404
    got = api.ask("POST", f"{V1}/experiments", {"network_arch": "cosmos-rl", "workspace": NOBODY}, token)
    assert got.status == 404, got.body


def test_a_registered_model_is_a_job_that_is_done(api: Api, token: str, tmp_path: Path) -> None:
    experiment_id, job_id = trained(api, tmp_path)
    path = f"{V1}/experiments/{experiment_id}/jobs"
    result = checked_json(api.ask("GET", f"{path}/{job_id}", token=token))
    assert (result["id"], result["action"], result["status"], result["experiment_id"]) == (
        job_id,
        "train",
        "Done",
        experiment_id,
    )
    assert {"parent_id", "job_details", "specs", "num_gpu", "backend_details", "created_on"} <= result.keys()
    assert [job["id"] for job in checked_json(api.ask("GET", path, token=token))["jobs"]] == [job_id]
    assert checked_json(api.ask("GET", f"{V2}/jobs/{job_id}", token=token))["kind"] == "experiment"
    events = checked_json(api.ask("GET", f"{path}/{job_id}:events", token=token))["events"]
    assert events[-1]["status"] == "Done"
    got = api.ask("GET", f"{path}/{job_id}/logs?tail=5", token=token)
    assert (got.status, got.fields["content-type"]) == (200, "text/plain; charset=utf-8")
    assert api.ask("GET", f"{V2}/jobs/{job_id}:logs", token=token).status == 200
    assert api.ask("POST", f"{path}/{job_id}:cancel", token=token).status == 409
    assert checked_json(api.ask("DELETE", f"{path}/{job_id}", token=token))["id"] == job_id
    assert api.ask("GET", f"{path}/{job_id}", token=token).status == 404


def test_v1_answers_with_the_bare_id_of_a_new_job(api: Api, token: str) -> None:
    experiment_id = experiment(api, token)
    wish = {"action": "train", "checkpoint": "hf_model://org/model", "name": "n"}
    created = checked_json(api.ask("POST", f"{V1}/experiments/{experiment_id}/jobs", wish, token))
    assert str(uuid.UUID(created)) == created
    v2 = {"kind": "experiment", "network_arch": "cosmos-rl", "name": "n", "encryption_key": "k", **wish}
    assert checked_json(api.ask("POST", f"{V2}/jobs", v2, token), 201)["status"] == "Done"


def test_bodies_need_no_content_type_and_may_have_a_wrong_one(api: Api, token: str) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        got = api.ask("POST", f"{V1}/experiments", {"network_arch": "x"}, token, {"Content-Type": kind})
        assert got.status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("POST", "/experiments", b"{", 400, "not JSON"),
        ("POST", "/experiments", b"[1]", 400, "JSON object"),
        ("POST", "/experiments", {}, 400, "network_arch"),
        ("POST", "/experiments", {"network_arch": 1}, 400, "network_arch must be a string"),
        ("POST", "/experiments", {"network_arch": "a\0b"}, 400, "NUL"),
        (
            "POST",
            "/experiments",
            {"network_arch": "x", "workspace": "w"},
            400,
            "Workspace ID passed is not a valid UUID",
        ),
        ("POST", "/workspaces", {"name": "n"}, 400, "cloud_type"),
        ("POST", "/workspaces", {"cloud_type": "moon"}, 400, "unknown cloud_type"),
        ("POST", "/workspaces", {"cloud_type": "aws", "cloud_specific_details": []}, 400, "JSON object"),
        ("GET", "/workspaces/x", None, 400, "Workspace ID passed is not a valid UUID"),
        ("GET", "/experiments/x", None, 400, "Experiment ID passed is not a valid UUID"),
        ("GET", f"/experiments/{NOBODY}", None, 404, NOBODY),
        ("GET", f"/experiments/{NOBODY}/jobs", None, 404, NOBODY),
        ("GET", f"/experiments/{NOBODY}/jobs/x", None, 400, "Job ID passed is not a valid UUID"),
        ("GET", f"/experiments/{NOBODY}/jobs/{NOBODY}", None, 404, NOBODY),
        ("GET", f"/experiments/{NOBODY}/jobs?size=-1", None, 400, "size"),
        ("POST", f"/experiments/{NOBODY}/jobs", {}, 400, "action"),
        ("POST", f"/experiments/{NOBODY}/jobs", {"action": "train", "num_gpu": True}, 400, "num_gpu"),
        ("POST", f"/experiments/{NOBODY}/inference_microservice/start", {}, 400, "parent_id"),
        ("POST", f"/experiments/{NOBODY}/inference_microservice/start", {"parent_id": "x"}, 400, "not a valid UUID"),
        ("POST", f"/experiments/{NOBODY}/inference_microservice/start", {"parent_id": NOBODY}, 404, NOBODY),
        ("GET", f"/experiments/{NOBODY}/jobs/{NOBODY}/inference_microservice/status", None, 404, NOBODY),
        ("POST", f"/experiments/{NOBODY}/jobs/{NOBODY}/inference_microservice/stop", None, 404, NOBODY),
    ],
)
def test_invalid_input_is_reported(
    api: Api, token: str, method: str, path: str, body: Any, status: int, text: str
) -> None:
    got = api.ask(method, V1 + path, body, token)
    assert (got.status, got.json["error_code"]) == (status, 1), got.body
    assert text in got.json["error_desc"]


def test_a_service_needs_a_parent_that_is_done(api: Api, token: str) -> None:
    experiment_id = experiment(api, token)
    start = f"{V1}/experiments/{experiment_id}/inference_microservice/start"
    for name in ("parent_id", "parent_job_id"):
        got = api.ask("POST", start, {name: NOBODY}, token)
        assert got.status == 400, got.body
        assert f"parent job {NOBODY} not found" in got.json["error_desc"]
    pending = api.server.call(api.jobs.create_job, "acme", "op", experiment_id, JobSpec("inference")).id
    got = api.ask("POST", start, {"parent_id": pending}, token)
    assert got.status == 400
    assert "is not in 'Done' state (current status: Pending)" in got.json["error_desc"]


def test_objects_of_another_organisation_are_hidden(api: Api, token: str, tmp_path: Path) -> None:
    experiment_id, job_id = trained(api, tmp_path)
    bob = api.login("bob", "other")
    theirs = "/api/v1/orgs/other"
    for method, path in (
        ("GET", f"/experiments/{experiment_id}"),
        ("DELETE", f"/experiments/{experiment_id}"),
        ("GET", f"/experiments/{experiment_id}/jobs"),
        ("GET", f"/experiments/{experiment_id}/jobs/{job_id}"),
        ("DELETE", f"/experiments/{experiment_id}/jobs/{job_id}"),
        ("POST", f"/experiments/{experiment_id}/jobs/{job_id}:cancel"),
        ("GET", f"/experiments/{experiment_id}/jobs/{job_id}/logs"),
        ("POST", f"/experiments/{experiment_id}/jobs/{job_id}/inference_microservice/inference"),
    ):
        assert api.ask(method, theirs + path, {"a": 1} if method == "POST" else None, bob).status == 404, path
        assert api.ask(method, V1 + path, {"a": 1} if method == "POST" else None, bob).status == 404, path
    mine = checked_json(api.ask("POST", f"{theirs}/experiments", {"network_arch": "x"}, bob))["id"]
    got = api.ask("POST", f"{theirs}/experiments/{mine}/inference_microservice/start", {"parent_id": job_id}, bob)
    assert got.status == 400
    assert "not found" in got.json["error_desc"]
    assert api.ask("GET", f"{V1}/experiments/{experiment_id}", token=token).status == 200


def test_a_viewer_reads_and_changes_nothing(api: Api) -> None:
    victor = api.login("victor")
    assert api.ask("GET", f"{V1}/experiments", token=victor).status == 200
    got = api.ask("POST", f"{V1}/experiments", {"network_arch": "x"}, victor)
    assert (got.status, got.json["error_code"]) == (403, 2)


def test_changes_and_denials_are_in_the_audit_log(api: Api, token: str) -> None:
    created = experiment(api, token)
    api.ask("DELETE", f"{V1}/experiments/{NOBODY}", token=token)
    api.ask("POST", f"{V1}/experiments", {"network_arch": "x"}, api.login("victor"))
    text = (api.folder / "audit.jsonl").read_text()
    lines = {(line["operation"], line["target"], line["outcome"]) for line in map(json.loads, text.splitlines())}
    assert ("experiments.write", created, "allowed") in lines
    assert ("experiments.write", NOBODY, "failed") in lines
    assert ("experiments.write", "", "denied") in lines
    assert not [line for line in lines if line[0].endswith(".read") and line[2] == "allowed"]
    assert token not in text


def test_ten_thousand_jobs_are_listed_whole_and_in_parts(api: Api) -> None:
    bob = api.login("bob", "other")

    created = checked_json(api.ask("POST", "/api/v1/orgs/other/experiments", {"network_arch": "x"}, bob))["id"]
    one = checked_json(
        api.ask(
            "POST",
            f"/api/v1/orgs/other/experiments/{created}/jobs",
            {"action": "train", "checkpoint": "hf_model://a/b"},
            bob,
        )
    )

    async def fill() -> None:
        database = api.jobs.store.database
        result = select(jobs).where(jobs.c.id == one)
        row = await database.read(lambda connection: dict(connection.execute(result).mappings().one()))
        rows = [{**row, "id": str(uuid.UUID(int=number + 1)), "created_on": float(number)} for number in range(10_000)]
        await database.write(lambda connection: connection.execute(jobs.insert(), rows))

    api.server.call(fill)
    got = api.ask("GET", f"/api/v1/orgs/other/experiments/{created}/jobs", token=bob)
    assert len(got.json["jobs"]) == 10_001
    # Again from what is remembered, also after a change.
    assert api.ask("GET", f"/api/v1/orgs/other/experiments/{created}/jobs", token=bob).body == got.body
    assert (
        api.ask("DELETE", f"/api/v1/orgs/other/experiments/{created}/jobs/{uuid.UUID(int=1)}", token=bob).status == 200
    )
    fewer = api.ask("GET", f"/api/v1/orgs/other/experiments/{created}/jobs", token=bob).json
    assert len(fewer["jobs"]) == fewer["pagination_info"]["total_records"] == 10_000
    page = checked_json(api.ask("GET", f"/api/v1/orgs/other/experiments/{created}/jobs?skip=10&size=5", token=bob))
    assert len(page["jobs"]) == 5
    assert page["pagination_info"] == {"total_records": 10_000, "total_pages": 2000, "page_size": 5, "page_index": 2}
