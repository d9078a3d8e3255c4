# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's clients send, sent without them: `test_sdk_clients` runs them, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway
from picture_models import onnx_classifier, png
from store_stub import StoreStub

pytestmark = pytest.mark.timeout(300)
ARCH = "classification_pyt"
PICTURE = "aws://b/images/a.png"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = onnx_classifier(tmp_path_factory.mktemp("model") / "m")
    return {f"models/m/{file.name}": file.read_bytes() for file in folder.iterdir()}


class Client:
    """One user's requests below an organisation."""

    def __init__(self, running: Gateway, version: str, store: StoreStub) -> None:
        self.running = running
        self.base = f"/api/{version}"
        key = running.command("users", "add", f"user-{version}", "--org", "acme").strip()
        body = {"ngc_key": key, "ngc_org_name": "acme", "enable_telemetry": None}
        got = running.ask("POST", f"{self.base}/login", body)
        assert got.status == 200 and got.json["token"]
        self.token = got.json["token"]
        details = {"cloud_bucket_name": "b", **store.metadata("b")["aws"]["b"]}
        self.workspace = {"name": "w", "cloud_type": "aws", "cloud_specific_details": details}

    def __call__(self, status: int, method: str, path: str, body: Any = None) -> Any:
        got = self.running.ask(method, f"{self.base}/orgs/acme/{path}", body, self.token)
        assert got.status == status, (method, path, got.status, got.body)
        return got.json


def test_v2(tmp_path: Path, model: dict[str, bytes], open_gateway: Callable[..., Any]) -> None:
    with StoreStub({"b": {"images/a.png": png(), **model}}) as store, open_gateway(tmp_path) as running:
        ask = Client(running, "v2", store)
        workspace = ask(201, "POST", "workspaces", ask.workspace)["id"]
        again = ask(200, "POST", "workspaces", ask.workspace)
        assert (again["id"], again["_duplicate"]) == (workspace, True) and again["_message"]
        other = ask(201, "POST", "workspaces", {**ask.workspace, "force_create": True})
        assert other["id"] != workspace and "_duplicate" not in other
        ask(200, "GET", "workspaces?limit=1")
        assert ask(200, "GET", "jobs:list_base_experiments")["experiments"] == []
        trained = {"action": "train", "kind": "experiment", "specs": {}, "name": "n", "network_arch": ARCH}
        job = ask(201, "POST", "jobs", {**trained, "workspace": workspace, "force_create": False})
        assert (job["status"], job["kind"], job["experiment_id"]) == ("Done", "experiment", job["id"])
        # The model by its path, and the keys by the workspace: no experiment, no parent.
        wish = {"network_arch": ARCH, "docker_image": "x", "num_gpus": 1, "model_path": "aws://b/models/m"}
        assert "credentials" in ask(400, "POST", "inference_microservices:start", wish)["error_desc"]
        started = ask(201, "POST", "inference_microservices:start", {**wish, "workspace": workspace})
        of_it = f"inference_microservices/{started['job_id']}"
        early = ask(200, "POST", f"{of_it}:inference", {"media": PICTURE})
        assert early["status"] in ("initializing", "loading", "not_ready", "completed")
        running.until_loaded(f"{ask.base}/orgs/acme/{of_it}:status", ask.token)
        assert ask(200, "POST", f"{of_it}:inference", {"media": PICTURE})["status"] == "completed"
        assert ask(200, "DELETE", f"{of_it}:stop")["status"] == "success"
        for method, verb in (("GET", "status"), ("POST", "inference"), ("DELETE", "stop")):
            ask(404, method, f"{of_it}:{verb}", {} if method == "POST" else None)
        # What was made for a job alone goes with it.
        for job_id in (started["job_id"], job["id"]):
            ask(200, "DELETE", f"jobs/{job_id}")
        assert Client(running, "v1", store)(200, "GET", "experiments")["experiments"] == []
        assert running.processes() == []


def test_v1(tmp_path: Path, model: dict[str, bytes], open_gateway: Callable[..., Any]) -> None:
    with StoreStub({"b": model}) as store, open_gateway(tmp_path) as running:
        ask = Client(running, "v1", store)
        missing = {**ask.workspace, "cloud_specific_details": {**ask.workspace["cloud_specific_details"]}}
        missing["cloud_specific_details"]["cloud_bucket_name"] = "none"
        assert "there is no bucket none" in ask(400, "POST", "workspaces", missing)["error_desc"]
        workspace = ask(200, "POST", "workspaces", ask.workspace)["id"]
        wish = {"network_arch": ARCH, "encryption_key": "k", "workspace": workspace}
        experiment = ask(200, "POST", "experiments", wish)["id"]
        change = {"name": "mine", "description": "d", "checkpoint_choose_method": "latest_model", "tags": ["a"]}
        for method in ("PATCH", "PUT"):
            changed = ask(200, method, f"experiments/{experiment}", change)
            assert {name: changed[name] for name in change} == change
        assert (changed["encryption_key"], changed["workspace"], changed["network_arch"]) == ("k", workspace, ARCH)
        answer = ask(200, "GET", f"experiments/{experiment}")
        assert answer == changed
        # What was answered may be sent back.
        same = ask(200, "PUT", f"experiments/{experiment}", {**answer, "tags": None})
        assert "tags" not in same and same["created_on"] == answer["created_on"]
        ask(400, "PATCH", f"experiments/{experiment}", {"network_arch": "another"})
        ask(404, "PATCH", f"experiments/{workspace}", {"name": "n"})
        assert ask(200, "GET", "experiments:base")["experiments"] == []
        parent = ask(
            200, "POST", f"experiments/{experiment}/jobs", {"parent_job_id": None, "action": "train", "specs": {}}
        )
        assert ask(200, "GET", f"experiments/{experiment}/jobs/{parent}")["status"] == "Done"
        ask(200, "DELETE", f"experiments/{experiment}")
        assert ask(200, "GET", "experiments")["experiments"] == []
