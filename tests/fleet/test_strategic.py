# SPDX-License-Identifier: Apache-2.0
"""Strategic merge, checked against Kubernetes' own rules and by properties."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.fleet.merging.strategic_merge import COMPONENT, CONTAINER, POD, flatten, merge
from support.properties import examples

Json = dict[str, Any]


def named(*names: str, **fields: Any) -> list[Json]:
    return [{"name": name, **fields} for name in names]


@pytest.mark.parametrize(
    ("base", "patch", "expected"),
    [
        ({"nodeSelector": {"a": "1", "b": "1"}}, {"nodeSelector": {"b": "2", "c": "2"}},
         {"nodeSelector": {"a": "1", "b": "2", "c": "2"}}),
        # Replaced as a whole.
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}, {"tolerations": [{"key": "b"}]}),
        ({"hostAliases": [{"ip": "1.1.1.1", "hostnames": ["a"]}]}, {"hostAliases": [{"ip": "1.1.1.1", "hostnames": ["b"]}]},
         {"hostAliases": [{"ip": "1.1.1.1", "hostnames": ["b"]}]}),
        ({"imagePullSecrets": named("a")}, {"imagePullSecrets": named("b", "a")}, {"imagePullSecrets": named("b", "a")}),
        ({"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}]},
         {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}]},
         {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}]}),
        ({"volumes": [{"name": "v", "configMap": {"name": "a", "optional": True}}]},
         {"volumes": [{"name": "v", "configMap": {"name": "b"}}]},
         {"volumes": [{"name": "v", "configMap": {"name": "b", "optional": True}}]}),
        # A volume has one source. Kubernetes would keep both, and then refuse the pod.
        ({"volumes": [{"name": "v", "emptyDir": {}}]}, {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]},
         {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]}),
        # Null says nothing; false and 0 do.
        ({"hostNetwork": True, "schedulerName": "x"}, {"hostNetwork": False, "schedulerName": None},
         {"hostNetwork": False, "schedulerName": "x"}),
        ({"containers": named("a", "b")}, {"containers": [{"name": "a", "$patch": "delete"}]}, {"containers": named("b")}),
        ({"affinity": {"podAffinity": {"x": 1}}}, {"affinity": {"$patch": "replace", "nodeAffinity": {}}},
         {"affinity": {"nodeAffinity": {}}}),
        ({}, {"affinity": {"$patch": "replace", "nodeAffinity": {}}}, {"affinity": {"nodeAffinity": {}}}),
        ({"unknown": [1, 2]}, {"unknown": [3]}, {"unknown": [3]}),
    ],
)  # fmt: skip
def test_pods(base: Json, patch: Json, expected: Json) -> None:
    assert merge(base, patch, POD) == expected


@pytest.mark.parametrize(
    ("base", "patch", "expected"),
    [
        ({"command": ["a", "b"], "args": ["1"]}, {"command": ["c"], "args": ["2"]}, {"command": ["c"], "args": ["2"]}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}]},
         {"env": [{"name": "A", "value": "2"}]}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "valueFrom": {"x": 1}}]},
         {"env": [{"name": "A", "valueFrom": {"x": 1}}]}),
        ({"ports": [{"containerPort": 80, "name": "http"}]}, {"ports": [{"containerPort": 80, "hostPort": 1}]},
         {"ports": [{"containerPort": 80, "name": "http", "hostPort": 1}]}),
        ({"ports": [{"containerPort": 53}]}, {"ports": [{"containerPort": 53, "protocol": "UDP"}]},
         {"ports": [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53}]}),
        ({"volumeMounts": [{"mountPath": "/a", "name": "x", "readOnly": True}]},
         {"volumeMounts": [{"mountPath": "/a", "name": "y"}]},
         {"volumeMounts": [{"mountPath": "/a", "name": "y", "readOnly": True}]}),
        ({"readinessProbe": {"httpGet": {"path": "/"}, "periodSeconds": 3}},
         {"readinessProbe": {"exec": {"command": ["x"]}}},
         {"readinessProbe": {"exec": {"command": ["x"]}, "periodSeconds": 3}}),
        ({"lifecycle": {"preStop": {"exec": {}}}}, {"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}},
         {"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}),
    ],
)  # fmt: skip
def test_containers(base: Json, patch: Json, expected: Json) -> None:
    assert merge(base, patch, CONTAINER) == expected
    assert merge({"runner": base}, {"runner": patch}, COMPONENT) == {"runner": expected}
    assert merge(
        {"leader": {"containers": [{"name": "a", **base}]}},
        {"leader": {"containers": [{"name": "a", **patch}]}},
        COMPONENT,
    ) == {"leader": {"containers": [{"name": "a", **expected}]}}


@pytest.mark.parametrize(
    ("base", "patch", "order"),
    [
        # What is new stands before what only the base has, as kubectl's own merge has it.
        ("AB", "C", "CAB"),
        ("AB", "BA", "BA"),
        ("AXB", "BA", "XBA"),
        ("XAY", "NA", "NXAY"),
        ("ABC", "CN", "ABCN"),
        ("ABC", "", "ABC"),
        ("", "AB", "AB"),
    ],
)
def test_the_order_of_keyed_lists_is_that_of_kubernetes(base: str, patch: str, order: str) -> None:
    created = merge({"containers": named(*base)}, {"containers": named(*patch)}, POD)
    assert [container["name"] for container in created["containers"]] == list(order)


def by_name(item: Json) -> str:
    return str(item["name"])


names = st.sampled_from("abcd")
variables = st.lists(
    st.fixed_dictionaries({"name": names}, optional={"value": names, "valueFrom": st.just({"x": 1})}),
    max_size=4,
    unique_by=by_name,
)
odd = st.none() | st.booleans() | st.integers(0, 3) | names | st.lists(st.integers(0, 2) | st.none(), max_size=2)
containers = st.lists(
    st.fixed_dictionaries(
        {"name": names},
        optional={"image": names, "args": st.lists(names, max_size=2), "env": variables | odd, "stdin": odd},
    ),
    max_size=3,
    unique_by=by_name,
)
pods = st.fixed_dictionaries(
    {},
    optional={
        "containers": containers | odd,
        "nodeSelector": st.dictionaries(names, names, max_size=3) | odd,
        "volumes": st.lists(
            st.fixed_dictionaries({"name": names}, optional={"emptyDir": st.just({}), "hostPath": odd}),
            max_size=3,
            unique_by=by_name,
        ),
        "tolerations": st.lists(st.dictionaries(names, names, max_size=1), max_size=2),
        "runner": st.fixed_dictionaries({}, optional={"env": variables, "image": names}) | odd,
        "leader": st.dictionaries(names, odd, max_size=2),
    },
)


@settings(max_examples=examples(200))
@given(pods, pods)
def test_merging_twice_is_merging_once(base: Json, patch: Json) -> None:
    before = copy.deepcopy((base, patch))
    once = merge(base, patch, COMPONENT)
    assert merge(once, patch, COMPONENT) == once
    assert (base, patch) == before


@given(pods)
def test_an_empty_side_changes_only_nulls(pod: Json) -> None:
    assert merge(pod, {}, COMPONENT) == pod
    assert merge({}, pod, COMPONENT) == {key: value for key, value in pod.items() if value is not None}


@given(pods, pods)
def test_fields_of_the_patch_are_in_the_result(base: Json, patch: Json) -> None:
    created = flatten(merge(base, patch, COMPONENT), COMPONENT)
    for path, value in flatten(merge({}, patch, COMPONENT), COMPONENT).items():
        if not path.startswith(("containers", "runner.env", "volumes")):
            assert value in ({}, []) or value == created[path]
