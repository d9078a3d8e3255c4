# SPDX-License-Identifier: Apache-2.0
"""`headrace ray` with a fake Ray: `FakeServe` does what a test says. The real one is in `tests/platforms`."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from headrace.fleet.ray_serve import cluster
from support.programs import Finished, run

_TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:digits:headrace.initialize_and_get_metadata() (pid=1, ip=10.0.0.7)
  File "headrace/fleet/ray_serve/server_process.py", line 165, in find_model
headrace.core.errors.NotFound: model digits: /mnt/models/digits is not on node gpu02: put the files there
"""


class FakeServe(ModuleType):
    """In place of `ray.serve`: applications go through `states`, one at each look."""

    def __init__(self) -> None:
        super().__init__("ray.serve")
        self.applications: dict[str, Any] = {}
        self.states = ["DEPLOYING", "RUNNING"]
        self.message = ""
        self.proxies: dict[str, str] = {}
        self.options: dict[str, Any] = {}
        self.http: dict[str, Any] = {}
        self.deleted: list[str] = []
        self.taken = ""
        self.slow_to_delete = False
        self.exceptions = SimpleNamespace(RayServeException=type("RayServeException", (Exception,), {}))

    def deployment(self, kind: type, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(bind=lambda content: content)

    def RunTarget(self, target: Any, name: str, route_prefix: str) -> Any:  # noqa: N802
        return SimpleNamespace(target=target, name=name, route_prefix=route_prefix)

    def start(self, http_options: dict[str, Any]) -> None:
        self.http, self.proxies = http_options, {"node": "HEALTHY"}

    def run_many(self, targets: list[Any], **options: Any) -> None:
        assert options["wait_for_applications_running"] is False
        for target in targets:
            if target.route_prefix == self.taken:
                raise self.exceptions.RayServeException
            self.add(target.name)

    def add(self, name: str, deployment: str = "headrace") -> None:
        states = {"RUNNING": 1, "STARTING": 0}
        part = SimpleNamespace(message=self.message, replica_states=states)
        self.applications[name] = SimpleNamespace(status="DEPLOYING", message="", deployments={deployment: part})

    def status(self) -> Any:
        for application in self.applications.values():
            application.status = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return SimpleNamespace(applications=dict(self.applications), proxies=self.proxies)

    def delete(self, name: str, _blocking: bool) -> None:
        assert not _blocking
        self.deleted.append(name)
        if not self.slow_to_delete:
            del self.applications[name]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServe]:
    fake = FakeServe()
    ray: Any = ModuleType("ray")
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "memory": 1e12}}]
    ray.serve, ray.__version__ = fake, "2.60.0"
    ray.exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
    ray.init = lambda **options: None
    ray.shutdown = lambda: None
    ray.nodes = lambda: nodes
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", fake)
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.0)
    levels = {name: logging.getLogger(name).level for name in ("ray", "ray.serve")}
    yield fake
    sys.modules.pop("headrace.fleet.ray_serve.application", None)  # it has the fake in it
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def file(name: str = "digits", **engine: Any) -> Path:
        storage = {"storageUri": "local:///models/digits", "path": "/mnt/models/digits"}
        model = {"modelFormat": {"name": "onnx"}, "storage": storage}
        service = {"model": {"name": "digits"}, "engine": engine}
        documents = [
            {"apiVersion": "ome.io/v1beta1", "kind": kind, "metadata": {"name": title}, "spec": spec}
            for kind, title, spec in (("ClusterBaseModel", "digits", model), ("InferenceService", name, service))
        ]
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump_all(documents))
        return path

    return file


def ray(*words: str | Path) -> Finished:
    return run("ray", *words, env={"RAY_ADDRESS": ""})


def test_a_service_is_deployed_and_its_address_printed(serve: FakeServe, write: Callable[..., Path]) -> None:
    done = ray("deploy", write(minReplicas=2), "--port", "8123")
    assert (done.returncode, done.stdout) == (0, "digits is ready: http://127.0.0.1:8123/digits\n")
    assert serve.http == {"host": "127.0.0.1", "port": 8123}
    assert serve.options["autoscaling_config"]["min_replicas"] == 2


def test_a_second_service_uses_the_proxies_that_run(serve: FakeServe, write: Callable[..., Path]) -> None:
    serve.proxies = {"node": "HEALTHY"}
    done = ray("deploy", write(), "--route-prefix", "/", "--json")
    assert json.loads(done.stdout) == [{"name": "digits", "route_prefix": "/", "url": ""}]


def test_a_service_that_cannot_start_is_removed_and_the_reason_printed(
    serve: FakeServe, write: Callable[..., Path]
) -> None:
    serve.states, serve.message = ["DEPLOYING", "DEPLOY_FAILED"], _TRACEBACK
    done = ray("deploy", write())
    assert done.returncode == 1 and serve.deleted == ["digits"]
    assert done.stderr.splitlines()[-1] == (
        "error: digits cannot start: model digits: /mnt/models/digits is not on node gpu02: put the files there"
    )


