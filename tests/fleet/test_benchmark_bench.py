# SPDX-License-Identifier: Apache-2.0
"""A BenchmarkJob's own command, run for real: `headrace bench` against a small language model on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.fleet.benchmarks.job import plan_benchmark
from headrace.fleet.documents import ClusterFacts
from support.chat_server import chat_server
from support.ports import free_port
from support.programs import Finished, run
from support.serving import Serving

pytestmark = pytest.mark.worker("language models")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with chat_server(tmp_path_factory.mktemp("models")) as started:
        yield started


def container_of(**spec: Any) -> Any:
    """What the pod of a BenchmarkJob runs."""
    benchmark = {
        "apiVersion": "ome.io/v1beta1",
        "kind": "BenchmarkJob",
        "metadata": {"name": "measured", "namespace": "team", "uid": "u"},
        "spec": {
            "task": "text-to-text",
            "trafficScenarios": ["D(30,6)", "U(10,20)/(2,4)"],
            "numConcurrency": [1, 3],
            "maxTimePerIteration": 1,
            "maxRequestsPerIteration": 5,
            "outputLocation": {"storageUri": "pvc://results/team"},
            **spec,
        },
    }
    planned = plan_benchmark(benchmark, None, ClusterFacts())
    assert planned.job is not None, planned
    (container,) = planned.job["spec"]["template"]["spec"]["containers"]
    return container


def arguments_of(folder: Path, **spec: Any) -> list[str]:
    """Its command, with the path of its claim on this machine."""
    container = container_of(**spec)
    mounts = {volume_mount["name"]: volume_mount["mountPath"] for volume_mount in container["volumeMounts"]}
    return [argument.replace(f"{mounts['output']}/", f"{folder}/") for argument in container["args"]]


def bench(words: list[str], **variables: str) -> Finished:
    return run(*words, env=variables)


def endpoint(port: int, **more: str) -> dict[str, Any]:
    return {"endpoint": {"url": f"http://127.0.0.1:{port}", "apiFormat": "openai", **more}}


def test_its_command_measures_and_stores_the_results(server: Serving, tmp_path: Path) -> None:
    arguments = arguments_of(
        tmp_path,
        endpoint=endpoint(server.port),
        additionalRequestParams={"temperature": "0"},
        serviceMetadata={"engine": "headrace", "gpuCount": 0},
    )
    done = bench(arguments)
    assert done.returncode == 0, done.stderr
    assert "D(30,6)" in done.stdout and "FIRST P50" in done.stdout
    document = json.loads((tmp_path / "team" / "measured" / "results.json").read_text())
    assert document["model"] == "tiny" and document["about"] == {"engine": "headrace", "gpuCount": "0"}
    assert [(run["scenario"], run["concurrency"]) for run in document["runs"]] == [
        ("D(30,6)", 1),
        ("D(30,6)", 3),
        ("U(10,20)/(2,4)", 1),
        ("U(10,20)/(2,4)", 3),
    ]
    for measurement in document["runs"]:
        assert measurement["answered"] == measurement["requests"] == 5 and not measurement["errors"], measurement
        assert (
            measurement["first_token_ms"]["p50"] > 0
            and measurement["latency_ms"]["p50"] >= measurement["first_token_ms"]["p50"]
        )
        assert measurement["token_ms"]["p50"] >= 0 and measurement["answer_tokens_per_second"] > 0
    fixed = document["runs"][0]
    assert fixed["answer_tokens"] == 6
    # Words have two or three tokens, give or take; without learning that it would be 70.
    assert 20 <= fixed["prompt_tokens"] <= 40, "what the server counts is about what was asked for"
    page = (tmp_path / "team" / "measured" / "report.html").read_text()
    assert page.count("<svg") == 5 and "Time to first token" in page and "<polyline" in page


def test_prompts_of_a_data_set_and_a_model_that_is_named(server: Serving, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "a headrace brings water"}\n{"messages": [{"role": "user", "content": "to a mill"}]}\n'
    )
    arguments = arguments_of(tmp_path, endpoint=endpoint(server.port, modelName="tiny"), numConcurrency=[1])
    assert arguments[1] == "tiny"
    done = bench([*arguments, "--dataset", str(prompts)])
    assert done.returncode == 0, done.stderr


def test_the_reason_of_a_failure_is_printed_last(server: Serving, tmp_path: Path) -> None:
    done = bench(arguments_of(tmp_path, endpoint=endpoint(server.port, modelName="other")))
    assert done.returncode != 0 and "'other'" in done.stderr
    nobody = bench(arguments_of(tmp_path, endpoint=endpoint(free_port())))
    assert nobody.returncode != 0 and "lists no model" in nobody.stderr
    (tmp_path / "file").write_text("")
    arguments = arguments_of(tmp_path / "file", endpoint=endpoint(server.port))
    refused = bench(arguments)
    assert refused.returncode != 0 and "--output" in refused.stderr


@pytest.mark.platform
def test_a_bucket_for_the_prompts_and_the_results(server: Serving, tmp_path: Path) -> None:
    from s3_server import ACCESS_KEY, SECRET_KEY, s3_server

    with s3_server(tmp_path) as store:
        store.make("bkt", {"prompts/one.jsonl": b'{"prompt": "a headrace brings water"}\n'})
        parameters = {"region": "us-east-1", "endpoint": store.endpoint}
        container = container_of(
            endpoint=endpoint(server.port),
            trafficScenarios=["D(30,6)"],
            numConcurrency=[1],
            outputLocation={"storageUri": "s3://bkt/results", "key": "keys", "parameters": parameters},
            dataset={"storageUri": "s3://bkt/prompts", "key": "keys"},
        )
        # What the Secret would have.
        assert {"secretRef": {"name": "keys"}} in container["envFrom"]
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        done = bench(
            container["args"], **keys, **{variable["name"]: variable["value"] for variable in container["env"]}
        )
        assert done.returncode == 0, done.stderr
        kept = bytes(store.store("bkt").get("results/measured/results.json").bytes())
        assert json.loads(kept)["runs"][0]["answered"] == 5
        assert b"<svg" in bytes(store.store("bkt").get("results/measured/report.html").bytes())
        nowhere = [argument.replace("s3://bkt/results", "s3://other/results") for argument in container["args"]]
        refused = bench(nowhere, **keys, **{variable["name"]: variable["value"] for variable in container["env"]})
        assert refused.returncode != 0 and "no bucket other" in refused.stderr
