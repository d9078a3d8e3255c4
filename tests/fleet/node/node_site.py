# SPDX-License-Identifier: Apache-2.0
"""Headrace in a cluster of one real node, a service of it, and clients that count what becomes of each request."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from support.example_models import example_models
from support.kubernetes_node import KubernetesNode
from support.node_image import IMAGE
from support.waiting import eventually

HEADRACE = Path(sys.executable).parent / "headrace"
SYSTEM = "headrace-system"
MODELS = "/mnt/models"
PATIENCE = 400.0
"""Seconds for pods: on a busy machine a server imports its packages for a minute."""
SMALL = {"name": "ome-container", "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}}}
REQUEST = json.dumps(
    {"inputs": [{"name": "PIXELS", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}]}
).encode()


class NodeSite:
    """kubectl and headrace for a node where Headrace is installed by its own manifests."""

    def __init__(self, node: KubernetesNode) -> None:
        self.node = node

    def install(self) -> None:
        """What a user does: the manifests, the runtimes, a model on the node."""
        shutil.copytree(example_models() / "digits", self.node.folder / "mnt" / "models" / "digits")
        # kubectl's own account of a pod's user must be able to read it, and pytest's folders are private.
        subprocess.run(["chmod", "-R", "a+rX", self.node.folder / "mnt"], check=True)
        manifests = ("operator", "manifests", "--image", IMAGE, "--activator-replicas", "1")
        self.node.kubectl("apply", "--server-side", "-f", "-", input=self.headrace(*manifests))
        eventually(lambda: self.apply_text(self.headrace(*manifests, "--runtimes")), within=PATIENCE)
        for program in (
            "deployment/headrace-operator",
            "deployment/headrace-activator",
            "daemonset/headrace-model-agent",
        ):
            self.node.kubectl("--namespace", SYSTEM, "rollout", "status", program, f"--timeout={PATIENCE:g}s")
        model = {
            "apiVersion": "ome.io/v1beta1",
            "kind": "ClusterBaseModel",
            "metadata": {"name": "digits"},
            "spec": {
                "modelFormat": {"name": "onnx"},
                "storage": {"storageUri": f"local://{MODELS}/digits", "path": f"{MODELS}/digits"},
            },
        }
        eventually(lambda: self.apply_text(yaml.safe_dump(model)), within=PATIENCE)

    def apply_text(self, text: str) -> bool:
        """Whether the API server has taken it; it may not know the kinds yet, or not reach the webhook."""
        try:
            self.node.kubectl("apply", "-f", "-", input=text)
        except RuntimeError:
            return False
        return True

    def headrace(self, *words: str) -> str:
        """What the headrace command prints, for this cluster."""
        done = subprocess.run(
            [HEADRACE, *words],
            capture_output=True,
            text=True,
            env={"KUBECONFIG": str(self.node.kubeconfig), "PATH": "/usr/bin:/bin", "HOME": str(self.node.folder)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def service(self, name: str, annotations: dict[str, str] | None = None, **engine: Any) -> None:
        """Apply a service of the model, whose pods ask for little."""
        document = {
            "apiVersion": "ome.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": "default", "annotations": annotations or {}},
            "spec": {"model": {"name": "digits"}, "engine": {"runner": SMALL, **engine}},
        }
        self.node.kubectl("apply", "-f", "-", input=yaml.safe_dump(document))

    def runner(self, revision: str) -> dict[str, Any]:
        """The container of a service, told apart by a variable."""
        return {**SMALL, "env": [{"name": "REVISION", "value": revision}]}

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return dict(json.loads(self.node.kubectl("get", kind, name, "-o", "json")))

    def names(self, kind: str, selector: str = "") -> list[str]:
        selected = ("--selector", selector) if selector else ()
        return self.node.kubectl("get", kind, *selected, "-o", "name").split()

    def condition(self, name: str, condition_type: str = "Ready") -> str:
        """The status of a service's condition."""
        for condition in self.get("inferenceservice", name).get("status", {}).get("conditions", ()):
            if condition["type"] == condition_type:
                return str(condition["status"])
        return ""

    def await_ready(self, name: str) -> None:
        eventually(lambda: self.condition(name) == "True", within=PATIENCE, message=lambda: self.state(name))

    def await_revision(self, name: str, revision: str, pods: int = 1) -> None:
        """Wait until only pods of this revision are there, all ready."""
        eventually(lambda: self.revisions(name) == {revision: pods}, within=PATIENCE, message=lambda: self.state(name))

    def revisions(self, name: str) -> Counter[str]:
        """How many ready pods there are of each value of REVISION; a pod that is not ready or ends counts as none."""
        found: Counter[str] = Counter()
        listed = json.loads(
            self.node.kubectl("get", "pods", "-l", f"ome.io/inferenceservice={name},component=engine", "-o", "json")
        )
        for pod in listed["items"]:
            conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
            env = pod["spec"]["containers"][0].get("env", ())
            value = next((each.get("value", "") for each in env if each["name"] == "REVISION"), "")
            ready = conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
            found[value if ready else "none"] += 1
        return found

    def state(self, name: str) -> str:
        """What a user would look at, for the message of a failure."""
        pods = self.node.kubectl("get", "pods", "-A", "-o", "wide", check=False)
        return pods + self.headrace("describe", name, "--kube") + self.logs()

    def logs(self) -> str:
        return self.node.kubectl(
            "--namespace", SYSTEM, "logs", "deployment/headrace-operator", "--tail=20", check=False
        )

    def address(self, service: str) -> str:
        """The cluster's address of a Service: kube-proxy brings connections to it to a pod."""
        return str(self.get("service", service)["spec"]["clusterIP"])


class Clients:
    """Threads that ask a service until they are stopped: half of them with one connection for each request."""

    def __init__(self, site: NodeSite, service: str, each: int = 2) -> None:
        self.host = site.address(service)
        self.path = f"/v2/models/{service}/infer"
        self.answered: Counter[str] = Counter()
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(kind,)) for kind in ("keep-alive", "new connection") * each
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *told: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def total(self) -> int:
        return sum(self.answered.values())

    def wait_for(self, more: int) -> None:
        """Until there are so many more answers: what has just happened is felt by requests, too."""
        due = self.total() + more
        eventually(lambda: self.total() >= due, within=PATIENCE, message=lambda: str(self))

    def __str__(self) -> str:
        return f"answered: {dict(self.answered)}, failed: {len(self.failed)} {self.failed[:5]}"

    def _run(self, kind: str) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._stop.wait(0.01):
            if connection is None:
                connection = http.client.HTTPConnection(self.host, 8080, timeout=120)
            try:
                headers = {"content-type": "application/json"}
                if kind == "new connection":
                    headers["connection"] = "close"
                connection.request("POST", self.path, REQUEST, headers)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200 or b"PROBABILITIES" not in body:
                    self.failed.append(f"{kind}: {answer.status} {body[:200]!r}")
                else:
                    self.answered[kind] += 1
                closing = answer.will_close
            except (OSError, http.client.HTTPException) as error:
                self.failed.append(f"{kind}: {error!r}")
                closing = True
            if closing:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()
