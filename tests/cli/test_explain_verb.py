# SPDX-License-Identifier: Apache-2.0
"""`headrace explain`: text and JSON output, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from headrace.cli.explain import explain
from headrace.fleet.yaml_documents import parse

SERVICE = """\
apiVersion: ome.io/v1beta1
kind: InferenceService
metadata:
  name: llama-chat
spec:
  model:
    name: llama
  engine:
    minReplicas: 1
    maxReplicas: 4
    runner:
      env: [{name: LOG_LEVEL, value: debug}]
  router: {}
"""
CLUSTER = """\
apiVersion: ome.io/v1beta1
kind: ClusterBaseModel
metadata: {name: llama}
spec:
  modelFormat: {name: safetensors}
  modelArchitecture: LlamaForCausalLM
  storage: {storageUri: "hf://meta/llama", path: /models/llama}
---
apiVersion: ome.io/v1beta1
kind: ClusterServingRuntime
metadata: {name: mine}
spec:
  supportedModelFormats:
    - modelFormat: {name: safetensors}
      modelArchitecture: LlamaForCausalLM
      autoSelect: true
      priority: 9
  engineConfig:
    runner: {name: ome-container, image: "example.com/llm:1", ports: [{containerPort: 8080}]}
  routerConfig:
    runner: {name: router, image: "example.com/router:1", ports: [{containerPort: 8080}]}
