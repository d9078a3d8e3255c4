# SPDX-License-Identifier: Apache-2.0
"""An InferenceService on a real Ray cluster of two nodes on this machine, and what happens when parts of it are killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray_platform import RayCluster, ray_cluster, servers

from support import llm_models
from support.ports import free_port
from support.programs import Program
from support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.ray, pytest.mark.timeout(1800)]
LONG_SECONDS = 300.0
NAME = f"writer-{os.getpid()}"
"""Other tests may run on this machine."""


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llm_models.tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def write_service(folder: Path, model: Path, name: str = NAME, replicas: int = 2, **engine: Any) -> Path:
    """A file with a model and a service: nothing in it is about Ray."""
    documents = [
        {
            "apiVersion": "ome.io/v1beta1",
            "kind": "ClusterBaseModel",
            "metadata": {"name": "tiny"},
            "spec": {
                "modelFormat": {"name": "safetensors", "version": "1.0.0"},
                "modelFramework": {"name": "transformers", "version": "4.51.0"},
                "modelArchitecture": "LlamaForCausalLM",
                "modelParameterSize": "135M",
                "storage": {"storageUri": f"local://{model}", "path": "/mnt/models/tiny"},
            },
        },
        {
            "apiVersion": "ome.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "model": {"name": "tiny"},
                "runtime": {"name": "headrace-cpu-formats"},
                "engine": {
                    "minReplicas": replicas,
                    "maxReplicas": replicas,
                    "runner": {"resources": {"requests": {"cpu": "1", "memory": "256Mi"}}},
                    **engine,
                },
            },
        },
    ]
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


@pytest.fixture(scope="module")
def service(cluster: RayCluster, model: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a service with two replicas, one on each node."""
    path = write_service(tmp_path_factory.mktemp("service"), model)
    done = cluster.headrace("ray", "deploy", path, "--port", str(port))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{NAME} is ready: http://127.0.0.1:{port}/{NAME}\n"
    return f"/{NAME}"


@contextmanager
def post(
    port: int, path: str, tokens: int, *, stream: bool = False, model: str = NAME
) -> Iterator[http.client.HTTPResponse]:
    body = {"model": model, "prompt": "the quick", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_SECONDS)) as connection:
        connection.request("POST", f"{path}/v1/completions", json.dumps(body | {"stream": stream}))
        with connection.getresponse() as response:
            yield response


def text_of(port: int, path: str, model: str = NAME) -> str:
    with post(port, path, 12, model=model) as response:
        content = response.read()
    assert response.status == 200, content
    return str(json.loads(content)["choices"][0]["text"])


def is_answering(port: int, path: str) -> bool:
    try:
        with post(port, path, 1) as response:
            return response.status == 200
    except (OSError, http.client.HTTPException):
        return False


def outcome(port: int, path: str, tokens: int, stream: bool, model: str = NAME) -> str:
    """What a client is told: `complete`, a status, or that the response was cut."""
    try:
        with post(port, path, tokens, stream=stream, model=model) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    if response.status != 200:
        return str(response.status)
    if stream and b'data: {"error"' in content:
        return "told by an event"
    return "complete" if not stream or content.endswith(b"data: [DONE]\n\n") else "incomplete, and not told"


def child_commands(pid: int) -> str:
    """The command lines of a process's children."""
    return " ".join(" ".join(child.cmdline()) for child in psutil.Process(pid).children())


def states(cluster: RayCluster, name: str = NAME) -> dict[str, int]:
    done = cluster.headrace("ray", "status", "--json")
    assert done.returncode == 0, done.stderr
    return next((dict(item["replicas"]) for item in json.loads(done.stdout) if item["name"] == name), {})


def test_the_file_of_a_fleet_runs_on_two_nodes(
    cluster: RayCluster, service: str, port: int, model: Path, tmp_path: Path
) -> None:
    assert states(cluster) == {"RUNNING": 2} and len(set(servers(NAME).values())) == 2
    with Program(
        *("serve", "--model-path", model, "--model-name", NAME, "--http-port", "0", "--grpc-port", "0"),
        log=tmp_path / "log",
        ready="ready: ",
    ) as alone:
        expected = text_of(alone.port, "")
    for _ in range(6):
        assert text_of(port, service) == expected
    with post(port, service, 12, stream=True) as response:
        assert response.getheader("content-type", "").startswith("text/event-stream")
        events = [line for line in response.read().split(b"\n\n") if line]
    assert len(events) > 3 and events[-1] == b"data: [DONE]"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{service}/v2/models/{NAME}?x=1", timeout=60) as response:
        assert json.load(response)["name"] == NAME


