# SPDX-License-Identifier: Apache-2.0
"""The manual's complete workflow by bash, curl and jq: checkpoint and media in stores that others wrote.

A real gateway, a real vision-language model, moto's S3 and Azure's emulator; and the same while the gateway is killed
after every step. `scripts/platforms/object_stores.sh install` brings the stores.
"""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from azure_server import AzureServer, azure_server
from gateway_process import Gateway, gateway
from PIL import Image
from s3_server import S3Server, s3_server
from seed_script import STEPS, after, run_workflow
from vl_model import mp4, tiny_qwen_vl

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]
BUCKET = "my-bucket"


@pytest.fixture(scope="module", autouse=True)
def database() -> None:
    """SQLite alone: both databases pass the other tests of this folder."""


def jpeg(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a trained model."""
    folder = tiny_qwen_vl(tmp_path_factory.mktemp("trained"), brief=True)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(params=["s3", "azure"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[S3Server | AzureServer]:
    with (s3_server if request.param == "s3" else azure_server)(tmp_path) as server:
        pictures = {f"images/img{number}.jpg": jpeg(number) for number in (1, 2)}
        server.make(BUCKET, {"videos/sample.mp4": mp4(), **pictures})
        yield server


class Trained:
    """A user, a workspace, and a training job whose results lie in its bucket."""

    def __init__(self, running: Gateway, store: S3Server | AzureServer, model: dict[str, bytes]) -> None:
        self.running = running
        self.key = running.command("users", "add", "alice", "--org", "acme").strip()
        self.token = running.login(self.key, "acme")
        details = store.details(BUCKET)
        wish = {"name": "w", "cloud_type": store.cloud_type, "cloud_specific_details": details}
        workspace = self.post("workspaces", wish)["id"]
        self.experiment = self.post("experiments", {"network_arch": "cosmos-rl", "workspace": workspace})["id"]
        self.job = self.post(f"experiments/{self.experiment}/jobs", {"action": "train", "specs": {}})
        folder = f"results/{self.job}/train/safetensors"
        store.put(BUCKET, {f"{folder}/{name}": body for name, body in model.items()})
        store.put(BUCKET, {f"results/{self.job}/log.txt": b"trained"})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        got = self.running.ask("POST", f"/api/v1/orgs/acme/{path}", body, self.token)
        assert got.status == 200, got.body
        return got.json

    def given(self, store: S3Server | AzureServer) -> dict[str, str]:
        """For the manual's script."""
        given = {"address": f"127.0.0.1:{self.running.port}", "org": "acme", "key": self.key, "scheme": store.scheme}
        return {**given, "experiment": self.experiment, "job": self.job}


def check(told: str, used: Trained) -> None:
    """What the manual says that one sees, and nothing left of it."""
    job = told.partition("Inference Microservice Job ID: ")[2].partition("\n")[0]
    for title in ("Inference result:", "Second inference result:"):
        result = after(told, title)
        assert (result["status"], result["job_id"]) == ("completed", job), result
        assert result["message"] == "Inference completed successfully"
        assert isinstance(result["results"]["response"], str)
    assert "Model is ready!" in told
    message = "Inference microservice stopped successfully"
    stopped = after(told, "Stopping inference microservice...")
    assert stopped == {"status": "stopped", "message": message, "job_id": job}
    running = used.running
    assert running.processes() == []
    base = f"/api/v1/orgs/acme/experiments/{used.experiment}/jobs/{job}"
    for method, verb in (("GET", "status"), ("POST", "inference"), ("POST", "stop")):
        assert running.ask(method, f"{base}/inference_microservice/{verb}", {}, used.token).status == 404
    assert running.ask("GET", base, token=used.token).json["status"] == "Done"


def assert_secret_not_stored(running: Gateway, secret: str) -> None:
    """The store's key is in no file of the gateway's, as it is or as JSON writes it."""
    forms = {secret.encode(), json.dumps(secret).strip('"').encode()}
    with sqlite3.connect(running.data_dir / "headrace.sqlite3") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    for file in [running.log_file, *running.data_dir.rglob("*")]:
        if file.is_file():
            body = file.read_bytes()
            assert not any(form in body for form in forms), file


def test_the_workflow_with_everything_in_a_store(
    tmp_path: Path, store: S3Server | AzureServer, model: dict[str, bytes]
) -> None:
    shell = tmp_path / "empty"
    shell.mkdir()
    with gateway(tmp_path) as running:
        used = Trained(running, store, model)
        words: list[bytes] = []

        def record_processes(step: int) -> None:
            for pid in running.processes():
                words.extend(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))

        reported = run_workflow(shell, record_processes, **used.given(store))
        check(reported, used)
        assert words and not any(store.secret.encode() in word for word in words)
        assert_secret_not_stored(running, store.secret)
        assert running.end() == 0


def test_the_workflow_with_the_gateway_killed_after_each_step(
    tmp_path: Path, store: S3Server | AzureServer, model: dict[str, bytes]
) -> None:
    shell = tmp_path / "empty"
    shell.mkdir()
    with gateway(tmp_path) as running:
        used = Trained(running, store, model)
        seen: list[list[int]] = []

        def kill(step: int) -> None:
            assert running.end(9) == -9
            seen.append(running.processes())
            running.start()

        reported = run_workflow(shell, kill, **used.given(store))
        kill(len(STEPS) - 1)
        check(reported, used)
        # Nothing before the start, one service that five gateways took up, nothing after the stop.
        assert seen[0] == seen[-1] == []
        assert len(seen) == len(STEPS) and len(seen[1]) == 1
        assert all(item == seen[1] for item in seen[1:-1])
        assert_secret_not_stored(running, store.secret)
