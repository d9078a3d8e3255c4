# SPDX-License-Identifier: Apache-2.0
"""The gateway with its services elsewhere: what its flags mean, and the whole way on Kubernetes and on Docker.

The API server and the engine are real. Pods are run by a fake kubelet, each in a network of its own; the image on
Docker has a stand-in for our program.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker_platform import DockerEngine, docker_engine, root_tar
from gateway_process import Gateway, gateway
from lightkube.resources import apps_v1, core_v1
from picture_models import data_url, onnx_classifier, png

from headrace.core.errors import InvalidArgument
from headrace.jobs.settings import JobSettings
from headrace.programs.gateway import PlatformSettings, driver_for, with_platform
from support.fake_kubelet import FakeKubelet
from support.kubernetes_server import KubernetesServer
from support.ports import free_port
from support.programs import run
from support.waiting import eventually

pytestmark = pytest.mark.timeout(300)
HOST_ADDRESS = "10.244.255.254"
"""Of this machine, for the fake kubelet's pods."""
TOKEN = "hf_a_token_that_nobody_may_see"


# What the flags mean


def test_by_default_services_are_processes(tmp_path: Path) -> None:
    settings = JobSettings(tmp_path, callback_url="http://127.0.0.1:1")
    assert driver_for(PlatformSettings(), tmp_path, {}) is None
    assert with_platform(settings, PlatformSettings(), {}) is settings


