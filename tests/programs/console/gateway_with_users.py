# SPDX-License-Identifier: Apache-2.0
"""A real gateway with users of each role and a trained model, for tests of its console.

with gateway_with_users(folder) as used:
    tab = used.tab(browser, "alice")
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
from console_tab import Tab, aside
from gateway_process import Gateway, GatewayAnswer, gateway
from picture_models import onnx_classifier

ORG = "acme"
_MEAN = """
<ir_version: 8, opset_import: ["" : 17]>
mean (float[batch, 2] X) => (float[batch, 1] Y) { Y = ReduceMean <axes = [1], keepdims = 1> (X) }
"""
_ADMIN = re.compile(r"nvapi-[A-Za-z0-9_-]{64}")


class GatewayWithUsers:
    """See the module."""

    def __init__(self, running: Gateway, folder: Path) -> None:
        self.running = running
        self.folder = folder
        self.url = f"http://127.0.0.1:{running.port}"
        self.keys = {
            "alice": self.command("users", "add", "alice", "--org", ORG).strip(),
            "victor": self.command("users", "add", "victor", "--org", ORG, "--role", "viewer").strip(),
            "admin": _ADMIN.findall(running.log)[0],
        }
        self.token = running.login(self.keys["alice"], ORG)
        self.experiment, self.parent = self.register(onnx_classifier(folder / "model"), "colours")

    def command(self, *words: str) -> str:
        """What a command beside the gateway prints."""
        return aside(lambda: self.running.command(*words))

    def register(self, model: Path, name: str) -> tuple[str, str]:
        """A trained model: the ids of its experiment and its job."""
        arguments = ("jobs", "register", str(model), "--org", ORG, "--arch", "classification", "--name", name, "--json")
        document = json.loads(self.command(*arguments))
        return document["experiment_id"], document["job_id"]

    def begin(self, name: str, items: int) -> str:
        """A batch over so many items, one at a time; its id."""
        folder = self.folder / "models"
        model, given = folder / "mean.onnx", folder / f"{name}.jsonl"
        onnx.save(onnx.parser.parse_model(_MEAN), model)
        given.write_text('{"X": [1, 2]}\n' * items)
        experiment, parent = self.register(model, f"mean of {name}")
        specs = {"input": str(given), "output": str(folder / f"{name}-results.jsonl"), "batch_size": 1, "in_flight": 1}
        body = {"action": "inference", "parent_job_id": parent, "name": name, "specs": specs}
        got = self.running.ask("POST", f"/api/v1/orgs/{ORG}/experiments/{experiment}/jobs", body, self.token)
        assert got.status == 200, got.body
        return str(got.json)

    def ask(self, method: str, path: str, body: Any = None) -> GatewayAnswer:
        """A call of the job API, below v2 of the organisation, by alice."""
        return self.running.ask(method, f"/api/v2/orgs/{ORG}/{path}", body, self.token)

    def start(self) -> str:
        """A service of the model that loads; its id."""
        path = f"/api/v1/orgs/{ORG}/experiments/{self.experiment}/inference_microservice/start"
        got = self.running.ask("POST", path, {"parent_id": self.parent}, self.token)
        assert got.status == 200, got.body
        return str(got.json["job_id"])

    def status(self, job: str) -> str:
        return str(self.ask("GET", f"jobs/{job}").json["status"])

    def tab(self, browser: Any, who: str, place: str = "", **options: Any) -> Tab:
        """A tab in which somebody is logged in."""
        tab = Tab(browser, self.url, **options)
        page = tab.open(place)
        log_in(page, self.keys[who])
        page.get_by_role("button", name="Log out").wait_for()
        return tab


def log_in(page: Any, key: str, org: str = ORG) -> None:
    page.get_by_label("Organisation").fill(org)
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")


@contextmanager
def gateway_with_users(folder: Path) -> Iterator[GatewayWithUsers]:
    """Nothing of it is left at the end."""
    models = folder / "models"
    models.mkdir()
    with gateway(folder, "--models-dir", str(models)) as running:
        yield GatewayWithUsers(running, folder)
