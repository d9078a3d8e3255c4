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
from headrace.fleet.documents import Problem
from headrace.fleet.schema.crds import spec_rows, status_rows
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import KINDS, find_kind
from headrace.fleet.schema.validation import MAX_PROBLEMS

kinds = pytest.mark.parametrize("kind", KINDS, ids=[each.name for each in KINDS])


@kinds
def test_every_field_with_a_wrong_value_is_a_problem_with_advice(kind: Kind) -> None:
    tried = 0
    for steps, field, _ in ways(kind.spec):
        for value in wrong(field):
            found = schema.validate(whole_document(kind, put(kind.spec, steps, value)))
            told = [each for each in found if each.field == path(steps)]
            assert told, f"{path(steps)} takes {value!r}: {found}"
            assert all(each.message and each.fix for each in told)
            tried += 1
    assert tried > 20


@kinds
def test_every_field_with_a_right_value_is_accepted(kind: Kind) -> None:
    for steps, field, _ in ways(kind.spec):
        for full in (False, True):
            value = put(kind.spec, steps, sample(field, full=full))
            assert schema.validate(whole_document(kind, value)) == [], path(steps)
        if field.minimum is not None and field.maximum is not None and field.type == "integer":
            assert not schema.validate(whole_document(kind, put(kind.spec, steps, int(field.maximum))))
    assert schema.validate(whole_document(kind, sample(kind.spec, full=True))) == []


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
                found = schema.validate(whole_document(kind, put(kind.spec, above, value) if above else value))
                assert path(steps) in [each.field for each in found]


@kinds
def test_the_status_is_checked_apart(kind: Kind) -> None:
    if kind.status is None:
        return
    for steps, field, _ in ways(kind.status):
        assert not schema.validate_status(
            {**whole_document(kind, {}), "status": put(kind.status, steps, sample(field))}
        )
        for value in wrong(field):
            found = schema.validate_status({**whole_document(kind, {}), "status": put(kind.status, steps, value)})
            assert path(steps, "status") in [each.field for each in found]
    assert not [each for each in schema.validate({**whole_document(kind, {}), "status": 3}) if "status" in each.field]


@kinds
def test_unknown_fields_are_a_problem_each_and_stay_in_the_document(kind: Kind) -> None:
    spec = {**sample(kind.spec), "zebra": {"steps": [1, {"x": None}]}}
    (problem,) = schema.validate(whole_document(kind, spec))
    assert problem == Problem("spec.zebra", "is not a known field", "correct its name, or remove it")
    assert schema.with_defaults(whole_document(kind, spec))["spec"]["zebra"] == spec["zebra"]
    for steps, field, _ in ways(kind.spec):
        if field.type == "record" and field.fields and not field.open:
            value = put(kind.spec, steps, {**sample(field), "zebra": 1})
            assert [each.field for each in schema.validate(whole_document(kind, value))] == [f"{path(steps)}.zebra"]


@kinds
def test_tables_are_sound(kind: Kind) -> None:
    for row in (*spec_rows(kind), *status_rows(kind)):
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
    assert [each.field for each in schema.validate("text")] == [""]
    assert [each.field for each in schema.validate({})] == ["apiVersion", "kind"]
    (problem,) = schema.validate({**service({}), "kind": "InferenceServices"})
    assert problem == Problem(
        "kind", "'InferenceServices' is not a kind of ome.io/v1beta1", "did you mean InferenceService?"
    )
    (problem,) = schema.validate({**service({}), "apiVersion": "serving.kserve.io/v1beta1"})
    assert problem.fix == "write apiVersion: ome.io/v1beta1"
    assert [each.field for each in schema.validate({**service({}), "metadata": {}})] == ["metadata.name"]
    assert not schema.validate({**service({}), "metadata": {"generateName": "x-"}})
    assert [each.field for each in schema.validate({**service({}), "metadata": 3})] == ["metadata"]
    assert [each.field for each in schema.validate({**service({}), "spec": []})] == ["spec"]


@pytest.mark.parametrize("name", ["1llama", "Llama", "a_b", "-a", "a-", "a.b", "a" * 64, "a\n"])
def test_names_of_services(name: str) -> None:
    (problem,) = schema.validate(service({}, name=name))
    assert problem.field == "metadata.name"
    assert problem.fix
    assert not schema.validate(service({}, name="a" * 63))


