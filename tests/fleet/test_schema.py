# SPDX-License-Identifier: Apache-2.0
"""Every field of every kind with what it takes and what it does not, enumerated from the tables."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from fleet_documents import document, service
from hypothesis import given
from hypothesis import strategies as st
from schema_values import path, put, sample, ways, whole_document, wrong

from headrace.fleet import schema
from headrace.fleet.schema.checking import MOST
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import KINDS, find_kind
from headrace.fleet.schema.reference import rows, status_rows
from headrace.fleet.words import Problem

kinds = pytest.mark.parametrize("kind", KINDS, ids=[each.name for each in KINDS])


@kinds
def test_every_field_with_a_wrong_value_is_a_problem_that_says_what_to_write(kind: Kind) -> None:
    tried = 0
    for steps, field, _ in ways(kind.spec):
        for value in wrong(field):
            found = schema.check(whole_document(kind, put(kind.spec, steps, value)))
            told = [each for each in found if each.field == path(steps)]
            assert told, f"{path(steps)} takes {value!r}: {found}"
            assert all(each.message and each.fix for each in told)
            tried += 1
    assert tried > 20


@kinds
def test_every_field_with_a_right_value_is_taken(kind: Kind) -> None:
    for steps, field, _ in ways(kind.spec):
        for full in (False, True):
            value = put(kind.spec, steps, sample(field, full=full))
            assert schema.check(whole_document(kind, value)) == [], path(steps)
        if field.least is not None and field.most is not None and field.type == "integer":
            assert not schema.check(whole_document(kind, put(kind.spec, steps, int(field.most))))
    assert schema.check(whole_document(kind, sample(kind.spec, full=True))) == []


@kinds
def test_every_required_field_that_is_missing_is_a_problem(kind: Kind) -> None:
    for steps, field, _ in ways(kind.spec):
        if field.required:
            (above, last) = steps[:-1], steps[-1]
            parent = kind.spec
            for step in above:
                parent = parent.item if step in ("[]", "{}") and parent.item is not None else parent[step]
            rest = {name: value for name, value in sample(parent).items() if name != last}
            for value in (rest, {**rest, last: None}):
                found = schema.check(whole_document(kind, put(kind.spec, above, value) if above else value))
                assert path(steps) in [each.field for each in found]


@kinds
def test_the_status_is_checked_apart(kind: Kind) -> None:
    if kind.status is None:
        return
    for steps, field, _ in ways(kind.status):
        assert not schema.check_status({**whole_document(kind, {}), "status": put(kind.status, steps, sample(field))})
        for value in wrong(field):
            found = schema.check_status({**whole_document(kind, {}), "status": put(kind.status, steps, value)})
            assert path(steps, "status") in [each.field for each in found]
    assert not [each for each in schema.check({**whole_document(kind, {}), "status": 3}) if "status" in each.field]


@kinds
def test_unknown_fields_are_kept_and_no_problem(kind: Kind) -> None:
    spec = {**sample(kind.spec), "rollout": {"steps": [1, {"x": None}]}}
    assert schema.check(whole_document(kind, spec)) == []
    assert schema.defaulted(whole_document(kind, spec))["spec"]["rollout"] == spec["rollout"]


@kinds
def test_tables_are_sound(kind: Kind) -> None:
    for row in (*rows(kind), *status_rows(kind)):
        field = row.field
        assert row.takes
        names = [each.name for each in field.fields]
        assert len(names) == len(set(names)), row.path
        assert (field.item is not None) == (field.type in ("list", "map")), row.path
        if field.pattern and field.type == "string":
            assert re.fullmatch(field.pattern, field.example.strip('"')), row.path
        if field.default is not None and field.choices:
            assert field.default in field.choices


def test_the_top_of_a_document() -> None:
    assert [each.field for each in schema.check("text")] == [""]
    assert [each.field for each in schema.check({})] == ["apiVersion", "kind"]
    (problem,) = schema.check({**service({}), "kind": "InferenceServices"})
    assert problem == Problem(
        "kind", "'InferenceServices' is not a kind of ome.io/v1beta1", "did you mean InferenceService?"
    )
    (problem,) = schema.check({**service({}), "apiVersion": "serving.kserve.io/v1beta1"})
    assert problem.fix == "write apiVersion: ome.io/v1beta1"
    assert [each.field for each in schema.check({**service({}), "metadata": {}})] == ["metadata.name"]
    assert not schema.check({**service({}), "metadata": {"generateName": "x-"}})
    assert [each.field for each in schema.check({**service({}), "metadata": 3})] == ["metadata"]
    assert [each.field for each in schema.check({**service({}), "spec": []})] == ["spec"]


@pytest.mark.parametrize("name", ["1llama", "Llama", "a_b", "-a", "a-", "a.b", "a" * 64, "a\n"])
def test_names_of_services(name: str) -> None:
    (problem,) = schema.check(service({}, name=name))
    assert problem.field == "metadata.name"
    assert problem.fix
    assert not schema.check(service({}, name="a" * 63))


def test_names_of_others_may_be_long_and_begin_with_a_digit() -> None:
    assert not schema.check(document("ClusterBaseModel", "7b.llama-" + "a" * 200, {}))
    assert schema.check(document("ClusterBaseModel", "a" * 254, {}))


@pytest.mark.parametrize(
    ("spec", "field", "message", "fix"),
    [
        (
            {"engine": {"minReplicas": "2"}},
            "spec.engine.minReplicas",
            "takes a whole number, 0 or more, not '2'",
            "write 2 without quotes",
        ),
        (
            {"engine": {"canaryTrafficPercent": 101}},
            "spec.engine.canaryTrafficPercent",
            "takes a whole number from 0 to 100, not 101",
            "write a whole number from 0 to 100",
        ),
        (
            {"engine": {"scaleMetric": "CPU"}},
            "spec.engine.scaleMetric",
            "takes one of cpu, memory, concurrency, rps, not 'CPU'",
            "did you mean cpu?",
        ),
        (
            {"kedaConfig": {"scalingThreshold": 0.5}},
            "spec.kedaConfig.scalingThreshold",
            'takes a text such as "0.5", not 0.5',
            'write "0.5" in quotes',
        ),
        (
            {"engine": {"labels": {"x": True}}},
            "spec.engine.labels[x]",
            "takes a text, not true",
            'write "true" in quotes',
        ),
        (
            {"engine": {"runner": {"resources": {"limits": {"cpu": 0.5}}}}},
            "spec.engine.runner.resources.limits[cpu]",
            'takes a quantity such as 2, "500m" or "8Gi", not 0.5',
            'write "0.5" in quotes',
        ),
        (
            {"engine": {"hostNetwork": "True"}},
            "spec.engine.hostNetwork",
            "takes true or false, not 'True'",
            "write true without quotes",
        ),
        ({"model": {}}, "spec.model.name", "is missing", "write a text such as llama-3-70b"),
    ],
)
def test_what_is_said(spec: dict[str, Any], field: str, message: str, fix: str) -> None:
    assert schema.check(service(spec)) == [Problem(field, message, fix)]


def test_no_more_problems_than_anybody_reads() -> None:
    assert len(schema.check(service({"engine": {"command": 1, "containers": [{}] * 10_000}}))) == MOST


def test_misspelt_fields_are_doubted() -> None:
    found = schema.doubts(
        service(
            {
                "engine": {"minReplica": 1, "rollout": {}, "runner": {"Image": "x"}},
                "router": {"containers": [{"imge": 1}]},
            }
        )
    )
    assert [(each.field, each.fix) for each in found] == [
        ("spec.engine.minReplica", "did you mean minReplicas?"),
        ("spec.engine.runner.Image", "did you mean image?"),
        ("spec.router.containers[0].imge", "did you mean image?"),
    ]


def test_defaults_come_from_the_table() -> None:
    given = service(
        {"model": {"name": "m", "kind": None}, "runtime": {"name": "r", "kind": "ServingRuntime"}, "engine": None}
    )
    before = copy.deepcopy(given)
    made = schema.defaulted(given)
    assert made["spec"] == {
        "model": {"name": "m", "kind": "ClusterBaseModel", "apiGroup": "ome.io"},
        "runtime": {"name": "r", "kind": "ServingRuntime", "apiGroup": "ome.io"},
    }
    assert given == before
    assert schema.defaulted(made) is made
    runtime = {"supportedModelFormats": [{"modelFormat": {"name": "safetensors"}}]}
    (entry,) = schema.defaulted(document("ServingRuntime", "r", runtime))["spec"]["supportedModelFormats"]
    assert entry["modelFormat"] == {"name": "safetensors", "operator": "Equal", "weight": 1}
    assert schema.defaulted({"kind": "Pod"}) == {"kind": "Pod"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({each.name for kind in KINDS for _, each, _ in ways(kind.spec) if each.name})
SPECS = st.recursive(
    JSON,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), SPECS, max_size=4), JSON)
def test_no_document_raises(kind: Kind, spec: Any, other: Any) -> None:
    for each in (
        whole_document(kind, spec),
        whole_document(kind, other),
        {"kind": kind.name, "metadata": other},
        other,
    ):
        assert all(isinstance(found, Problem) and found.fix for found in schema.check(each))
        schema.doubts(each)
    made = schema.defaulted(whole_document(kind, spec))
    assert schema.defaulted(made) == made or made != made


def test_every_kind_is_found() -> None:
    assert [find_kind(each.name) for each in KINDS] == list(KINDS)
    assert find_kind("Pod") is None
    assert len(rows(KINDS[0])) > 300
