# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart as processes of this machine: our own runtime, a real tiny model, OpenAI's client.

The answers are those of one server alone, whoever is killed meanwhile.
"""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from local_site import LocalSite, document

import headrace.fleet
from headrace.core.files import read_json
from headrace.fleet import yaml_documents
from headrace.platforms.kubernetes_client.objects import get_list, get_str, labels_of
from support import llm_models
from support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux"),
    pytest.mark.timeout(1800),
]
RUNTIMES = Path(headrace.fleet.__file__).parent / "runtimes"
LONG_SECONDS = 300.0
PROMPT = "the quick brown fox jumps over the lazy dog while the river runs to the sea and a mill grinds corn " * 25


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path_factory.mktemp("fleet"))
    site.up()
    yield site
    site.close()


class Chat:
    """The service, asked by OpenAI's client."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, prompt: str, **more: Any) -> tuple[str, list[float], int]:
        """Text, log-probabilities and length of the prompt."""
        messages: Any = [{"role": "user", "content": prompt}]
        answer = self._client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=24, logprobs=True, **{"seed": 5, **more}
        )
        [choice] = answer.choices
        assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
        logprobs = [round(logprob.logprob, 3) for logprob in choice.logprobs.content]
        return choice.message.content or "", logprobs, answer.usage.prompt_tokens

    def streamed(self, prompt: str) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        pieces = self._client.chat.completions.create(
            model=self.model, messages=messages, max_tokens=24, seed=5, stream=True
        )
        return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)

    @property
    def model(self) -> str:
        return self._client.models.list().data[0].id


def pids(site: LocalSite, component: str) -> list[int]:
    """The processes of a component's pods."""
    results = []
    for path in site.root.glob("pods/*/pod.json"):
        output = read_json(path) or {}
        if labels_of(output.get("document", {})).get("component") == component:
            for item in path.parent.glob("containers/*/process.json"):
                results.append(int((read_json(item) or {}).get("pid", 0)))
    return [result for result in results if result]


def ready(site: LocalSite, name: str, components: int) -> str:
    """Its URL, once as many components are ready."""

    def phase() -> str:
        result = site.get(name)
        conditions = {condition["type"]: condition["status"] for condition in get_list(result, "status", "conditions")}
        pods = [pod for pod in site.pods(name) if "deletionTimestamp" not in pod["metadata"]]
        received = [
            condition["status"]
            for pod in pods
            for condition in get_list(pod, "status", "conditions")
            if condition["type"] == "Ready"
        ]
        whole = received == ["True"] * components and conditions.get("Ready") == "True"
        return get_str(result, "status", "url") if whole else ""

    return eventually(phase, within=LONG_SECONDS)


def counts(site: LocalSite, outcome: str) -> float:
    """How often the router said so, by its own metrics."""
    [pid] = pids(site, "router")
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    [port] = [argument.removeprefix("--port=") for argument in arguments if argument.startswith("--port=")]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/router/metrics", timeout=30) as answer:
        reported = answer.read().decode()
    line = f'headrace_router_handings_total{{outcome="{outcome}"}}'
    return sum(float(item.split()[-1]) for item in reported.splitlines() if item.startswith(line))


def kill(site: LocalSite, component: str) -> None:
    for pid in pids(site, component):
        os.kill(pid, signal.SIGKILL)


def test_answers_equal_those_of_one_server_whichever_replica_is_killed(site: LocalSite, tmp_path: Path) -> None:
    model = llm_models.tiny_llama(tmp_path / "tiny")
    [runtime] = yaml_documents.read([RUNTIMES / "headrace-prefill-decode.yaml"]).documents
    spec = {
        "modelFormat": {"name": "safetensors", "version": "1.0.0"},
        "modelFramework": {"name": "transformers", "version": "4.51.0"},
        "modelArchitecture": "LlamaForCausalLM",
        "modelParameterSize": "135M",
        "storage": {"storageUri": f"local://{model}", "path": "/mnt/models/tiny"},
    }
    one = {"minReplicas": 1, "maxReplicas": 1}
    service = {"model": {"name": "tiny"}, "runtime": {"name": "headrace-prefill-decode"}}
    site.apply(
        document("ClusterBaseModel", "tiny", spec),
        runtime,
        document("InferenceService", "apart", {**service, "engine": one, "decoder": one, "router": one}),
    )
    chat = Chat(ready(site, "apart", 3))
    alone = Chat(get_str(site.get("apart"), "status", "components", "engine", "url"))

    # A prompt is computed by one and answered by the other, and nobody can tell.
    eventually(lambda: chat.ask(PROMPT) and counts(site, "handed") > 0, within=LONG_SECONDS)
    handed = counts(site, "handed")
    for number, more in enumerate(({}, {"temperature": 0}, {"stop": ["e"]}, {"frequency_penalty": 1.0})):
        assert chat.ask(f"{number} {PROMPT}", **more) == alone.ask(f"{number} {PROMPT}", **more)
    assert chat.streamed("s " + PROMPT) == alone.ask("s " + PROMPT)[0]
    assert counts(site, "handed") == handed + 5
    assert chat.ask("a short one") == alone.ask("a short one")
    assert counts(site, "short") == 1

    # Without the prefill: the decoder computes prompts, and no request fails.
    wanted = alone.ask("p " + PROMPT)
    kill(site, "engine")
    assert chat.ask("p " + PROMPT) == wanted
    ready(site, "apart", 3)
    handed = counts(site, "handed")
    eventually(lambda: chat.ask("q " + PROMPT) and counts(site, "handed") > handed, within=LONG_SECONDS)

    # Without the decoder: the prefill serves all of it.
    wanted = alone.ask("d " + PROMPT)
    kill(site, "decoder")
    assert chat.ask("d " + PROMPT) == wanted
    ready(site, "apart", 3)
    handed = counts(site, "handed")
    eventually(lambda: chat.ask("e " + PROMPT) and counts(site, "handed") > handed, within=LONG_SECONDS)
    site.delete("apart")
