# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own clients, as they are on PyPI, against a real gateway with its model in a real S3 server.

`scripts/platforms/tao_clients.sh install` brings them, `scripts/platforms/object_stores.sh install` the store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway, gateway
from picture_models import onnx_classifier, png
from s3_server import S3Server, s3_server

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]
INSTALLED = Path(__file__).parents[3] / "build" / "tao_clients"
BUCKET = "my-bucket"
ARCH = "classification_pyt"
PICTURE = f"aws://{BUCKET}/images/a.png"


@pytest.fixture(scope="module", autouse=True)
def database() -> None:
    """SQLite alone: both databases pass the other tests of this folder."""


class Place:
    """A gateway, a store, a user, and a home for the clients' configuration."""

    def __init__(self, folder: Path, running: Gateway, store: S3Server) -> None:
        self.running = running
        self.store = store
        self.key = running.command("users", "add", "alice", "--org", "acme", "--role", "admin").strip()
        self.home = folder / "home"
        self.home.mkdir()
        model = onnx_classifier(folder / "model")
        self.model = {file.name: file.read_bytes() for file in model.iterdir()}
        store.make(BUCKET, {"images/a.png": png()})

    def upload(self, job: str) -> str:
        """The results of a training job."""
        self.store.put(BUCKET, {f"results/{job}/{name}": body for name, body in self.model.items()})
        return f"aws://{BUCKET}/results/{job}"

    def environment(self, version: str) -> dict[str, str]:
        assert (INSTALLED / version).is_dir(), "they are not here: scripts/platforms/tao_clients.sh install"
        own = ("TAO_", "BASE_URL", "ORG", "TOKEN", "LOG_LEVEL", "MOCK_SDK", "HTTP", "http")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        paths = {"HOME": str(self.home), "PYTHONPATH": str(INSTALLED / version), "PYTHONWARNINGS": "ignore"}
        base = f"http://127.0.0.1:{self.running.port}"
        return {**kept, **paths, **({"BASE_URL": f"{base}/api/v1"} if version == "v1" else {"TAO_BASE_URL": base})}

    def tao(self, version: str, *words: str, code: int = 0) -> str:
        """The command line."""
        run = subprocess.run(
            [sys.executable, "-m", "tao_cli.tao", *words],
            env=self.environment(version),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert run.returncode == code, run.stdout + run.stderr
        return run.stdout.strip()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with s3_server(tmp_path) as store, gateway(tmp_path) as running:
        yield Place(tmp_path, running, store)


class Sdk:
    """`tao_sdk` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the program ended"
        document: dict[str, Any] = json.loads(line)
        return document

    def __call__(self, method: str, **arguments: Any) -> Any:
        reported = self.call(method, **arguments)
        assert "error" not in reported, reported
        return reported["result"]

    def refused(self, method: str, **arguments: Any) -> str:
        return str(self.call(method, **arguments)["error"])

    def until_loaded(self, job: str) -> dict[str, Any]:
        """The test's own time-out is the limit. While it loads, inference is no error either."""
        while True:
            status: dict[str, Any] = self("get_inference_microservice_status", microservice_job_id=job)
            assert status["initialization_error"] is None and status["model_load_error"] is None, status
            if status["model_loaded"]:
                return status
            time.sleep(0.05)


@contextmanager
def sdk(place: Place) -> Iterator[Sdk]:
    arguments = [sys.executable, str(Path(__file__).with_name("sdk_calls.py"))]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=place.environment("v2")
    ) as process:
        try:
            yield Sdk(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def test_the_sdk_from_login_to_stop(place: Place) -> None:
    with sdk(place) as client:
        assert client.refused("login", ngc_key="nvapi-" + "x" * 64, ngc_org_name="acme") == "TaoAuthenticationError"
        login = client("login", ngc_key=place.key, ngc_org_name="acme")
        assert login["token"] and login["user_id"]
        assert client("is_authenticated") is True
        wish = {"name": "w", "cloud_type": "aws", "cloud_specific_details": place.store.details(BUCKET)}
        workspace = client("create_workspace", **wish)
        assert workspace["is_duplicate"] is False
        again = client("create_workspace", **wish)
        assert (again["id"], again["is_duplicate"]) == (workspace["id"], True)
        other = client("create_workspace", **wish, force_create=True)
        assert other["id"] != workspace["id"] and other["is_duplicate"] is False
        assert {workspace["id"] for workspace in client("list_workspaces")} == {workspace["id"], other["id"]}
        client("update_workspace_metadata", workspace_id=other["id"], update_info={"name": "new name"})
        assert client("get_workspace_metadata", workspace_id=other["id"])["name"] == "new name"
        assert client("delete_workspace", workspace_id=other["id"])["id"] == other["id"]
        assert client.refused("get_workspace_metadata", workspace_id=other["id"]) == "TaoNotFoundError"

        wish = {"kind": "experiment", "action": "train", "specs": {"epochs": 1}, "name": "mine", "network_arch": ARCH}
        parent = client("create_job", **wish, workspace=workspace["id"], encryption_key="k", tags=["a"])["id"]
        metadata = client("get_job_metadata", job_id=parent)
        assert (metadata["status"], metadata["kind"], metadata["name"]) == ("Done", "experiment", "mine")
        assert parent in [listed_job["id"] for listed_job in client("list_jobs")]
        assert client("list_base_experiments") == []
        place.upload(parent)

        service = {"network_arch": ARCH, "num_gpus": 1, "docker_image": "nvcr.io/nvidia/tao/tao-toolkit:6.0.0-pyt"}
        started = client("start_inference_microservice", **service, parent_job_id=parent, workspace=workspace["id"])
        job = started["job_id"]
        assert started["status"] == "starting" and job in started["message"]
        # While it loads: 200, or the client would raise.
        early = client("inference_request", microservice_job_id=job, images=[PICTURE])
        assert early["status"] in ("initializing", "loading", "completed"), early
        status = client.until_loaded(job)
        assert (status["job_id"], status["status"], status["pod_status"]) == (job, "healthy", "Running")
        result = client("inference_request", microservice_job_id=job, images=[PICTURE])
        assert (result["status"], result["job_id"]) == ("completed", job), result
        assert client("get_job_metadata", job_id=job)["status"] == "Running"
        assert client("get_job_logs", job_id=job)
        assert client("stop_inference_microservice", microservice_job_id=job)["status"] == "success"
        for method in ("get_inference_microservice_status", "stop_inference_microservice", "inference_request"):
            assert client.refused(method, microservice_job_id=job) == "TaoNotFoundError"
        assert client("get_job_metadata", job_id=job)["status"] == "Done"
        assert client("delete_job", job_id=job)["id"] == job
        assert client.refused("get_job_metadata", job_id=job) == "TaoNotFoundError"
    assert place.running.processes() == []


def test_the_command_line_of_v2(place: Place) -> None:
    """It names the model by its path and the workspace that has its keys: there is no parent job in its words."""
    here = f"http://127.0.0.1:{place.running.port}"

    def tao(*words: str) -> Any:
        return json.loads(place.tao("v2", ARCH, *words, "--output", "json"))

    place.tao("v2", "login", "--tao-base-url", here, "--ngc-org-name", "acme", "--ngc-key", place.key)
    assert "Authenticated as: acme" in place.tao("v2", "whoami")
    keys = place.store.details(BUCKET)
    words = [word for name, value in keys.items() for word in (f"--{name.replace('_', '-')}", value)]
    workspace = tao("create-workspace-aws", "--name", "w", *words)["id"]
    assert workspace in json.dumps(tao("list-workspaces"))
    path = place.upload("by-hand")
    model = ("--docker-image", "x", "--num-gpus", "1", "--model-path", path, "--workspace-id", workspace)
    job = tao("start-inference-microservice", *model)["job_id"]
    of_job = ("--microservice-job-id", job)
    while not tao("get-inference-microservice-status", *of_job)["model_loaded"]:
        pass
    result = tao("inference-request", *of_job, "--media", PICTURE)
    assert result["status"] == "completed", result
    tao("stop-inference-microservice", *of_job)
    assert place.running.processes() == []


def test_the_command_line_of_v1(place: Place) -> None:
    def tao(*words: str, code: int = 0) -> str:
        return place.tao("v1", ARCH, *words, code=code)

    login = json.loads(place.tao("v1", "login", "--ngc-key", place.key, "--ngc-org-name", "acme"))
    assert login["token"] and login["user_name"] == "alice"
    details = json.dumps(place.store.details(BUCKET))
    workspace = tao("workspace-create", "--name", "w", "--cloud_type", "aws", "--cloud_details", details)
    wrong = json.dumps({**place.store.details(BUCKET), "cloud_bucket_name": "no-such-bucket"})
    output = tao("workspace-create", "--name", "w", "--cloud_type", "aws", "--cloud_details", wrong, code=1)
    assert "error code 400" in output and "Provided cloud credentials are invalid" in output
    experiment = tao("experiment-create", "--network_arch", ARCH, "--encryption_key", "k", "--workspace", workspace)
    of_it = ("--id", experiment, "--job_type", "experiment")
    document = json.loads(tao("get-metadata", *of_it))
    assert (document["id"], document["network_arch"], document["workspace"]) == (experiment, ARCH, workspace)
    change = {"name": "mine", "checkpoint_choose_method": "latest_model", "tags": ["a"]}
    changed = json.loads(tao("patch-artifact-metadata", *of_it, "--update_info", json.dumps(change)))
    assert {name: changed[name] for name in change} == change
    assert changed["encryption_key"] == "k"
    # Lists are printed as Python writes them.
    assert [experiment["name"] for experiment in literal_eval(tao("list-experiments"))] == ["mine"]
    assert tao("list-experiments", "--filter_params", '{"name": "another"}') == "[]"
    assert tao("list-base-experiments") == "[]"
    parent = tao("experiment-run-action", "--id", experiment, "--action", "train", "--specs", "{}")
    status = json.loads(tao("get-action-status", *of_it, "--job", parent))
    assert (status["id"], status["status"], status["action"]) == (parent, "Done", "train")
    place.upload(parent)
    # What the client calls an experiment's job serves.
    base = f"/api/v1/orgs/acme/experiments/{experiment}"
    ask, token = place.running.ask, login["token"]
    job = ask("POST", f"{base}/inference_microservice/start", {"parent_id": parent}, token).json["job_id"]
    place.running.until_loaded(f"{base}/jobs/{job}/inference_microservice/status", token)
    assert tao("get-job-logs", *of_it, "--job", job, "--workdir", str(place.home))
    tao("job-cancel", *of_it, "--job", job)
    assert json.loads(tao("get-action-status", *of_it, "--job", job))["status"] == "Done"
    kept = ("--backup_file_name", "mine.backup", "--workspace", workspace)
    assert literal_eval(tao("workspace-backup", *kept))["experiments"] == 1
    tao("experiment-delete", "--id", experiment)
    assert tao("list-experiments") == "[]"
    assert literal_eval(tao("workspace-restore", *kept))["experiments"] == 1
    assert json.loads(tao("get-metadata", *of_it))["name"] == "mine"
    tao("experiment-delete", "--id", experiment)
    assert tao("list-experiments") == "[]"
    assert place.running.processes() == []
