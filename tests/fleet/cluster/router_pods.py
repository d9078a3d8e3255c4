# SPDX-License-Identifier: Apache-2.0
"""Pods of a cluster without nodes: those of the front are real `headrace router` processes, each with its own address.

Engines are ready as soon as they are there. Services do not work without nodes, so a front's file gets the address
of a server of the test's for each of them; all else in it is the operator's.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from controller_site import Site
from lightkube import ApiError

_PROGRAM = "import typer; from headrace.cli.router import router; typer.run(router)"
_SERVICE = re.compile(r"http://([a-z0-9-]+)\.[^:,]+:\d+")


@contextmanager
def router_run(config: Path, kubeconfig: Path) -> Iterator[int]:
    """`headrace router --config`: its port, once it answers."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, "--config", str(config)],
        stdout=subprocess.PIPE,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
    )
    assert process.stdout is not None
    try:
        text = b""
        while not (found := re.search(rb"routing http://127\.[\d.]+:(\d+) by", text)):
            ready, _, _ = select.select([process.stdout], [], [], 60)
            piece = os.read(process.stdout.fileno(), 65536) if ready else b""
            assert piece, text
            text += piece
        yield int(found[1])
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


class Nodes:
    """Runs the pods of one service for as long as it is entered. `behind`: the address of each Service's server."""

    def __init__(self, site: Site, service: str, behind: Mapping[str, str], folder: Path) -> None:
        self._site = site
        self._service = service
        self._behind = behind
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes")
        self._fronts: dict[str, ExitStack] = {}
        self._numbers = iter(range(1, 250))
        self.addresses: dict[str, str] = {}
        """Of the fronts that answer, by the names of their pods."""
        self.failure: BaseException | None = None

    def __enter__(self) -> Nodes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for name in list(self._fronts):
            self._end(name)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.2):
                pods = {each["metadata"]["name"]: each for each in self._site.pods(self._service)}
                for name in [each for each in self._fronts if each not in pods]:
                    self._end(name)
                for name, pod in pods.items():
                    if name not in self.addresses and "podIP" not in pod["status"]:
                        self._begin(name, pod)
                    elif name in self._fronts:
                        self._config(pod, name, self.addresses[name])  # the kubelet renews the mounted file
        except BaseException as error:
            self.failure = error

    def _begin(self, name: str, pod: Any) -> None:
        address = f"127.77.0.{next(self._numbers)}"
        if pod["metadata"]["labels"].get("component") == "front":
            config = self._config(pod, name, address)
            if config is None:
                return
            stack = self._fronts[name] = ExitStack()
            stack.enter_context(router_run(config, self._site.server.kubeconfig))
            self.addresses[name] = address
        conditions = [{"type": each, "status": "True"} for each in ("PodScheduled", "Initialized", "Ready")]
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        with suppress(ApiError):  # it may be gone again
            self._site.server.mark(name, status, pod["metadata"]["namespace"])

    def _config(self, pod: Any, name: str, address: str) -> Path | None:
        """None while there is no ConfigMap, as for a kubelet: its front may have been taken away since."""
        map_name = next(each["configMap"]["name"] for each in pod["spec"]["volumes"] if "configMap" in each)
        found = self._site.fetch(f"/api/v1/namespaces/default/configmaps/{map_name}")
        if found is None:
            return None
        said = json.loads(found["data"]["router.yaml"])
        said["backends"] = [_SERVICE.sub(lambda each: self._behind[each[1]], text) for text in said["backends"]]
        made = self._folder / f"{name}.yaml"
        text = json.dumps({**said, "host": address, "grace_seconds": 3})
        if not made.exists() or made.read_text() != text:
            fresh = made.with_suffix(".new")
            fresh.write_text(text)
            fresh.replace(made)
        return made

    def _end(self, name: str) -> None:
        self.addresses.pop(name, None)
        self._fronts.pop(name).close()