def test_requests_of_killed_servers_get_an_error_and_replicas_are_replaced(
    cluster: RayCluster, service: str, port: int
) -> None:
    before = servers(NAME)
    with ThreadPoolExecutor(6) as pool, ExitStack() as stack:
        streams = [stack.enter_context(post(port, service, 4000, stream=True)) for _ in range(4)]
        started = [stream.readline() for stream in streams]
        assert all(line.startswith(b"data: ") for line in started)
        waiting = [pool.submit(outcome, port, service, 4000, False) for _ in range(2)]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(http.client.IncompleteRead):
                stream.read()
        assert {item.result(LONG_SECONDS) for item in waiting} <= {"503", "500"}

    def replaced() -> bool:
        now = servers(NAME)
        return len(now) == 2 and not now.keys() & before.keys() and not set(now.values()) & set(before.values())

    eventually(replaced, within=LONG_SECONDS)
    eventually(lambda: states(cluster) == {"RUNNING": 2}, within=LONG_SECONDS)
    text_of(port, service)


def test_a_killed_replica_takes_its_server_along(cluster: RayCluster, service: str, port: int) -> None:
    server, replica = next(iter(servers(NAME).items()))
    os.kill(replica, signal.SIGKILL)
    eventually(lambda: server not in servers(NAME), within=LONG_SECONDS)
    eventually(lambda: states(cluster) == {"RUNNING": 2}, within=LONG_SECONDS)
    assert server not in servers(NAME)


def test_a_killed_node_is_replaced_and_nothing_hangs(cluster: RayCluster, service: str, port: int) -> None:
    before = servers(NAME)
    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(outcome, port, service, 1500, number % 2 == 0) for number in range(8)]
        cluster.tell("kill")
        outcomes = [item.result(LONG_SECONDS) for item in results]
    assert "incomplete, and not told" not in outcomes
    eventually(lambda: is_answering(port, service), within=LONG_SECONDS)  # the other node
    cluster.tell("add")
    eventually(lambda: len(servers(NAME)) == 2 and servers(NAME).keys() != before.keys(), within=LONG_SECONDS)
    eventually(lambda: states(cluster) == {"RUNNING": 2}, within=LONG_SECONDS)
    text_of(port, service)


def test_a_model_that_is_missing_is_refused_by_name(cluster: RayCluster, service: str, tmp_path: Path) -> None:
    name = f"missing-{os.getpid()}"
    path = write_service(
        tmp_path, Path("/nowhere/tiny"), name, replicas=1, runner={"resources": {"requests": {"cpu": "0"}}}
    )
    cluster.headrace("ray", "delete", NAME)
    done = cluster.headrace("ray", "deploy", path)
    assert done.returncode == 1
    assert f"error: {name} cannot start: model tiny: /mnt/models/tiny is not on node" in done.stderr
    assert states(cluster, name) == {}


def test_a_replica_that_fits_on_no_node_is_named(cluster: RayCluster, model: Path, tmp_path: Path) -> None:
    name = f"large-{os.getpid()}"
    resources = {"limits": {"nvidia.com/gpu": "4"}, "requests": {"cpu": "1"}}
    # A replica that waits for resources is deleted after the time for open requests.
    engine = {"runner": {"resources": resources}, "terminationGracePeriodSeconds": 1}
    path = write_service(tmp_path, model, name, replicas=1, **engine)
    done = cluster.headrace("ray", "deploy", path, "--timeout", "3")
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert (
        "is not ready after 3 seconds" in line and f"no node of the cluster has what a replica of {name} needs" in line
    )
    assert "GPU 4" in line
    assert cluster.headrace("ray", "delete", name).returncode == 0