@pytest.mark.parametrize(
    ("platform", "text"),
    [
        (PlatformSettings("lepton"), "--platform 'lepton' is unknown: use one of process, local-docker"),
        (PlatformSettings(image="x"), "--image needs a --platform other than process"),
        (PlatformSettings(given={"a": "b"}), "--platform-setting needs a --platform other than process"),
        (PlatformSettings(gpus=False), "--no-gpus needs a --platform other than process"),
        (PlatformSettings("slurm", callback_url="gateway:80"), "--callback-url must be written http://HOST:PORT"),
        (PlatformSettings("slurm", {"mode": "bare"}, "x"), "the mode bare has no container"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, platform: PlatformSettings, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        with_platform(JobSettings(tmp_path), platform, {})


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("kubernetes", {"colour": "red"}, "has no setting 'colour': it has .*namespace"),
        ("kubernetes", {"workload": "pod"}, "workload 'pod' is unknown"),
        ("local-docker", {"registry_key": "nvapi-x"}, "registry_key is secret"),
        ("slurm", {"cpus": "many"}, "cpus: 'many' is not a number"),
    ],
)
def test_settings_of_a_platform_are_checked(tmp_path: Path, name: str, given: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        driver_for(PlatformSettings(name, given), tmp_path, {})


def test_services_on_kubernetes_are_as_tao_makes_them(tmp_path: Path) -> None:
    driver: Any = driver_for(PlatformSettings("kubernetes", {"namespace": "models"}), tmp_path, {})
    created = driver._settings
    assert (created.workload, created.service_type, created.namespace) == ("statefulset", "ClusterIP", "models")
    assert created.readiness_path == created.liveness_path
    driver = driver_for(PlatformSettings("kubernetes", {"service_type": "NodePort"}), tmp_path, {})
    assert driver._settings.service_type == "NodePort"


def test_arguments_of_jobs(tmp_path: Path) -> None:
    settings = JobSettings(tmp_path, callback_url="http://127.0.0.1:1")
    reported = with_platform(settings, PlatformSettings("kubernetes"), {})
    assert reported.containers is not None and (reported.containers.image, reported.callback_url) == ("headrace", "")
    platform = PlatformSettings("slurm", {"mode": "bare"}, callback_url="http://gateway:8090", gpus=False)
    reported = with_platform(settings, platform, {})
    assert reported.containers is not None and (reported.containers.bare, reported.containers.gpus) == (True, False)
    assert reported.callback_url == "http://gateway:8090"
    reported = with_platform(settings, PlatformSettings("slurm"), {"SLURM_CONTAINER_MODE": "bare"})
    assert reported.containers is not None and reported.containers.bare
    assert {field.name for field in dataclasses.fields(reported)} == {
        field.name for field in dataclasses.fields(settings)
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--platform", "moon"), "'moon' is unknown"),
        (("--platform", "slurm", "--platform-setting", "partition"), ": write NAME=VALUE"),
        (("--platform", "kubernetes", "--platform-setting", "colour=red"), "has no setting 'colour'"),
    ],
)
def test_a_gateway_with_an_unknown_platform_does_not_start(
    tmp_path: Path, words: tuple[str, ...], text: str, database: str
) -> None:
    done = run(
        "gateway", "--data-dir", tmp_path / "data", *words, env={"HEADRACE_DATABASE_URL": Gateway.new_database()}
    )
    assert done.returncode == 2
    assert text in done.stdout + done.stderr


# The whole way


class GatewayUser:
    """A user's way through a gateway."""

    def __init__(self, running: Gateway) -> None:
        self.running = running
        self.token = running.login(running.command("users", "add", "alice", "--org", "acme").strip(), "acme")

    def start(self, model: Path, **more: Any) -> str:
        arguments = ("jobs", "register", str(model), "--org", "acme", "--arch", "classification", "--json")
        document = json.loads(self.running.command(*arguments))
        self.base = f"/api/v1/orgs/acme/experiments/{document['experiment_id']}"
        body = {"parent_id": document["job_id"], **more}
        got = self.running.ask("POST", f"{self.base}/inference_microservice/start", body, self.token)
        assert got.status == 200, got.body
        return str(got.json["job_id"])

    def path(self, job: str, verb: str) -> str:
        return f"{self.base}/jobs/{job}/inference_microservice/{verb}"

    def ask(self, method: str, job: str, verb: str, body: Any = None) -> Any:
        return self.running.ask(method, self.path(job, verb), body, self.token)

    def until_loaded(self, job: str) -> dict[str, Any]:
        return self.running.until_loaded(self.path(job, "status"), self.token)

    def status_of(self, job: str) -> str:
        return str(self.running.ask("GET", f"{self.base}/jobs/{job}", token=self.token).json["status"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    """Pods find `headrace` on the path, as they would in our image."""
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch, KubernetesServer(folder / "server") as server:
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        with FakeKubelet(server, folder / "kubelet", networks=True) as kubelet:
            yield server
            assert not kubelet.errors, "\n".join(kubelet.errors[:3])


@pytest.mark.platform
def test_the_whole_way_on_kubernetes(cluster: KubernetesServer, tmp_path: Path) -> None:
    before = cluster.resources()
    port = free_port()
    arguments = ["--platform", "kubernetes", "--host", "0.0.0.0", "--insecure", "--port", str(port)]
    arguments += ["--callback-url", f"http://{HOST_ADDRESS}:{port}"]
    # A gateway outside of the cluster, which the fake gives addresses to.
    settings = {"kubeconfig": cluster.kubeconfig, "service_type": "LoadBalancer", "shm_size": "1Gi"}
    for name, value in settings.items():
        arguments += ["--platform-setting", f"{name}={value}"]
    with gateway(tmp_path, *arguments) as running:
        walk = GatewayUser(running)
        job = walk.start(onnx_classifier(tmp_path / "model"), docker_env_vars={"HF_TOKEN": TOKEN})
        reported = walk.until_loaded(job)
        assert (reported["pod_name"], reported["pod_status"], reported["status"]) == (
            f"ims-{job}-0",
            "Running",
            "healthy",
        )
        got = walk.ask("POST", job, "inference", {"images": [data_url(png())]})
        assert (got.status, got.json["status"]) == (200, "completed"), got.body
        assert walk.ask("POST", job, "inference", {"images": "no"}).status == 400
        _look_for_secrets(cluster, job, running)

        # A gateway that is killed finds its service again.
        running.end(9)
        running.start(*arguments)
        assert walk.until_loaded(job)["pod_name"] == f"ims-{job}-0"
        assert walk.ask("POST", job, "stop").json["status"] == "stopped"
        assert walk.ask("GET", job, "status").status == 404
        assert walk.status_of(job) == "Done"
        eventually(lambda: cluster.resources() == before)  # controllers remove what the Service leaves behind

        # A model that cannot be loaded is told of by the service itself, and nothing stays behind.
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "model.onnx").write_bytes(b"no model")
        job = walk.start(broken)
        eventually(lambda: walk.status_of(job) == "Error")
        reported = walk.ask("GET", job, "status").json
        assert reported["model_load_error"] and reported["pod_status"] == "Failed"
        eventually(lambda: cluster.resources() == before)


def _look_for_secrets(cluster: KubernetesServer, job: str, running: Gateway) -> None:
    workload = cluster.client.get(apps_v1.StatefulSet, f"ims-{job}", namespace="default")
    assert workload.metadata.labels["org"] == "acme" and workload.metadata.labels["app"] == "ims"
    assert cluster.client.get(core_v1.Service, f"ims-svc-{job}", namespace="default")
    secret = cluster.client.get(core_v1.Secret, f"tao-creds-{job}", namespace="default").data
    assert base64.b64decode(secret["HF_TOKEN"]).decode() == TOKEN
    key = base64.b64decode(secret["TAO_ADMIN_KEY"]).decode()
    shown = cluster.kubectl("get", "statefulsets,pods,services,events", "-A", "-o", "yaml") + running.log
    commands = b"".join(_words(pid) for pid in Path("/proc").iterdir() if pid.name.isdigit())
    for item in (TOKEN, key):
        assert item not in shown and item.encode() not in commands


def _words(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


STAND_IN = b'''#!/usr/bin/python3
"""In the place of our program: its routes, and whether it was told what a job says."""
import http.server, json, os, signal, sys

job = json.loads(os.environ["HEADRACE_JOB"])
there = os.path.exists(job["specs"]["model_path"])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"job_id": job["job_id"], "status": "healthy", "model_loaded": there})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer({"status": "completed", "results": {"token": os.environ["HF_TOKEN"], "words": sys.argv}})

    def answer(self, body):
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

port = int(sys.argv[sys.argv.index("--port") + 1])
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
print("serving", flush=True)
http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()
'''


def _image() -> bytes:
    buffer = io.BytesIO(root_tar())
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        entry = tarfile.TarInfo("usr/bin/headrace")
        entry.size, entry.mode = len(STAND_IN), 0o755
        tar.addfile(entry, io.BytesIO(STAND_IN))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    # Before anything is begun: an engine that is refused its start must not take another's rules away at its end.
    if subprocess.run(["pgrep", "-x", "dockerd"], capture_output=True).returncode == 0:
        pytest.fail("another Docker engine runs on this machine: stop it first")
    with docker_engine() as started:
        yield started


@pytest.mark.platform
@pytest.mark.worker("containers")
def test_the_whole_way_on_docker(engine: DockerEngine, tmp_path: Path) -> None:
    engine.docker("import", "--change", "ENV PATH=/usr/bin:/bin", "-", "headrace-test/headrace:1", input=_image())
    arguments = ["--platform", "local-docker", "--image", "headrace-test/headrace:1", "--no-gpus"]
    arguments += ["--platform-setting", f"host={engine.host}", "--platform-setting", "network=bridge"]
    before = engine.resources()
    with gateway(tmp_path, *arguments) as running:
        walk = GatewayUser(running)
        job = walk.start(onnx_classifier(tmp_path / "model"), docker_env_vars={"HF_TOKEN": TOKEN})
        reported = walk.until_loaded(job)
        assert (reported["pod_name"], reported["pod_status"]) == (job, "Running")
        got = walk.ask("POST", job, "inference", {"images": []})
        assert got.json["results"]["token"] == TOKEN and "--disable_auto_deletion" in got.json["results"]["words"]
        assert TOKEN not in engine.docker("inspect", job) and TOKEN not in running.log
        # One that others have started there is not the gateway's to end.
        other = "5c1d3e70-9a64-4a0e-9c55-0d2f6f6f9b11"
        engine.docker(
            "run", "-d", "--name", other, "--label", f"headrace.job={other}", "headrace-test/headrace:1", "sleep", "300"
        )
        engine.docker("kill", job)
        eventually(lambda: walk.status_of(job) == "Error")
        assert walk.ask("GET", job, "status").json["pod_status"] == "Failed"
        job = walk.start(onnx_classifier(tmp_path / "second"), docker_env_vars={"HF_TOKEN": TOKEN})
        walk.until_loaded(job)
        assert walk.ask("POST", job, "stop").status == 200
        assert other in engine.docker("ps", "--format", "{{.Names}}").split()
        engine.docker("rm", "--force", other)
    assert engine.resources() == before
