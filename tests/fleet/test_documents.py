# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from fleet_documents import document, small_cluster
from hypothesis import given
from hypothesis import strategies as st

from headrace.fleet import documents
from headrace.fleet.documents import ClusterFacts, Problem, namespace_of
from headrace.platforms.kubernetes_client import objects
from headrace.platforms.kubernetes_client.objects import name_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_the_namespaces_own_takes_precedence_over_the_clusters() -> None:
    facts = small_cluster(
        document("BaseModel", "llama", {"vendor": "own"}, "team"),
        document("ServingRuntime", "vllm", {"disabled": True}, "team"),
    )
    assert namespace_of(facts.model("team", "llama") or {}) == "team"
    assert namespace_of(facts.model("team", "llama", "ClusterBaseModel") or {}) == "team"
    assert (facts.model("default", "llama") or {})["kind"] == "ClusterBaseModel"
    assert (facts.runtime("team", "vllm", "ClusterServingRuntime") or {})["kind"] == "ServingRuntime"
    assert (facts.runtime("default", "vllm", "ServingRuntime") or {})["kind"] == "ClusterServingRuntime"


def test_a_requested_base_model_is_not_the_clusters() -> None:
    facts = small_cluster()
    assert facts.model("default", "llama", "BaseModel") is None
    assert facts.model("default", "own", "BaseModel") is not None
    assert facts.model("other", "own") is None


def test_an_index_is_made_once() -> None:
    created: list[ClusterFacts] = []

    def index(facts: ClusterFacts) -> list[str]:
        created.append(facts)
        return [name_of(model) for model in facts.models]

    facts = small_cluster()
    assert facts.derived(index) is facts.derived(index)
    assert created == [facts]
    assert small_cluster().derived(index) == ["llama", "old", "own"]


def test_other_kinds_are_left_out() -> None:
    facts = documents.cluster_facts(
        [document("InferenceService", "x", {}), {"kind": 3}, document("FineTunedWeight", "w", {})]
    )
    assert (facts.models, facts.runtimes, len(facts.weights)) == ((), (), 1)
    assert facts.weight("w") is not None


@pytest.mark.parametrize(
    ("kind", "expected"), [("ClusterBaseModel", ""), ("BaseModel", "default"), ("FineTunedWeight", "")]
)
def test_documents_of_the_cluster_have_no_namespace(kind: str, expected: str) -> None:
    assert namespace_of(document(kind, "x", {})) == expected


def test_a_problem_is_one_line() -> None:
    assert str(Problem("spec.a", "is 3", "write 4")) == "spec.a: is 3; write 4"
    assert "\n" not in str(Problem("spec.a\nspec.b", "x", "y"))


@given(JSON)
def test_views_never_raise(value: object) -> None:
    objects.get_mapping(value, "a", "b")
    assert isinstance(objects.get_str(value, "a"), str)
    assert isinstance(objects.get_list(value, "a"), list)
    assert objects.get_int(value, "a") is None or isinstance(objects.get_int(value, "a"), int)
    if isinstance(value, dict):
        assert isinstance(objects.name_of(value) + documents.namespace_of(value) + objects.kind_of(value), str)
        assert isinstance(objects.labels_of(value), dict) and isinstance(objects.annotations_of(value), dict)
