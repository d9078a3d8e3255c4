# SPDX-License-Identifier: Apache-2.0
"""One model over a leader and a worker as processes of this machine: our own runtime, a real tiny model.

The answers are those of one server alone, also after a pod was killed.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_site import LocalSite, document

import headrace.fleet
from headrace.core.files import read_json
from headrace.fleet import yaml_documents
from headrace.platforms.kubernetes_client.objects import get_list, get_str, labels_of
from support import llm_models
from support.programs import Program
from support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(1800),
]
RUNTIMES = Path(headrace.fleet.__file__).parent / "runtimes"
LONG_SECONDS = 300.0
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path_factory.mktemp("fleet"))
    site.up()
    yield site
    site.close()


def url_when_ready(site: LocalSite, name: str, pods: int) -> str:
    """Its URL, once all its pods are ready."""

    def found() -> str:
        service = site.get(name)
        conditions = {condition["type"]: condition["status"] for condition in get_list(service, "status", "conditions")}
        received = [
            condition["status"]
            for pod in site.pods(name)
            for condition in get_list(pod, "status", "conditions")
            if condition["type"] == "Ready"
        ]
        is_whole = received == ["True"] * pods and conditions.get("Ready") == "True"
        return get_str(service, "status", "url") if is_whole else ""

    return eventually(found, within=LONG_SECONDS, message=lambda: json.dumps(site.pods(name))[-4000:])


def pid_of(site: LocalSite, index: str) -> int:
    """The process of a pod of the group: leader 0 or a worker."""
    for path in site.root.glob("pods/*/pod.json"):
        pod = (read_json(path) or {}).get("document", {})
        if labels_of(pod).get(WORKER_INDEX) == index:
            for item in path.parent.glob("containers/*/process.json"):
                return int((read_json(item) or {})["pid"])
    raise AssertionError(f"the group has no pod {index}")


def answer(url: str, model: str) -> str:
    body = {"model": model, "prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_a_group_of_pods_answers_as_one_server(site: LocalSite, tmp_path: Path) -> None:
    model = llm_models.tiny_llama(tmp_path / "tiny")
    [runtime] = yaml_documents.read([RUNTIMES / "headrace-multi-node.yaml"]).documents
    spec = {
        "modelFormat": {"name": "safetensors", "version": "1.0.0"},
        "modelFramework": {"name": "transformers", "version": "4.51.0"},
        "modelArchitecture": "LlamaForCausalLM",
        "modelParameterSize": "135M",
        "storage": {"storageUri": f"local://{model}", "path": "/mnt/models/tiny"},
    }
    engine = {"minReplicas": 1, "maxReplicas": 1, "worker": {"size": 1}}
    site.apply(
        document("ClusterBaseModel", "tiny", spec),
        runtime,
        document(
            "InferenceService",
            "group",
            {"model": {"name": "tiny"}, "runtime": {"name": "headrace-multi-node"}, "engine": engine},
        ),
    )
    with Program(
        *("serve", model, "--http-port", "0", "--grpc-port", "0"), log=tmp_path / "log", ready="ready: "
    ) as alone:
        expected = answer(alone.url, "tiny")
    url = url_when_ready(site, "group", 2)
    assert answer(url, "group") == expected

    # Kubernetes starts the whole group again when a pod of it ends, and so does this fleet.
    leader = pid_of(site, "0")
    os.kill(pid_of(site, "1"), signal.SIGKILL)
    eventually(lambda: pid_of(site, "0") != leader, within=LONG_SECONDS)
    url_when_ready(site, "group", 2)

    def answers_again() -> bool:
        try:
            return answer(url, "group") == expected
        except urllib.error.HTTPError:
            return False

    eventually(answers_again, within=LONG_SECONDS)