def test_an_update_that_cannot_start_removes_nothing(serve: FakeServe, write: Callable[..., Path]) -> None:
    serve.add("digits")
    serve.states, serve.message = ["DEPLOY_FAILED"], _TRACEBACK
    assert ray("deploy", write()).returncode == 1 and serve.deleted == []


def test_a_service_that_is_not_ready_in_time_is_an_error(serve: FakeServe, write: Callable[..., Path]) -> None:
    serve.states = ["DEPLOYING"]
    resources = {"limits": {"nvidia.com/gpu": "2"}}
    done = ray("deploy", write(runner={"resources": resources}), "--timeout", "0")
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "is not ready after 0 seconds" in line and "GPU 2" in line


def test_an_application_of_others_is_left_alone(serve: FakeServe, write: Callable[..., Path]) -> None:
    serve.add("digits", deployment="theirs")
    done = ray("deploy", write())
    assert done.returncode == 1 and "was not deployed by Headrace" in done.stderr
    assert ray("status").stdout.startswith("no services")
    done = ray("delete", "digits")
    assert done.returncode == 1 and "has deployed no service digits" in done.stderr and serve.deleted == []


def test_a_path_of_another_application_is_refused(serve: FakeServe, write: Callable[..., Path]) -> None:
    serve.taken = "/taken"
    done = ray("deploy", write(), "--route-prefix", "/taken")
    assert (
        done.returncode == 1 and "another application has the path /taken, choose one by --route-prefix" in done.stderr
    )


def test_services_are_listed_and_deleted(serve: FakeServe) -> None:
    serve.add("digits")
    serve.states = ["RUNNING"]
    head, row = ray("status").stdout.splitlines()
    assert head.split() == ["NAME", "STATE", "REPLICAS", "MESSAGE"] and row.split() == [
        "digits",
        "RUNNING",
        "1",
        "running",
    ]
    assert json.loads(ray("status", "--json").stdout)[0]["replicas"] == {"RUNNING": 1}
    assert ray("delete", "digits").stdout == "digits deleted\n" and serve.deleted == ["digits"]


def test_a_service_that_is_not_gone_in_time_is_an_error(serve: FakeServe) -> None:
    serve.add("digits")
    serve.slow_to_delete = True
    done = ray("delete", "digits", "--timeout", "0")
    assert done.returncode == 1 and "digits is not deleted after 0 seconds" in done.stderr


def test_what_has_no_meaning_on_ray_is_refused_before_the_cluster_is_asked(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write(canaryTrafficPercent=10, scaleMetric="cpu")
    done = ray("deploy", path)
    assert done.returncode == 1
    canary, metric = done.stderr.splitlines()
    assert (
        canary.startswith(f"error: {path}:") and "spec.engine.canaryTrafficPercent: is not supported on Ray" in canary
    )
    assert "spec.engine.scaleMetric: cpu is not supported on Ray" in metric


def test_a_missing_extra_is_named(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = ray("deploy", write())
    line = "error: a Ray cluster needs the extra \"ray\": pip install 'headrace[ray]'\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("address", ["http://10.0.0.7:8265", "10.0.0.7", "10.0.0.7:70000", "local", "ray://:x"])
def test_what_is_no_address_of_a_cluster_is_refused(serve: FakeServe, address: str) -> None:
    done = ray("status", "--address", address)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


def test_an_address_where_nothing_listens_is_refused_at_once(serve: FakeServe) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        done = ray("status", "--address", address)
    assert done.returncode == 1 and f"nothing listens at {address}" in done.stderr


def test_no_cluster_on_this_machine_is_an_error_with_the_next_step(serve: FakeServe) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError

    sys.modules["ray"].init = init  # type: ignore[attr-defined]
    done = ray("status")
    assert (
        done.returncode == 1 and "no Ray cluster runs on this machine: start one with `ray start --head`" in done.stderr
    )


@pytest.mark.parametrize("words", [("--route-prefix", "digits"), ("--route-prefix", "/both")])
def test_a_route_prefix_is_for_one_service_and_begins_with_a_slash(
    serve: FakeServe, write: Callable[..., Path], words: tuple[str, ...]
) -> None:
    more = [write("second")] if words[1] == "/both" else []
    done = ray("deploy", write(), *more, *words)
    assert done.returncode == 2 and "--route-prefix" in done.stderr and not serve.applications


@pytest.mark.parametrize("files", ["", "missing.yaml", ["missing.yaml"]])
def test_an_application_object_names_the_problems_of_its_files(serve: FakeServe, files: Any) -> None:
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.ray_serve.application import build

    with pytest.raises(InvalidArgument, match=r"missing\.yaml|no InferenceService"):
        build({"files": files})


def test_an_application_object_is_one_service(serve: FakeServe, write: Callable[..., Path]) -> None:
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.ray_serve.application import build

    assert build({"files": [str(write())]})["name"] == "digits"
    with pytest.raises(InvalidArgument, match="an application is one InferenceService, and the files have 2"):
        build({"files": f"{write()}, {write('second')}"})