"""


def run(*arguments: str | Path, input: str | None = None) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(explain)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "with").mkdir()
    (tmp_path / "with" / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "isvc.yaml").write_text(SERVICE)
    return tmp_path


def test_text_for_people(files: Path) -> None:
    result = run("-f", files / "isvc.yaml", "--with", files / "with")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "InferenceService default/llama-chat" in lines and "Model: llama" in lines
    assert any(line.startswith("mine: ") for line in lines)
    assert any(line.startswith("triton ") for line in lines)
    assert any(line.startswith("engine RawDeployment 1 to 4 ") for line in lines)
    assert "containers[ome-container].image example.com/llm:1 runtime" in lines
    assert "containers[ome-container].env[LOG_LEVEL].value debug service" in lines
    assert "containers[ome-container].env[MODEL_PATH].value /models/llama default" in lines
    assert "Pod of router" in lines and "Deployment apps/v1 llama-chat-router" in lines


def test_latency_targets_are_said(files: Path) -> None:
    text = SERVICE.replace("spec:\n", "spec:\n  slo: {ttftMilliseconds: 500, percentile: 99}\n", 1)
    (files / "isvc.yaml").write_text(text)
    result = run("-f", files / "isvc.yaml", "--with", files / "with")
    assert "engine scales by latency: p99 of the first token 500 ms" in result.stdout, result.output


def test_json_for_programs(files: Path) -> None:
    result = run("-f", files / "isvc.yaml", "--with", files / "with", "-o", "json")
    assert result.exit_code == 0
    assert run("-f", files / "isvc.yaml", "--with", files / "with", "--json").stdout == result.stdout
    shown = json.loads(result.stdout)
    assert list(shown) == ["runtime", "components", "objects", "errors"] and shown["errors"] == []
    assert shown["runtime"]["name"] == "mine" and set(shown["components"]) == {"engine", "router"}


def test_yaml_is_the_objects_alone_without_an_owner_that_is_not_there(files: Path) -> None:
    result = run("-f", files / "isvc.yaml", "--with", files / "with", "-o", "yaml")
    shown = json.loads(run("-f", files / "isvc.yaml", "--with", files / "with", "-o", "json").stdout)["objects"]
    assert result.exit_code == 0 and all(document["metadata"].pop("ownerReferences") for document in shown)
    assert parse(result.stdout).documents == shown
    (files / "isvc.yaml").write_text(SERVICE.replace("name: llama-chat", "name: llama-chat\n  uid: u-1"))
    [first, *_] = parse(run("-f", files / "isvc.yaml", "--with", files / "with", "-o", "yaml").stdout).documents
    assert first["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_a_mistake_is_reported_with_its_line_and_the_exit_code(files: Path) -> None:
    place = files / "isvc.yaml"
    place.write_text(SERVICE.replace("maxReplicas: 4", "maxReplicas: many"))
    for output in ("text", "json", "yaml"):
        result = run("-f", place, "--with", files / "with", "-o", output)
        assert result.exit_code == 1
        if output == "json":
            assert json.loads(result.stdout)["errors"][0]["field"] == "spec.engine.maxReplicas"
        else:
            assert f"{place}:10: spec.engine.maxReplicas: " in result.output


def test_an_invalid_and_a_missing_file(files: Path) -> None:
    (files / "with" / "bad.yaml").write_text("a: b: c\n")
    result = run("-f", files / "isvc.yaml", "--with", files / "with", "-o", "json")
    assert result.exit_code == 1
    assert [error["field"] for error in json.loads(result.stdout)["errors"]] == [f"{files / 'with' / 'bad.yaml'}:1"]
    result = run("-f", files / "none.yaml", "-o", "json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert list(shown) == ["runtime", "components", "objects", "errors"]
    assert shown["errors"][0]["message"] == "there is no such file"


def test_standard_input_and_several_services(files: Path) -> None:
    several = f"{SERVICE}---\n{SERVICE.replace('llama-chat', 'second')}---\n{CLUSTER}"
    result = run("-f", "-", "-o", "json", input=several)
    assert result.exit_code == 0
    assert [item["service"] for item in json.loads(result.stdout)] == ["llama-chat", "second"]
    result = run("-f", "-", input=several)
    assert "InferenceService default/second" in result.stdout


def test_what_the_cluster_lacks(files: Path) -> None:
    (files / "isvc.yaml").write_text(SERVICE.replace("minReplicas: 1", "minReplicas: 0"))
    common = ("-f", files / "isvc.yaml", "--with", files / "with", "-o", "json")
    modes = [
        json.loads(run(*common, *more).stdout)["components"]["engine"]["mode"]
        for more in ((), ("--without", "knative"))
    ]
    assert modes == ["Serverless", "RawDeployment"]


@pytest.mark.parametrize(("option", "value"), [("-o", "xml"), ("--without", "gravity")])
def test_bad_use(files: Path, option: str, value: str) -> None:
    result = run("-f", files / "isvc.yaml", option, value)
    assert result.exit_code == 2 and f"{option} {value}: write one of" in result.output


def test_names_cannot_paint_on_the_terminal(files: Path) -> None:
    (files / "isvc.yaml").write_text(SERVICE.replace("name: llama\n", 'name: "[red]\\e[2J\\nREADY"\n'))
    result = run("-f", files / "isvc.yaml")
    assert result.exit_code == 1 and "\x1b" not in result.stdout and "\nREADY" not in result.stdout


def test_settings_of_the_operator_apply_to_all_services(files: Path) -> None:
    ingress = {"ingressDomain": "models.example.com", "disableIngressCreation": False}
    config = {
        "kind": "ConfigMap",
        "metadata": {"name": "inferenceservice-config"},
        "data": {"ingress": json.dumps(ingress)},
    }
    (files / "config.yaml").write_text(json.dumps({"apiVersion": "v1", **config}))
    common = ("-f", files / "isvc.yaml", "--with", files / "with", "-o", "json")
    plain, told = run(*common), run(*common, "--config", files / "config.yaml")
    assert told.exit_code == 0 and "models.example.com" in told.stdout and "models.example.com" not in plain.stdout
    for name, said in (("none.yaml", "there is no such file"), ("isvc.yaml", "it has 0 ConfigMaps")):
        refused = run(*common, "--config", files / name)
        assert refused.exit_code == 2 and said in refused.output
