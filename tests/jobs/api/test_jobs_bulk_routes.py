# SPDX-License-Identifier: Apache-2.0
"""Several workspaces at once, backups, and the verbs of jobs that are not for every job, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch.bucket_stub import bucket_stub
from job_api import Api, job_api

V1, V2 = "/api/v1/orgs/acme", "/api/v2/orgs/acme"
NOBODY = "99999999-9999-4999-8999-999999999999"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with job_api(None, tmp_path_factory.mktemp("bulk")) as made:
        yield made


@pytest.fixture(scope="module")
def token(api: Api) -> str:
    return api.login("alice")


def workspace(api: Api, token: str, name: str) -> str:
    wish = {"name": name, "cloud_type": "self_hosted", "cloud_specific_details": {"a": name}}
    return str(api.ask("POST", f"{V1}/workspaces", wish, token).json["id"])


def test_workspaces_are_deleted_together_or_not_at_all(api: Api, token: str) -> None:
    first, second, used = (workspace(api, token, name) for name in ("one", "two", "used"))
    body = {"network_arch": "x", "workspace": used}
    assert api.ask("POST", f"{V1}/experiments", body, token).status == 200
    bad: list[tuple[Any, int]] = [
        ({"workspace_ids": [first, NOBODY]}, 404),
        ({"workspace_ids": [first, used]}, 409),
        ({"workspace_ids": [first, "no id"]}, 400),
        ({"workspace_ids": []}, 400),
        ({"workspace_ids": first}, 400),
        ({}, 400),
    ]
    for sent, status in bad:
        got = api.ask("DELETE", f"{V1}/workspaces", sent, token)
        assert got.status == status, (sent, got.body)
    assert (
        f"experiments use workspace {used}"
        in api.ask("DELETE", f"{V1}/workspaces", bad[1][0], token).json["error_desc"]
    )
    assert api.ask("GET", f"{V1}/workspaces/{first}", token=token).status == 200
    assert api.ask("DELETE", f"{V1}/workspaces", {"workspace_ids": [first]}, api.login("victor")).status == 403
    got = api.ask("DELETE", f"{V2}/workspaces", {"workspace_ids": [first, second, first]}, token)
    assert got.status == 200 and {workspace["id"] for workspace in got.json["workspaces"]} == {first, second}
    assert api.ask("GET", f"{V1}/workspaces/{first}", token=token).status == 404


def test_backup_and_restore_are_for_admins(api: Api, token: str) -> None:
    root = api.keys["root"]
    with bucket_stub() as bucket:
        keys = {"access_key": "AK", "secret_key": "whispered", "endpoint_url": f"http://127.0.0.1:{bucket.port}"}
        metadata = {"cloud_type": "aws", "cloud_specific_details": {**keys, "cloud_bucket_name": "bucket"}}
        sent = {"workspace_metadata": metadata, "backup_file_name": "b1"}
        assert api.ask("POST", f"{V1}/workspaces:backup", sent, token).status == 403
        created = api.ask("POST", f"{V1}/experiments", {"network_arch": "gone"}, token).json["id"]
        got = api.ask("POST", f"{V1}/workspaces:backup", sent, root)
        assert got.status == 200 and got.json["backup_file_name"] == "b1" and got.json["experiments"] >= 1, got.body
        assert api.ask("DELETE", f"{V1}/experiments/{created}", token=token).status == 200
        got = api.ask("POST", f"{V2}/workspaces:restore", sent, root)
        assert got.status == 200 and got.json["experiments"] == 1, got.body
        assert api.ask("GET", f"{V1}/experiments/{created}", token=token).status == 200
        # The same by a workspace that there is.
        here = api.ask("POST", f"{V1}/workspaces", {"name": "b", **metadata}, token).json["id"]
        got = api.ask("POST", f"{V1}/workspaces/{here}:backup", None, root)
        assert got.status == 200, got.body
        name = got.json["backup_file_name"]
        got = api.ask("POST", f"{V1}/workspaces/{here}:restore", {"backup_file_name": name}, root)
        assert got.status == 200 and got.json["jobs"] == 0, got.body
        assert api.ask("POST", f"{V1}/workspaces/{here}:restore", {}, root).status == 400
        assert api.ask("POST", f"{V1}/workspaces/{here}:restore", {"backup_file_name": "none"}, root).status == 404
        got = api.ask("POST", "/api/v1/orgs/other/workspaces:restore", sent, root)
        assert got.status == 409 and "not a backup of this organisation" in got.json["error_desc"]
        assert b"whispered" not in b"".join(bucket.objects.values())
    assert api.ask("POST", f"{V1}/workspaces:backup", {}, root).status == 400
    assert "whispered" not in (api.folder / "audit.jsonl").read_text()


def test_verbs_that_a_registered_model_has_not(api: Api, token: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not looked at here")
    path = str(tmp_path / "model.onnx")
    experiment, job = api.server.call(api.jobs.register, "acme", "op", path, "classification", "", "m")
    for base in (f"{V1}/experiments/{experiment.id}/jobs", f"{V2}/jobs"):
        for verb in ("pause", "resume", "retry"):
            got = api.ask("POST", f"{base}/{job.id}:{verb}", token=token)
            assert got.status == 409 and "with action train cannot be" in got.json["error_desc"], got.body
            assert api.ask("POST", f"{base}/{NOBODY}:{verb}", token=token).status == 404
            assert api.ask("POST", f"{base}/{job.id}:{verb}", token=api.login("victor")).status == 403
