# SPDX-License-Identifier: Apache-2.0
"""The components of a service: whole cases from files, and what each rule does on its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet_documents import document
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_documents import Json, accelerator, entry, facts, model, runtime, service

from headrace.fleet.documents import ClusterFacts, cluster_facts, namespace_of
from headrace.fleet.merging import Component, merge_components
from headrace.fleet.merging.pod_builder import merge_args
from headrace.fleet.selection import select
from headrace.platforms.kubernetes_client.objects import get_list, get_str
from support.properties import examples

CASES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))


def made(asked: Json, known: ClusterFacts) -> dict[str, Component]:
    """As planning does it."""
    selection = select(asked, known)
    assert selection.problem is None, selection.problem
    name = get_str(asked, "spec", "model", "name")
    result = known.model(namespace_of(asked), name, get_str(asked, "spec", "model", "kind")) if name else None
    weights = [known.weight(weight) or {} for weight in get_list(asked, "spec", "model", "fineTunedWeights")]
    return merge_components(asked, selection.runtime, result, weights, known)


def engine(rt: Json, *more: Json, upstream: bool = False, **spec: Any) -> Component:
    settled = {name: spec.pop(name) for name in ("node_pinning",) if name in spec}
    return made(service(**spec), facts(model(), rt, *more, upstream=upstream, **settled))["engine"]


def main(component: Component) -> Json:
    containers: list[Json] = component.pod["containers"]
    return containers[-1]


def env(component: Component) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in get_list(main(component), "env")}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_merges_as_documented(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    before = copy.deepcopy(case)
    result = made(case["service"], cluster_facts(case["documents"]))
    assert list(result) == list(case["components"])
    for name, expected in case["components"].items():
        component = result[name]
        for field, value in expected.items():
            if field == "origins":
                assert {item: component.origins.get(item) for item in value} == value
            else:
                assert getattr(component, field) == value, field
        if component.leader is not None:
            assert component.pod == component.leader
    assert case == before


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_is_the_same_twice(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    once, twice = (made(case["service"], cluster_facts(copy.deepcopy(case["documents"]))) for _ in range(2))
    for name in once:
        for field in ("pod", "leader", "worker", "labels", "annotations"):
            assert json.dumps(getattr(once[name], field)) == json.dumps(getattr(twice[name], field))


def test_a_component_exists_only_if_the_service_names_it() -> None:
    rt = runtime("rt", routerConfig={"runner": {"image": "r"}})
    assert list(made(service(), facts(model(), rt))) == ["engine"]
    assert list(made(service(router={}), facts(model(), rt))) == ["engine", "router"]


def test_every_field_of_a_pod_has_an_origin() -> None:
    result = engine(runtime("rt"), engine={"schedulerName": "mine"})
    assert set(result.origins.values()) == {"runtime", "service", "default"}
    assert len(result.origins) == len(list(result.origins)) > 5
    assert result.origins["pod.schedulerName"] == "service"


def test_a_model_path_that_is_given_is_kept() -> None:
    result = engine(runtime("rt"), engine={"runner": {"env": [{"name": "MODEL_PATH", "value": "/mine"}]}})
    assert env(result)["MODEL_PATH"] == "/mine"


def test_a_mount_and_a_volume_that_are_there_are_kept() -> None:
    result = engine(
        runtime("rt"),
        engine={
            "volumes": [{"name": "llama", "nfs": {"server": "x", "path": "/"}}],
            "runner": {"volumeMounts": [{"name": "llama", "mountPath": "/mnt/models/llama"}]},
        },
    )
    assert result.pod["volumes"] == [{"name": "llama", "nfs": {"server": "x", "path": "/"}}]
    assert main(result)["volumeMounts"] == [{"name": "llama", "mountPath": "/mnt/models/llama"}]


def test_files_downloaded_by_an_init_container_are_in_memory() -> None:
    result = engine(runtime("rt"), notes={"ome.io/inject-model-init": "true"})
    assert result.pod["volumes"] == [{"name": "model-empty-dir", "emptyDir": {"medium": "Memory"}}]
    assert main(result)["volumeMounts"] == [{"name": "model-empty-dir", "mountPath": "/opt/ml/model"}]
    assert env(result)["MODEL_PATH"] == "/opt/ml/model"


def test_pinning_is_required_preferred_or_none() -> None:
    label = "models.ome.io/clusterbasemodel.llama"
    assert engine(runtime("rt")).pod["nodeSelector"] == {label: "Ready"}
    preferred = engine(runtime("rt"), node_pinning="preferred").pod
    terms = preferred["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0]["preference"]["matchExpressions"] == [{"key": label, "operator": "In", "values": ["Ready"]}]
    assert "nodeSelector" not in preferred
    free = engine(runtime("rt"), node_pinning="none").pod
    assert "nodeSelector" not in free and "affinity" not in free


def test_a_preference_joins_the_affinity_that_is_there() -> None:
    field = "preferredDuringSchedulingIgnoredDuringExecution"
    mine = {"nodeAffinity": {field: [{"weight": 1}], "other": 1}, "podAffinity": {}}
    affinity = engine(runtime("rt"), node_pinning="preferred", engine={"affinity": mine}).pod["affinity"]
    assert affinity["nodeAffinity"][field][0] == {"weight": 1} and len(affinity["nodeAffinity"][field]) == 2
    assert affinity["nodeAffinity"]["other"] == 1 and affinity["podAffinity"] == {}
    assert mine["nodeAffinity"][field] == [{"weight": 1}]


def test_a_claim_of_another_namespace_is_a_problem() -> None:
    created_model = model(storage={"storageUri": "pvc://other:weights/x", "path": "/x"})
    engine = made(service(), facts(created_model, runtime("rt")))["engine"]
    assert [problem.field for problem in engine.problems] == ["spec.model.name"]
    assert "namespace other" in engine.problems[0].message
    assert made(service("other"), facts(created_model, runtime("rt")))["engine"].problems == ()


def test_an_adapter_of_the_models_name_has_a_separate_volume() -> None:
    adapter = document("FineTunedWeight", "llama", {"storage": {"path": "/mnt/adapter"}})
    service_document = service(model={"name": "llama", "fineTunedWeights": ["llama"]})
    engine = made(service_document, facts(model(), runtime("rt"), adapter))["engine"]
    assert {volume["name"]: volume["hostPath"]["path"] for volume in engine.pod["volumes"]} == {
        "weight-llama": "/mnt/adapter",
        "llama": "/mnt/models/llama",
    }
    assert env(engine)["MODEL_PATH"] == "/mnt/models/llama"
    assert env(engine)["FINE_TUNED_WEIGHT_PATH"] == "/mnt/adapter"
    assert engine.labels["fine-tuned-serving-with-merged-weights"] == "false"


def test_resources_of_the_component_are_its_runners() -> None:
    # The first example of the specification.
    result = engine(runtime("rt"), engine={"resources": {"requests": {"nvidia.com/gpu": "1"}}})
    assert "resources" not in result.pod
    assert main(result)["resources"] == {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}
    assert env(result)["PARALLELISM_SIZE"] == "1"
    assert result.origins["pod.containers[ome-container].resources.requests.nvidia.com/gpu"] == "service"


def test_the_size_of_a_group_is_computed_unless_the_service_sets_it() -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}
    assert env(engine(runtime("rt"), engine={"runner": gpus}))["PARALLELISM_SIZE"] == "4"
    document = {**gpus, "env": [{"name": "PARALLELISM_SIZE", "value": "2"}]}
    assert env(engine(runtime("rt"), engine={"runner": document}))["PARALLELISM_SIZE"] == "2"
    assert env(engine(runtime("rt"), engine={"runner": document}, upstream=True))["PARALLELISM_SIZE"] == "4"
    assert "PARALLELISM_SIZE" not in env(engine(runtime("rt")))


def accelerated(*, upstream: bool = False, **runner: Any) -> Component:
    config = {"h100": {"environmentOverride": {"A": "class"}, "tensorParallelismOverride": {"tensorParallelSize": 4}}}
    rt = runtime(
        "rt",
        entry(acceleratorConfig=config),
        acceleratorRequirements={"acceleratorClasses": ["h100"]},
        engineConfig={
            "runner": {"image": "x", "command": ["launch", "--tp=1"], "resources": {"limits": {"nvidia.com/gpu": 8}}}
        },
    )
    body = {"acceleratorSelector": {"acceleratorClass": "h100"}, "engine": {"runner": runner}}
    return engine(rt, accelerator("h100"), upstream=upstream, **body)


def test_the_class_decides_resources_unless_the_service_does() -> None:
    assert main(accelerated())["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    mine = {"limits": {"nvidia.com/gpu": "3"}}
    assert main(accelerated(resources=mine))["resources"]["limits"] == {"nvidia.com/gpu": "3"}
    assert main(accelerated())["command"] == ["launch", "--tp=4"]


def test_the_services_variables_override_the_classs_unless_upstream() -> None:
    mine = [{"name": "A", "value": "mine"}]
    assert env(accelerated(env=mine))["A"] == "mine"
    assert env(accelerated(env=mine, upstream=True))["A"] == "class"
    assert env(accelerated())["PARALLELISM_SIZE"] == "1"
    assert "PARALLELISM_SIZE" not in env(accelerated(upstream=True))


@pytest.mark.parametrize(
    ("args", "over", "expected"),
    [
        (["--a", "1", "--b"], ["--a", "2"], ["--a", "2", "--b"]),
        (["--a=1", "--b"], ["--a", "2"], ["--a", "2", "--b"]),
        (["--b"], ["--a=2"], ["--b", "--a=2"]),
        (["--b"], ["--b"], ["--b"]),
        (["pos", "--a", "1"], ["--c", "x y"], ["pos", "--a", "1", "--c", "x y"]),
        ([], ["--a", "1"], ["--a", "1"]),
        (["run --a 1 --ab 2 \\\n  --c"], ["--a=3", "--c", "--d", "4"], ["run --a=3 --ab 2 \\\n  --c --d 4"]),
    ],
)
def test_arguments_are_laid_over_by_flag(args: list[str], over: list[str], expected: list[str]) -> None:
    assert merge_args(args, over) == expected


def test_a_jinja_template_in_a_command_stays_unless_upstream() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    document = {"runner": {"image": "x", "command": ["serve", "--chat-template", template, "--name={{.Name}}"]}}
    result = engine(runtime("rt", engineConfig=document))
    assert main(result)["command"] == ["serve", "--chat-template", template, "--name=chat"]
    assert result.problems == ()
    refused = engine(runtime("rt", engineConfig=document), upstream=True)
    assert [problem.field for problem in refused.problems] == ["spec.engine.runner"]


def test_a_worker_that_is_not_counted_is_one() -> None:
    group = {"leader": {"runner": {"image": "a"}}, "worker": {"runner": {"image": "b"}}}
    result = engine(runtime("rt", engineConfig=group))
    assert (result.mode, result.worker_size) == ("MultiNode", 1)
    assert result.worker is not None and result.worker["containers"][0]["name"] == "ome-container"


def test_a_leader_without_a_description_is_the_engines_pod() -> None:
    document = {"runner": {"image": "x"}, "hostNetwork": True, "worker": {"size": 2, "runner": {"image": "w"}}}
    result = engine(runtime("rt", engineConfig=document), engine={"leader": {}})
    assert result.leader is not None and result.leader["containers"][0]["image"] == "x"
    assert result.leader["hostNetwork"] is True


def test_scaling_is_the_services_over_the_runtimes() -> None:
    document = {
        "runner": {"image": "x"},
        "scaleMetric": "memory",
        "scaleTarget": 50,
        "kedaConfig": {"enableKeda": True, "scalingThreshold": "5", "promServerAddress": "http://rt"},
        "deploymentStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2}},
    }
    result = engine(
        runtime("rt", engineConfig=document),
        kedaConfig={"scalingThreshold": "6", "promServerAddress": "http://service"},
        engine={
            "minReplicas": 2,
            "maxReplicas": 4,
            "scaleTarget": 60,
            "maxUnavailable": "25%",
            "timeoutSeconds": 9,
            "canaryTrafficPercent": 10,
            "kedaConfig": {"scalingThreshold": "7"},
            "deploymentStrategy": {"type": "Recreate"},
        },
    ).extension
    assert (result.min_replicas, result.max_replicas, result.scale_metric, result.scale_target) == (2, 4, "memory", 60)
    assert (result.max_unavailable, result.timeout_seconds, result.canary_traffic_percent) == ("25%", 9, 10)
    assert result.keda == {"enableKeda": True, "scalingThreshold": "7", "promServerAddress": "http://service"}
    assert result.deployment_strategy == {"type": "Recreate"}


def test_labels_are_values_that_kubernetes_takes() -> None:
    created_model = model("m" * 80, vendor=" a/b  (c) ")
    result = made(service(model={"name": "m" * 80}), facts(created_model, runtime("r" * 100)))["engine"].labels
    assert len(result["base-model-name"]) == len(result["serving-runtime"]) == 63
    assert result["base-model-vendor"] == "a-b-c"


def test_queues() -> None:
    def queue(**notes: str) -> dict[str, str]:
        requests = {name.replace("_", "-").replace("ome.io-", "ome.io/"): value for name, value in notes.items()}
        result = engine(runtime("rt"), notes=requests).labels
        return {name: value for name, value in result.items() if "volcano" in name or "kueue" in name}

    assert queue() == {}
    assert queue(**{"ome.io/volcano-queue": "q", "ome.io/dedicated-ai-cluster": "d", "kueue-enabled": "true"}) == {
        "volcano.sh/queue-name": "q"
    }
    assert queue(**{"ome.io/dedicated-ai-cluster": "d"}) == {"volcano.sh/queue-name": "d"}


odd = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["", "x", "{{ .Name }}", "1Gi"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "size", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = [
    "runner", "leader", "worker", "containers", "volumes", "nodeSelector", "affinity", "resources", "labels", "annotations",
    "minReplicas", "config", "kedaConfig", "acceleratorOverride", "deploymentStrategy", "tolerations",
]  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), odd, max_size=4), st.dictionaries(st.sampled_from(FIELDS), odd, max_size=4)
)
def test_wrong_types_raise_nothing_and_inputs_stay(asked: Json, told: Json) -> None:
    rt = document("ClusterServingRuntime", "rt", {"engineConfig": told, "routerConfig": told})
    wanted = service(engine=asked, router=asked, decoder=asked)
    before = copy.deepcopy((rt, wanted))
    known = facts(model(), rt)
    result = merge_components(wanted, rt, known.model("default", "llama"), (), known)
    assert set(result) == {"engine", "decoder", "router"}
    for item in result.values():
        assert dict(item.origins) is not None
    assert (rt, wanted) == before
