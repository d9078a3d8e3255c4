# SPDX-License-Identifier: Apache-2.0
"""`headrace gateway` as a program: how it starts, what it refuses, what it leaves behind, and the commands beside it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gateway_process import Gateway
from picture_models import data_url, onnx_classifier, png

from support.programs import run
from support.waiting import eventually

pytestmark = pytest.mark.timeout(300)
Open = Callable[..., Any]
KEY = re.compile(r"nvapi-[A-Za-z0-9_-]{64}")


class GatewayWithModel:
    """A gateway with a user and a trained model."""

    def __init__(self, running: Gateway, folder: Path) -> None:
        self.running = running
        self.key = running.command("users", "add", "alice", "--org", "acme").strip()
        model = onnx_classifier(folder / "model")
        arguments = ("jobs", "register", str(model), "--org", "acme", "--arch", "classification", "--json")
        document = json.loads(running.command(*arguments))
        self.experiment, self.parent = document["experiment_id"], document["job_id"]
        self.token = running.login(self.key, "acme")
        self.base = f"/api/v1/orgs/acme/experiments/{self.experiment}"

    def start(self) -> str:
        got = self.running.ask(
            "POST", f"{self.base}/inference_microservice/start", {"parent_id": self.parent}, self.token
        )
        assert got.status == 200, got.body
        assert (got.json["status"], got.json["message"]) == ("pending", "Inference microservice starting")
        return str(got.json["job_id"])

    def ask(self, method: str, job: str, verb: str, body: Any = None) -> Any:
        return self.running.ask(method, f"{self.base}/jobs/{job}/inference_microservice/{verb}", body, self.token)

    def until_loaded(self, job: str) -> dict[str, Any]:
        return self.running.until_loaded(f"{self.base}/jobs/{job}/inference_microservice/status", self.token)

    def status_of(self, job: str) -> str:
        return str(self.running.ask("GET", f"{self.base}/jobs/{job}", token=self.token).json["status"])


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory, open_gateway: Open) -> Iterator[GatewayWithModel]:
    folder = tmp_path_factory.mktemp("gateway")
    with open_gateway(folder, "--access-log") as running:
        yield GatewayWithModel(running, folder)


def test_started_twice_are_two_services_and_each_is_stopped_once(used: GatewayWithModel) -> None:
    first, second = used.start(), used.start()
    assert first != second
    reported = used.until_loaded(first)
    assert (reported["status"], reported["job_id"], reported["pod_status"]) == ("healthy", first, "Running")
    assert reported["pod_name"]
    assert used.ask("POST", first, "inference", {"images": [data_url(png())]}).json["status"] == "completed"
    assert used.ask("POST", first, "inference", b"").status == 400
    assert used.ask("POST", first, "inference", {"images": "no"}).status == 400
    with ThreadPoolExecutor(4) as threads:
        stopped = list(threads.map(lambda _: used.ask("POST", first, "stop").status, range(4)))
    assert set(stopped) <= {200, 404}
    assert 200 in stopped
    assert used.ask("POST", first, "stop").status == 404
    assert used.ask("POST", first, "inference", {"images": [data_url(png())]}).status == 404
    assert used.status_of(first) == "Done"
    used.until_loaded(second)
    assert used.ask("POST", second, "stop").status == 200
    assert not used.running.processes()


def test_a_stop_during_the_start_leaves_nothing(used: GatewayWithModel) -> None:
    with used.running.slow_to_load():
        job = used.start()
        assert used.ask("POST", job, "inference", {"images": []}).status in (202, 503)
        assert used.ask("POST", job, "stop").status == 200
    assert not used.running.processes()
    assert used.ask("GET", job, "status").status == 404


def test_a_model_that_cannot_be_loaded_is_reported_end_to_end(used: GatewayWithModel, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"this is no model")
    arguments = ("jobs", "register", str(broken), "--org", "acme", "--arch", "classification", "--json")
    document = json.loads(used.running.command(*arguments))
    base = f"/api/v1/orgs/acme/experiments/{document['experiment_id']}"
    start = f"{base}/inference_microservice/start"
    job = used.running.ask("POST", start, {"parent_job_id": document["job_id"]}, used.token).json["job_id"]
    path = f"{base}/jobs/{job}/inference_microservice"

    def model_error() -> Any:
        status = used.running.ask("GET", f"{path}/status", token=used.token).json
        if status["initialization_error"] is not None:
            raise RuntimeError(status)
        return status if status["model_load_error"] else None

    status = eventually(model_error)
    facade = f"/api/v2/orgs/acme/inference_microservices/{job}"
    # The service asks to be deleted: it lives, is being ended, and is gone, and the answers are always the same.
    over = False
    while not over:
        over = used.running.ask("GET", f"{base}/jobs/{job}", token=used.token).json["status"] == "Error"
        got = used.running.ask("POST", f"{path}/inference", {"images": []}, used.token)
        assert (got.status, got.json["status"]) == (503, "error"), got.body
        assert got.json["error"].startswith("Model failed to load: ")
        got = used.running.ask("POST", f"{facade}:inference", {"a": 1}, used.token)
        assert got.status == 500, got.body
        got = used.running.ask("GET", f"{path}/status", token=used.token)
        assert (got.status, got.json["status"]) == (200, "error"), got.body
        assert got.json["model_load_error"] == status["model_load_error"]
    assert not used.running.processes()
    got = used.running.ask("DELETE", f"{facade}:stop", token=used.token)
    assert got.status == 200
    got = used.running.ask("POST", f"{path}/inference", {"images": []}, used.token)
    assert got.status == 404
    assert used.running.ask("GET", f"{path}/status", token=used.token).status == 404
    assert used.running.ask("GET", f"{base}/jobs/{job}", token=used.token).json["status"] == "Error"


def test_commands_beside_the_gateway(used: GatewayWithModel) -> None:
    running = used.running
    key = running.command("users", "add", "carol", "--org", "acme", "--role", "viewer").strip()
    assert KEY.fullmatch(key)
    assert running.ask("GET", "/api/v1/orgs/acme/workspaces", token=key).status == 200
    assert "carol" in running.command("users", "list", "--org", "acme")
    new = json.loads(running.command("users", "rotate", "carol", "--json"))["key"]
    running.command("users", "grant", "carol", "--org", "other", "--role", "admin")
    rows = json.loads(running.command("users", "list", "--json"))
    assert [row["roles"] for row in rows if row["name"] == "carol"] == [{"acme": "viewer", "other": "admin"}]
    assert running.ask("GET", "/api/v1/orgs/other/workspaces", token=new).status == 200
    running.command("users", "remove", "carol")
    assert running.ask("POST", "/api/v1/login", {"ngc_key": new, "ngc_org_name": "acme"}).status == 401
    assert "there is no user" in running.command("users", "remove", "carol", code=1)
    assert "already" in running.command("users", "add", "alice", "--org", "acme", code=1)
    listed = json.loads(running.command("jobs", "list", "--org", "acme", "--action", "train", "--json"))
    assert used.parent in [row["id"] for row in listed]
    assert used.parent in running.command("jobs", "list")
    shown = json.loads(running.command("jobs", "show", used.parent, "--json"))
    assert shown["events"][-1]["status"] == "Done"
    assert used.parent in running.command("jobs", "show", used.parent)
    assert "no job" in running.command("jobs", "show", "99999999-9999-4999-8999-999999999999", code=1)
    job = used.start()
    used.until_loaded(job)
    assert running.command("jobs", "logs", job, "--tail", "20").strip()
    assert json.loads(running.command("jobs", "cancel", job, "--json"))["id"] == job
    assert used.ask("GET", job, "status").status == 404
    assert not running.processes()
    assert "deleted" in running.command("jobs", "delete", job)
    assert running.ask("GET", f"{used.base}/jobs/{job}", token=used.token).status == 404


def test_registering_a_missing_model_is_an_error(used: GatewayWithModel, tmp_path: Path) -> None:
    result = used.running.command("jobs", "register", str(tmp_path / "none"), "--org", "acme", "--arch", "x", code=1)
    assert "none" in result


def test_metrics_and_the_access_log_have_no_secrets(used: GatewayWithModel) -> None:
    got = used.running.ask("GET", "/metrics")
    assert b'headrace_gateway_requests_total{status="200"}' in got.body
    assert b"headrace_gateway_inference_seconds_count" in got.body
    log = used.running.log
    assert '"path":"/api/v1/login"' in log
    assert used.token not in log
    assert used.key not in log


def test_the_first_start_shows_a_key_and_services_outlive_the_gateway(tmp_path: Path, open_gateway: Open) -> None:
    with open_gateway(tmp_path) as running:
        shown = KEY.findall(running.log)
        assert len(shown) == 1
        admin = running.login(shown[0], "acme")  # of every organisation
        used = GatewayWithModel(running, tmp_path)
        job = used.start()
        used.until_loaded(job)
        service = running.processes()
        assert running.end() == 0
        assert running.processes() == service
        running.start("--stop-services")
        assert KEY.findall(running.log) == shown
        assert running.ask("GET", "/api/v1/orgs/acme/workspaces", token=admin).status == 200
        assert used.ask("POST", job, "inference", {"images": [data_url(png())]}).json["status"] == "completed"
        assert running.end() == 0
        assert not running.processes()


def refused(folder: Path, *words: str) -> str:
    """What a gateway says that does not start."""
    done = run("gateway", "--data-dir", folder / "data", *words)
    assert done.returncode == 2, done
    output = done.stdout + done.stderr
    assert not KEY.search(output)
    return output


def test_a_public_port_needs_tls_or_insecure(tmp_path: Path, open_gateway: Open) -> None:
    assert "--insecure" in refused(tmp_path, "--host", "0.0.0.0", "--port", "0")  # noqa: S104
    with open_gateway(tmp_path, "--host", "0.0.0.0", "--insecure") as public:  # noqa: S104
        assert public.ask("GET", "/health").status == 200


def test_a_taken_port_leaves_the_key_unchanged(tmp_path: Path, open_gateway: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "in use" in refused(tmp_path, "--port", str(taken.getsockname()[1]))
    with open_gateway(tmp_path) as later:
        assert KEY.search(later.log)


@pytest.mark.slow
def test_a_process_that_refuses_to_start_ends_with_2(tmp_path: Path) -> None:
    running = Gateway(tmp_path)
    running.start("--host", "0.0.0.0", "--port", "0", wait=False)  # noqa: S104
    assert running.program is not None
    assert running.program.wait() == 2
    assert "--insecure" in running.log


def test_with_tls_an_idle_service_still_finds_the_gateway(tmp_path: Path, open_gateway: Open) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True,
    )  # fmt: skip
    arguments = ("--tls-certificate", str(certificate), "--tls-key", str(key), "--idle-timeout-minutes", "0.001")
    with open_gateway(tmp_path, *arguments) as running:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

        def ask(method: str, path: str, body: Any, token: str = "") -> Any:
            connection = http.client.HTTPSConnection("127.0.0.1", running.port, timeout=60, context=context)
            fields = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request(method, path, json.dumps(body).encode(), fields)
            parsed = json.loads(connection.getresponse().read())
            connection.close()
            return parsed

        user = running.command("users", "add", "alice", "--org", "acme").strip()
        model = onnx_classifier(tmp_path / "model")
        arguments = ("jobs", "register", str(model), "--org", "acme", "--arch", "classification", "--json")
        document = json.loads(running.command(*arguments))
        token = ask("POST", "/api/v1/login", {"ngc_key": user, "ngc_org_name": "acme"})["token"]
        base = f"/api/v1/orgs/acme/experiments/{document['experiment_id']}"
        job = ask("POST", f"{base}/inference_microservice/start", {"parent_id": document["job_id"]}, token)["job_id"]
        eventually(lambda: ask("GET", f"{base}/jobs/{job}", None, token)["status"] == "Done")
        eventually(lambda: not running.processes())
        assert "without a request" in ask("GET", f"{base}/jobs/{job}", None, token)["job_details"]["message"]
        assert running.end(signal.SIGINT) == 0
