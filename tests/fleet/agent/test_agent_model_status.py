# SPDX-License-Identifier: Apache-2.0
"""What the nodes tell of a model, summed up; and what a service's status makes of it."""

from __future__ import annotations

from typing import Any

from headrace.fleet.agent import node_status
from headrace.fleet.agent.model_keys import entry_name, is_model_label, label_of
from headrace.fleet.agent.model_status import spec_change, status_change
from headrace.fleet.documents import object_key
from headrace.fleet.schema import validate, validate_status
from headrace.fleet.status.model_status import count_copies, model_status

KEY = ("", "llama")
CONFIG = {"modelArchitecture": "LlamaForCausalLM", "maxTokens": 8192, "modelFormat": {"name": "safetensors"}}
READY = node_status.ready_entry(KEY, CONFIG, "abc", "/mnt/models/llama")
FAILED = node_status.failed_entry(KEY, "the disk is full")
UPDATING = node_status.updating_entry(KEY, node_status.Progress(5, 10, 1, "2026-11-15T00:00:00Z"))


def model(status: Any = None, uri: str = "hf://org/llama", **spec: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "apiVersion": "ome.io/v1beta1",
        "kind": "ClusterBaseModel",
        "metadata": {"name": "llama"},
    }
    return {**document, "spec": {"storage": {"storageUri": uri}, **spec}, **({"status": status} if status else {})}


def test_states() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "In_Transit"),
        ({"a": UPDATING}, "In_Transit"),
        ({"a": UPDATING, "b": FAILED}, "Failed"),
        ({"a": UPDATING, "b": FAILED, "c": READY}, "Ready"),
        ({"a": {"status": "Weird"}}, "In_Transit"),
    ]
    for nodes, wanted in cases:
        change = status_change(model(), nodes, has_agents=True)
        assert change["state"] == wanted
        created_model = model({**change})
        assert validate_status(created_model) == [] and status_change(created_model, nodes, has_agents=True) == {}
    full = {"c": READY, "b": FAILED, "a": READY}
    assert status_change(model(), full, has_agents=True) == {
        "state": "Ready",
        "nodesReady": ["a", "c"],
        "nodesFailed": ["b"],
        "message": "b: the disk is full",
    }


def test_the_status_says_why_a_download_failed_and_forgets_it() -> None:
    gated = node_status.failed_entry(KEY, "hf://org/llama: 403: accept the licence of the model")
    nodes = {"b": gated, "a": gated, "c": FAILED, "d": {"status": "Failed"}}
    change = status_change(model(), nodes, has_agents=True)
    assert change["message"] == (
        "a, b: hf://org/llama: 403: accept the licence of the model; c: the disk is full; d: it does not say why"
    )
    failed = model(change)
    assert validate_status(failed) == []
    assert status_change(failed, {"a": READY}, has_agents=True) == {
        "state": "Ready",
        "nodesReady": ["a"],
        "nodesFailed": [],
        "message": None,
    }
    many = {f"node-{number:02}": FAILED for number in range(12)}
    message = status_change(model(), many, has_agents=True)["message"]
    assert message.startswith("node-00, node-01,") and message.endswith("node-07 and 4 more: the disk is full")
    long = {f"n{number}": node_status.failed_entry(KEY, f"{number}" + "x" * 900) for number in range(4)}
    assert len(status_change(model(), long, has_agents=True)["message"]) == 1024


def test_without_counters_nothing_is_reported() -> None:
    assert status_change(model(), {}, has_agents=False) == {}
    # The last agent has gone, and took its word with it.
    left = {"state": "Ready", "nodesReady": ["a"]}
    assert status_change(model(left), {}, has_agents=False) == {"state": "In_Transit", "nodesReady": []}


def test_claims_are_ready_without_a_node() -> None:
    assert status_change(model(uri="pvc://claim/x"), {}, has_agents=False) == {"state": "Ready"}
    assert status_change(model({"state": "Ready"}, "pvc://claim/x"), {}, has_agents=True) == {}


def test_what_the_author_wrote_stays() -> None:
    change = spec_change(model(maxTokens=1), {"a": UPDATING, "b": READY})
    assert change == {"modelArchitecture": "LlamaForCausalLM", "modelFormat": {"name": "safetensors"}}
    filled = model(**{"maxTokens": 1, **change})
    assert spec_change(filled, {"b": READY}) == {} and validate(filled) == []
    skipped = model()
    skipped["metadata"]["annotations"] = {"ome.oracle.com/skip-config-parsing": "true"}
    assert spec_change(skipped, {"b": READY}) == {}


def test_a_service_reports_where_its_model_is() -> None:
    waiting = {"engine": count_copies([], [], suspended=False, current=True, revision="1")}
    for nodes, said in (
        ({"n1": FAILED}, "its download failed on n1: the disk is full"),
        ({"n1": UPDATING}, "it is In_Transit"),
    ):
        status = model_status(waiting, model(status_change(model(), nodes, has_agents=True)))
        assert status["lastFailureInfo"]["reason"] == "BaseModelNotReady"
        assert said in status["lastFailureInfo"]["message"]
    status = model_status(waiting, model(status_change(model(), {"n1": READY}, has_agents=True)))
    assert "lastFailureInfo" not in status


def test_entries_are_what_was_written() -> None:
    for document in (READY, FAILED, UPDATING):
        assert node_status.decode_entry(node_status.encode_entry(document)) == document
    assert node_status.failed_entry(KEY, "a\nb" + "x" * 9999)["reason"].startswith("a?b")
    for odd in (None, 3, "", "{", "[]", "null"):
        assert node_status.entry_state(node_status.decode_entry(odd)) == ""


def test_names() -> None:
    namespaced = {"metadata": {"name": "llama", "namespace": "team"}}
    assert (entry_name(KEY), label_of(KEY)) == ("clusterbasemodel.llama", "models.ome.io/clusterbasemodel.llama")
    assert entry_name(object_key(namespaced)) == "team.basemodel.llama"
    assert is_model_label(label_of(object_key(namespaced))) and not is_model_label("models.ome.io/category")
