# SPDX-License-Identifier: Apache-2.0
"""A cluster of one real node for tests, run by `scripts/platforms/kubernetes_node.sh`: pods run, Services lead to them.

It has the images of `node_image`. This process reaches pods and Services by their own addresses; they reach nothing else.
It ends with the pipe to its standard input, also when this process is killed.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from lightkube.resources import core_v1

from support import node_image
from support.kubernetes_server import KubernetesServer
from support.waiting import eventually

SCRIPT = Path(__file__).parents[2] / "scripts" / "platforms" / "kubernetes_node.sh"
NODE = "node1"
_START_SECONDS = 420.0
"""All its programs on a machine that tests something else beside."""


class KubernetesNode(KubernetesServer):
    """A cluster with a node. Ready within about half a minute, with the images."""

    _process: subprocess.Popen[bytes]

    def start(self) -> KubernetesNode:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "run.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", SCRIPT, "run", self.folder], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        try:
            eventually(self._answers, within=_START_SECONDS)
            self._load_images()
            eventually(self.is_ready, within=_START_SECONDS)
            eventually(lambda: self._exists(core_v1.ServiceAccount, "default"), within=_START_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)

    def is_ready(self) -> bool:
        """Whether the node's kubelet says that pods can run."""
        return any(
            condition.type == "Ready" and condition.status == "True"
            for node in self.client.list(core_v1.Node)
            for condition in node.status.conditions or ()
        )

    def inside(self, *words: str) -> str:
        """What a program prints that runs in the node's namespaces."""
        first = subprocess.run(
            ["pgrep", "-f", f"kubernetes_node.sh node {self.folder} "], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        argv = ["nsenter", "--target", first, "--mount", "--net", "--pid", "--uts", "--ipc", *words]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"no node: {(self.folder / 'run.log').read_text()}; {SCRIPT} install")
        return self.kubeconfig.exists()

    def _load_images(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for write in (node_image.pause_archive, node_image.headrace_archive):
                archive = Path(folder) / "archive.tar"
                write(archive)
                self.inside("ctr", "--namespace", "k8s.io", "images", "import", str(archive))

    def freeze(self) -> Any:
        raise NotImplementedError("a node's API server is not stopped alone")

    kill_api = start_api = thaw = freeze