def test_a_deleted_service_answers_its_open_requests_first(
    cluster: RayCluster, model: Path, port: int, tmp_path: Path
) -> None:
    path = write_service(tmp_path, model, replicas=1)
    done = cluster.headrace("ray", "deploy", path, "--port", str(port))
    # Ray Serve ran before, on the proxies of the first service.
    assert done.returncode == 0 and done.stdout.startswith(f"{NAME} is ready: path /{NAME} of"), done.stderr
    other = write_service(tmp_path, model, f"other-{os.getpid()}", replicas=1)
    done = cluster.headrace("ray", "deploy", other, "--route-prefix", f"/{NAME}")
    assert done.returncode == 1 and f"another application has the path /{NAME}" in done.stderr
    with post(port, f"/{NAME}", 300, stream=True) as stream:
        stream.readline()
        assert cluster.headrace("ray", "delete", NAME).stdout == f"{NAME} deleted\n"
        assert stream.read().endswith(b"data: [DONE]\n\n")
    eventually(lambda: not servers(NAME), within=LONG_SECONDS)
    assert cluster.headrace("ray", "status").stdout.startswith("no services")


def test_an_application_object_for_serve(cluster: RayCluster, model: Path, port: int, tmp_path: Path) -> None:
    path = write_service(tmp_path, model, replicas=1)
    program = """
import sys, ray
from ray import serve
from headrace.fleet.ray_serve.application import build
ray.init(namespace="serve", log_to_driver=False)
serve.run(build({"files": [sys.argv[1]]}), name=sys.argv[2], route_prefix="/other")
"""
    done = cluster.python(program, path, NAME)
    assert done.returncode == 0, done.stderr
    text_of(port, "/other")
    assert cluster.headrace("ray", "delete", NAME).returncode == 0


def test_a_model_over_both_nodes_answers_as_one_server_and_comes_back_whole(
    cluster: RayCluster, model: Path, port: int, tmp_path: Path
) -> None:
    """A leader and a worker, which compute each token together: one is killed, then a node."""
    name = f"group-{os.getpid()}"
    member = {"runner": {"resources": {"requests": {"cpu": "1", "memory": "256Mi"}}}}
    path = write_service(tmp_path, model, name, replicas=1, leader=member, worker={"size": 1, **member}, runner=None)
    documents = list(yaml.safe_load_all(path.read_text()))
    documents[1]["spec"]["runtime"]["name"] = "headrace-multi-node"
    del documents[1]["spec"]["engine"]["runner"]
    path.write_text(yaml.safe_dump_all(documents))
    done = cluster.headrace("ray", "deploy", path, "--port", str(port), "--timeout", "1200")
    assert done.returncode == 0, done.stderr
    with Program(
        *("serve", "--model-path", model, "--model-name", name, "--http-port", "0", "--grpc-port", "0"),
        log=tmp_path / "log",
        ready="ready: ",
    ) as alone:
        expected = text_of(alone.port, "", name)

    def is_whole() -> bool:
        try:
            return text_of(port, f"/{name}", name) == expected
        except (OSError, http.client.HTTPException, AssertionError):
            return False

    assert is_whole()
    before = servers(name)
    assert len(before) == 2 and len(set(before.values())) == 2
    worker = next(pid for pid in before if "rank_stub" in child_commands(pid))
    with ThreadPoolExecutor(1) as pool:
        with post(port, f"/{name}", 1900, stream=True, model=name) as stream:
            assert stream.readline().startswith(b"data: ")
            running = pool.submit(outcome, port, f"/{name}", 1900, True, name)
            os.kill(worker, signal.SIGKILL)
            assert running.result(LONG_SECONDS) not in ("complete", "incomplete, and not told")
            try:
                assert b'data: {"error"' in stream.read()
            except http.client.IncompleteRead:
                pass  # it is cut, and the client knows
    eventually(lambda: not servers(name).keys() & before.keys(), within=LONG_SECONDS)  # the leader ends with its worker
    eventually(is_whole, within=LONG_SECONDS)
    before = servers(name)
    cluster.tell("kill")
    eventually(lambda: not servers(name).keys() & before.keys(), within=LONG_SECONDS)
    cluster.tell("add")
    eventually(is_whole, within=LONG_SECONDS)
    assert cluster.headrace("ray", "delete", name).returncode == 0
    eventually(lambda: not servers(name), within=LONG_SECONDS)


def test_a_service_that_is_not_there_is_named(cluster: RayCluster) -> None:
    done = cluster.headrace("ray", "delete", "nothing")
    assert done.returncode == 1 and "Headrace has deployed no service nothing to this cluster" in done.stderr