def test_names_of_others_may_be_long_and_begin_with_a_digit() -> None:
    assert not schema.validate(document("ClusterBaseModel", "7b.llama-" + "a" * 200, {}))
    assert schema.validate(document("ClusterBaseModel", "a" * 254, {}))


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
            'takes a string such as "0.5", not 0.5',
            'write "0.5" in quotes',
        ),
        (
            {"engine": {"labels": {"x": True}}},
            "spec.engine.labels[x]",
            "takes a string, not true",
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
        ({"model": {}}, "spec.model.name", "is missing", "write a string such as llama-3-70b"),
    ],
)
def test_texts_of_the_problems(spec: dict[str, Any], field: str, message: str, fix: str) -> None:
    assert schema.validate(service(spec)) == [Problem(field, message, fix)]


def test_no_more_problems_than_anybody_reads() -> None:
    assert len(schema.validate(service({"engine": {"command": 1, "containers": [{}] * 10_000}}))) == MAX_PROBLEMS


def test_misspelt_fields_are_refused_with_the_nearest_name() -> None:
    made = service(
        {
            "engine": {"minReplica": 1, "rollout": {}, "runner": {"Image": "x"}},
            "router": {"containers": [{"name": "side", "imge": 1}], "restartPolicies": "Always"},
        }
    )
    assert [(each.field, each.fix) for each in schema.validate(made)] == [
        ("spec.engine.minReplica", "did you mean minReplicas?"),
        ("spec.engine.rollout", "correct its name, or remove it"),
        ("spec.engine.runner.Image", "did you mean image?"),
        ("spec.router.containers[0].imge", "did you mean image?"),
        ("spec.router.restartPolicies", "did you mean restartPolicy?"),
    ]
    assert schema.warnings(made) == []


def test_fields_that_only_the_api_server_knows_are_taken_and_doubted_if_they_look_misspelt() -> None:
    probe = {"periodSecond": 1, "httpGet": {"path": "/"}, "grpc": {"port": 1}}
    mount = {"name": "v", "mountPath": "/v", "mountPropagation": "None"}
    runner = {"image": "i", "resizePolicy": [], "livenessProbe": probe, "volumeMounts": [mount]}
    toleration = {"key": "gpu", "operator": "Exists", "value": "", "tolerationSeconds": 3}
    engine = {
        "runner": runner,
        "resources": {"limits": {"cpu": 1}},
        "hostUsers": False,
        "tolerations": [toleration],
        "volumes": [{"name": "v", "emptyDir": {}}],
    }
    made = service({"engine": engine})
    assert schema.validate(made) == []
    assert [(each.field, each.fix) for each in schema.warnings(made)] == [
        ("spec.engine.runner.livenessProbe.periodSecond", "did you mean periodSeconds?")
    ]


def test_defaults_are_those_of_the_table() -> None:
    given = service(
        {"model": {"name": "m", "kind": None}, "runtime": {"name": "r", "kind": "ServingRuntime"}, "engine": None}
    )
    before = copy.deepcopy(given)
    made = schema.with_defaults(given)
    assert made["spec"] == {
        "model": {"name": "m", "kind": "ClusterBaseModel", "apiGroup": "ome.io"},
        "runtime": {"name": "r", "kind": "ServingRuntime", "apiGroup": "ome.io"},
    }
    assert given == before
    assert schema.with_defaults(made) is made
    runtime = {"supportedModelFormats": [{"modelFormat": {"name": "safetensors"}}]}
    (entry,) = schema.with_defaults(document("ServingRuntime", "r", runtime))["spec"]["supportedModelFormats"]
    assert entry["modelFormat"] == {"name": "safetensors", "operator": "Equal", "weight": 1}
    assert schema.with_defaults({"kind": "Pod"}) == {"kind": "Pod"}


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
        assert all(isinstance(found, Problem) and found.fix for found in schema.validate(each))
        schema.warnings(each)
    made = schema.with_defaults(whole_document(kind, spec))
    assert schema.with_defaults(made) == made or made != made


def test_every_kind_is_found() -> None:
    assert [find_kind(each.name) for each in KINDS] == list(KINDS)
    assert find_kind("Pod") is None
    assert len(spec_rows(KINDS[0])) > 300
