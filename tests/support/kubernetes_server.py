# SPDX-License-Identifier: Apache-2.0
"""A real API server with its controllers for tests, made by `scripts/platforms/kubernetes.sh`: no kubelet, no scheduler.

`fake_kubelet.FakeKubelet` stands in for those two where pods have to run. Whoever wants a pod in a certain state without one
says so with `mark`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.decoders import decode_list
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources import apps_v1, batch_v1, core_v1
from lightkube.types import PatchType

SCRIPT = Path(__file__).parents[2] / "scripts" / "platforms" / "kubernetes.sh"
PATIENCE = httpx2.Timeout(120)
"""For an answer of the API server: on a busy machine it may take its time."""
HELD = (
    batch_v1.Job,
    apps_v1.StatefulSet,
    apps_v1.Deployment,
    apps_v1.ReplicaSet,
    core_v1.Pod,
    core_v1.Service,
    core_v1.Endpoints,
    core_v1.Secret,
    core_v1.ConfigMap,
    core_v1.PersistentVolumeClaim,
    core_v1.ServiceAccount,
    create_namespaced_resource(
        "discovery.k8s.io", "v1beta1", "EndpointSlice", "endpointslices"
    ),  # 1.20 has a beta alone
)
"""Kinds of which nothing may be left. Not Events: the API server forgets them by itself."""

# msgspec works out how to read a kind when it reads the first, and two threads that do so at once end the process. Here
# it is done before there is a thread.
for _kind in (*HELD, core_v1.Node):
    decode_list(b'{"metadata": {}, "items": []}', _kind)


class KubernetesServer:
    """etcd, kube-apiserver and kube-controller-manager with their state in a folder. Ready within about ten seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self._client: Client | None = None

    def start(self) -> KubernetesServer:
        # The script takes the kernel's free ports, which any client of this machine may have taken before the servers do.
        # (It stays as it is: its text is the key to what it has built.)
        for _ in range(3):
            result = subprocess.run([SCRIPT, "start", self.folder], capture_output=True, text=True)
            if "in use" not in result.stderr:
                break
            shutil.rmtree(self.folder)
        if result.returncode:
            raise RuntimeError(f"no API server ({result.stderr.strip()}); run {SCRIPT} install")
        self._until(lambda: self._exists(core_v1.ServiceAccount, "default"), "controllers that work")
        return self

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        subprocess.run([SCRIPT, "stop", self.folder], check=True)

    def freeze(self) -> None:
        """The API server takes connections and answers nothing, until `thaw`."""
        os.kill(self._pid(), signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid(), signal.SIGCONT)

    def kill_api(self) -> list[str]:
        """The end of the API server, with no word to anybody. The words to start it again."""
        pid = self._pid()
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        os.kill(pid, signal.SIGKILL)
        self._until(lambda: not _lives(pid), "the end of one")
        return arguments

    def start_api(self, words: list[str]) -> None:
        """Start it again where it was. Returns at once; it takes some seconds."""
        with (self.folder / "apiserver.log").open("ab") as log:
            started = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        (self.folder / "apiserver.pid").write_text(f"{started.pid}\n")
        # Whose child it is does not matter to `stop`; that it was not waited for must not be a warning.
        started.returncode = 0

    def _pid(self) -> int:
        return int((self.folder / "apiserver.pid").read_text())

    def __enter__(self) -> KubernetesServer:
        return self.start()

    def __exit__(self, *told: object) -> None:
        self.stop()

    @property
    def client(self) -> Client:
        """lightkube's, as the administrator."""
        if self._client is None:
            self._client = Client(KubeConfig.from_file(self.kubeconfig), field_manager="tests", timeout=PATIENCE)
        return self._client

    def kubectl(self, *arguments: str, input: str = "", check: bool = True) -> str:
        """What kubectl prints, as the administrator."""
        result = subprocess.run(
            [self.folder / "bin" / "kubectl", *arguments],
            input=input,
            capture_output=True,
            text=True,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)},
        )
        if check and result.returncode:
            raise RuntimeError(f"kubectl {arguments}: {result.stderr.strip()}")
        return result.stdout if not result.returncode else result.stdout + result.stderr

    def kubeconfig_of_nobody(self) -> Path:
        """A kubeconfig of the user `nobody`, who may do nothing until a Role is bound to them."""
        path = self.folder / "kubeconfig-nobody"
        path.write_text(self.kubeconfig.read_text().replace("admintoken", "nobodytoken"))
        return path

    def mark(self, pod: str, status: Mapping[str, Any], namespace: str = "default") -> None:
        """Say how a pod is, as its kubelet would: {"phase": "Running", "containerStatuses": [...], "conditions": [...]}."""
        patch = {"status": dict(status)}
        self.client.patch(core_v1.PodStatus, pod, patch, namespace=namespace, patch_type=PatchType.MERGE)

    def mark_ready(self, pod: str, namespace: str = "default") -> None:
        """Running, and its readiness probe passes."""
        conditions = [
            {"type": condition_type, "status": "True"}
            for condition_type in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        self.mark(pod, {"phase": "Running", "conditions": conditions}, namespace)

    def mark_failed(self, pod: str, exit_code: int = 1, reason: str = "Error", namespace: str = "default") -> None:
        """Ended, by its program's own doing or another's: `reason` OOMKilled."""
        container = self.client.get(core_v1.Pod, pod, namespace=namespace).spec.containers[0]
        ended = {"exitCode": exit_code, "reason": reason}
        status = {"name": container.name, "image": container.image, "imageID": "", "ready": False, "restartCount": 0}
        self.mark(
            pod, {"phase": "Failed", "containerStatuses": [{**status, "state": {"terminated": ended}}]}, namespace
        )

    def resources(self) -> set[str]:
        """Every object there is, of all namespaces, named."""
        return {
            f"{kind.__name__} {document.metadata.namespace}/{document.metadata.name}"
            for kind in HELD
            for document in self.client.list(kind, namespace="*")
        }

    def _exists(self, kind: Any, name: str) -> bool:
        try:
            self.client.get(kind, name, namespace="default")
        except ApiError as error:
            if error.status.code != 404:
                raise
            return False
        return True

    def _until(self, look: Any, what: str, seconds: float = 180.0) -> None:
        limit = time.monotonic() + seconds
        while not look():
            if time.monotonic() > limit:
                raise RuntimeError(f"the API server came without {what}; its logs are in {self.folder}")
            time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
