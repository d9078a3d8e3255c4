# SPDX-License-Identifier: Apache-2.0
"""The fleet of this machine as its user types it: `headrace up`, and the sample files of the operator, unchanged.

The verbs without processes: `test_simulated_verbs.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_site import document

from headrace.platforms.kubernetes_client.objects import get_list
from support.llm_models import tiny_llama
from support.ports import free_port
from support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # it starts many programs, one after the other
]
HEADRACE = Path(sys.executable).parent / "headrace"
SAMPLES = resources.files("headrace.fleet").joinpath("samples")


class Machine:
    """A `headrace up`, and the verbs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._environ = {**os.environ, "HEADRACE_STATE_DIR": str(root / "state"), "NO_COLOR": "1", "TERM": "dumb"}
        self._log = (root / "up.log").open("wb")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        arguments = [HEADRACE, "up", "--port", str(port), "--models-root", str(root / "models"), "--log-format", "text"]
        self.process = subprocess.Popen(arguments, env=self._environ, stdout=self._log, stderr=self._log)
        eventually(lambda: (root / "state" / "control.sock").exists())

    def run(self, *words: str | Path, code: int = 0, given: str = "") -> str:
        """What a verb prints."""
        done = subprocess.run(
            [HEADRACE, *words], env=self._environ, input=given, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def close(self) -> None:
        self.run("delete", "isvc", "digits", "tiny", "llama-chat", "--yes", "--ignore-not-found")
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(90)
        self._log.close()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    try:
        yield machine
        machine.close()
    finally:
        machine.process.kill()
        machine.process.wait()


def onnx_model(folder: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    folder.mkdir(parents=True)
    ends = [helper.make_tensor_value_info(name, kind, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "model.onnx")


def test_the_cpu_sample_runs_as_it_is(machine: Machine) -> None:
    from headrace.client import Client

    onnx_model(machine.root / "models" / "digits")
    completed = machine.run("apply", "-f", str(SAMPLES / "cpu.yaml"), "--wait", "--timeout", "180")
    assert "inferenceservice.ome.io/digits created" in completed and f"digits is ready: {machine.url}" in completed
    assert "unchanged" in machine.run("apply", "-f", str(SAMPLES / "cpu.yaml"))
    with Client(machine.url) as client:
        result: Any = client.infer("digits", {"x": np.array([[-1, 2, -3, 4]], np.float32)})
        np.testing.assert_array_equal(result["y"], [[0, 2, 0, 4]])
    table = machine.run("get", "isvc")
    assert machine.url in table and "headrace-cpu" in table and "1/1" in table
    shown = machine.run("describe", "isvc", "digits")
    assert "InferenceServiceReady" in shown and f"ask it at {machine.url}" in shown
    assert "listening" in machine.run("logs", "digits")
    assert "scaled to 2" in machine.run("scale", "digits", "--replicas", "2")
    eventually(lambda: "2/2" in machine.run("get", "isvc", "digits"))
    service = json.loads(machine.run("get", "isvc", "digits", "-o", "json"))
    assert [condition["type"] for condition in get_list(service, "status", "conditions")] == [
        "Ready",
        "IngressReady",
        "EngineReady",
        "LatestDeploymentReady",
    ]
    assert service["status"]["modelStatus"]["modelCopies"] == {"failedCopies": 0, "totalCopies": 2}
    assert "deleted" in machine.run("delete", "isvc", "digits", "--yes")
    assert not list((machine.root / "state" / "pods").iterdir())


def test_a_language_model_answers_the_openai_client(machine: Machine) -> None:
    openai = pytest.importorskip("openai", reason="needs openai")
    tiny_llama(machine.root / "models" / "tiny")
    spec = {
        "modelFormat": {"name": "safetensors", "version": "1.0.0"},
        "modelFramework": {"name": "transformers"},
        "modelArchitecture": "LlamaForCausalLM",
        "storage": {"storageUri": "vendor://tiny", "path": "/mnt/models/tiny"},
    }
    service = {"model": {"name": "tiny"}, "runtime": {"name": "headrace-cpu-formats"}, "engine": {"minReplicas": 1}}
    given = "\n---\n".join(
        json.dumps(item)
        for item in (document("ClusterBaseModel", "tiny", spec), document("InferenceService", "tiny", service))
    )
    result = machine.run("apply", "-f", "-", "--wait", "--timeout", "180", given=given)
    url = result.rpartition("tiny is ready: ")[2].split()[0]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        requests = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model="tiny", messages=requests, max_tokens=5, temperature=0)
        assert answer.usage.completion_tokens == 5
        pieces = list(
            client.chat.completions.create(model="tiny", messages=requests, max_tokens=5, temperature=0, stream=True)
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == answer.choices[0].message.content
    _measured_by_hand(machine, url)
    _measured_by_a_document(machine)
    machine.run("delete", "isvc", "tiny", "--yes")


def _measured_by_hand(machine: Machine, url: str) -> None:
    load = ("--scenario", "D(20,4)", "--scenario", "N(20,5)/(4,1)", "--concurrency", "1,2", "--max-requests", "3")
    page, numbers = machine.root / "tiny.html", machine.root / "tiny.json"
    shown = machine.run("bench", "--service", "tiny", *load, "--report", page, "--json", numbers)
    assert f"tiny at {url}" in shown and "N(20,5)/(4,1)" in shown
    document = json.loads(numbers.read_text())
    assert [run["answered"] for run in document["runs"]] == [3, 3, 3, 3]
    assert document["about"]["service"] == "default/tiny" and document["about"]["replicas"] == "1 of 1 ready"
    assert page.read_text().count("<svg") == 5 and "default/tiny" in page.read_text()
    assert "there is no InferenceService nobody" in machine.run("bench", "--service", "nobody", code=1)
    assert "add --service" in machine.run("bench", "tiny", "-n", "team", code=2)


def _measured_by_a_document(machine: Machine) -> None:
    results = machine.root / "numbers"
    spec = {
        "endpoint": {"inferenceService": {"name": "tiny", "namespace": "default"}},
        "task": "text-to-text",
        "trafficScenarios": ["D(20,4)"],
        "numConcurrency": [2],
        "maxTimePerIteration": 1,
        "maxRequestsPerIteration": 4,
        "outputLocation": {"storageUri": f"local://{results}"},
    }
    machine.run("apply", "-f", "-", given=json.dumps(document("BenchmarkJob", "tiny", spec)))
    eventually(lambda: "Completed" in machine.run("get", "benchmarkjobs", "tiny"))
    assert f"results are in {results}/tiny" in machine.run("describe", "benchmarkjob", "tiny")
    assert json.loads((results / "tiny" / "results.json").read_text())["runs"][0]["answered"] == 4
    assert "D(20,4)" in machine.run("logs", "benchmarkjob/tiny")
    assert "deleted" in machine.run("delete", "benchmarkjob", "tiny", "--yes")
    assert not list((machine.root / "state" / "benchmarks" / "default").iterdir())
