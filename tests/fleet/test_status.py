# SPDX-License-Identifier: Apache-2.0
"""The status of services, from plans and what a controller sees of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import seed_examples
import yaml
from fleet_observations import (
    LLAMA,
    NOON,
    ROUTED,
    condition,
    condition_of,
    facts,
    live,
    observe,
    pod,
    revision,
    service,
    status_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import fleet
from headrace.fleet import schema
from headrace.fleet.documents import cluster_facts
from headrace.fleet.explain import shipped_runtimes
from headrace.fleet.planning import plan
from headrace.fleet.status.conditions import Observed
from headrace.fleet.status.service_status import build_status
from headrace.fleet.yaml_documents import read
from support.properties import examples


def has(found: Any, wanted: Any, place: str) -> None:
    """Fails unless every field of `wanted` is in `found` with that value; conditions go by their type."""
    if isinstance(wanted, dict):
        for name, value in wanted.items():
            assert name in found, f"{place}.{name} is missing"
            has(found[name], value, f"{place}.{name}")
    elif isinstance(wanted, list) and wanted and "type" in wanted[0]:
        for item in wanted:
            has({one["type"]: one for one in found}[item["type"]], item, f"{place}[{item['type']}]")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), place
        for number, item in enumerate(wanted):
            has(found[number], item, f"{place}[{number}]")
    else:
        assert found == wanted, place


@pytest.mark.parametrize("least", [1, 0], ids=["raw", "serverless"])
def test_the_status_of_the_seed_field_for_field(least: int) -> None:
    cluster = facts(
        ingress_domain="example.com",
        disable_ingress_creation=False,
        enable_gateway_api=True,
        ingress_gateway="istio-system/gateway",
    )
    document = service({**LLAMA, "engine": {"minReplicas": least}, "router": {"minReplicas": least}})
    planned = plan(document, cluster)
    assert planned.problems == []
    half_past = datetime(2024, 1, 15, 10, 30, tzinfo=UTC)
    down = [
        f"{kind}/llama-chat-{component}" for kind in ("Deployment", "Service") for component in ("engine", "router")
    ]
    document["status"] = build_status(document, planned, observe(planned, down=down), half_past - timedelta(minutes=5))
    assert condition_of(document["status"], "Ready")["status"] == "False"
    pods = [
        pod(f"{component}-1", component, ready=True, labels=revision(planned, component) if least else {})
        for component in ("engine", "router")
    ]
    status = build_status(document, planned, observe(planned, pods=pods), half_past)
    has({"status": status}, yaml.safe_load(seed_examples.STATUS), "")
    assert schema.validate_status({**document, "status": status}) == []


def test_all_components_count() -> None:
    document = service(ROUTED)
    planned = plan(document, facts())
    assert condition_of(build_status(document, planned, observe(planned), NOON), "Ready")["status"] == "True"
    status = build_status(document, planned, observe(planned, down=["llama-chat-router"]), NOON)
    assert condition_of(status, "EngineReady")["status"] == "True"
    ready = condition_of(status, "Ready")
    assert ready["status"] == "False" and ready["reason"] == "MinimumReplicasUnavailable"
    assert ready["message"] == "RouterReady: no minimum availability"


def test_before_anything_is_made_all_is_unknown() -> None:
    document = service(LLAMA)
    result = status_of(document, Observed())
    assert {condition["status"] for condition in result["conditions"]} == {"Unknown"}
    assert condition_of(result, "EngineReady")["message"] == "Deployment llama-chat-engine has not been created yet"
    assert "url" not in result and "url" not in result["components"]["engine"]
    assert result["modelStatus"] == {
        "transitionStatus": "InProgress",
        "modelRevisionStates": {"activeModelState": "Pending", "targetModelState": "Pending"},
    }


def test_generation_runtime_and_mode_are_reported() -> None:
    result = status_of(service(LLAMA, generation=7))
    assert result["observedGeneration"] == 7
    assert {condition["observedGeneration"] for condition in result["conditions"]} == {7}
    assert result["runtime"]["name"] == "vllm-text-generation" and result["runtime"]["kind"] == "ClusterServingRuntime"
    model = {"name": "llama-3-70b-instruct", "kind": "ClusterBaseModel", "path": "/models/llama-3-70b"}
    assert result["model"] == model and result["components"]["engine"]["mode"] == "RawDeployment"
    assert result["components"]["engine"]["readyReplicas"] == 1


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    document = service(LLAMA)
    document["status"] = status_of(document)
    later = NOON + timedelta(hours=1)
    assert status_of(document, now=later) == document["status"]
    planned = plan(document, facts())
    down = build_status(document, planned, observe(planned, down=["llama-chat-engine"]), later)
    assert condition_of(down, "EngineReady")["lastTransitionTime"] == "2024-01-15T13:00:00Z"
    assert condition_of(down, "IngressReady")["lastTransitionTime"] == "2024-01-15T12:00:00Z"
    assert down["components"]["engine"]["url"] == document["status"]["components"]["engine"]["url"]


def test_foreign_conditions_stay_and_those_of_a_removed_component_are_deleted() -> None:
    document = service(ROUTED)
    document["status"] = status_of(document)
    document["status"]["conditions"].append({"type": "example.com/Audited", "status": "True"})
    document["spec"] = LLAMA
    kinds = [condition["type"] for condition in status_of(document)["conditions"]]
    assert "example.com/Audited" in kinds and "RouterReady" not in kinds


def test_the_new_revision_may_fail_while_the_old_one_answers() -> None:
    document = service(LLAMA)
    planned = plan(document, facts())
    objects = [live(manifest) for manifest in planned.objects]
    [engine] = [manifest for manifest in objects if manifest["kind"] == "Deployment"]
    stuck = condition("Progressing", False, "ProgressDeadlineExceeded", "ReplicaSet has timed out progressing")
    engine["status"]["conditions"].append(stuck)
    engine["status"] |= {"updatedReplicas": 0}
    status = build_status(document, planned, Observed(tuple(objects)), NOON)
    assert condition_of(status, "Ready")["status"] == "True"
    latest = condition_of(status, "LatestDeploymentReady")
    assert (latest["status"], latest["reason"], latest["severity"]) == ("False", "ProgressDeadlineExceeded", "Info")
    assert "latestReadyRevision" not in status["components"]["engine"]


def test_a_virtual_service_is_ready_and_makes_nothing() -> None:
    result = status_of(service(LLAMA, ome_io__deploymentMode="VirtualDeployment"))
    assert condition_of(result, "Ready")["reason"] == "VirtualDeployment"
    url = "http://llama-chat.default.svc.cluster.local"
    assert result["url"] == result["address"]["url"] == result["components"]["predictor"]["url"] == url


def test_a_gateway_that_rejects_the_route_is_reported() -> None:
    gateway = {"disable_ingress_creation": False, "enable_gateway_api": True, "ingress_gateway": "a/b"}
    asked, cluster = service(LLAMA), facts(**gateway)
    planned = plan(asked, cluster)
    status = build_status(asked, planned, observe(planned, down=["llama-chat"]), NOON)
    ingress = condition_of(status, "IngressReady")
    assert (ingress["status"], ingress["reason"]) == ("False", "NoMatchingParent")
    assert ingress["message"] == "HTTPRoute llama-chat: no such listener"
    silent = [
        {**manifest, "status": {}} if manifest["kind"] == "HTTPRoute" else manifest
        for manifest in map(live, planned.objects)
    ]
    waiting = condition_of(build_status(asked, planned, Observed(tuple(silent)), NOON), "IngressReady")
    assert (waiting["status"], waiting["reason"]) == ("Unknown", "WaitingForGateway")


def test_knative_reports_routes_and_revisions() -> None:
    document = service({**LLAMA, "engine": {"minReplicas": 0}})
    planned = plan(document, facts())
    status = build_status(document, planned, observe(planned), NOON)
    kinds = {condition["type"]: condition["status"] for condition in status["conditions"]}
    assert kinds["EngineRouteReady"] == kinds["EngineConfigurationReady"] == kinds["RoutesReady"] == "True"
    engine = status["components"]["engine"]
    assert engine["mode"] == "Serverless" and engine["latestRolledoutRevision"] == "llama-chat-engine-00001"
    assert engine["address"]["url"] == "http://llama-chat-engine.default.svc.cluster.local"
    # No pod is there, and none is needed before a request comes.
    states = {"activeModelState": "Standby", "targetModelState": "Standby"}
    assert status["modelStatus"] == {"transitionStatus": "UpToDate", "modelRevisionStates": states}


def test_the_router_that_wakes_a_service_is_its_way_in() -> None:
    document = service({**LLAMA, "engine": {"minReplicas": 0}})
    cluster = facts()
    object.__setattr__(cluster, "capabilities", frozenset())
    planned = plan(document, cluster)
    fronts = [
        manifest["metadata"]["name"]
        for manifest in planned.objects
        if manifest["metadata"]["labels"].get("component") == "front"
    ]
    assert fronts and planned.components["engine"].mode == "RawDeployment"
    status = build_status(document, planned, observe(planned, down=fronts, replicas=0), NOON)
    assert (
        condition_of(status, "EngineReady")["status"] == "True"
        and condition_of(status, "IngressReady")["status"] == "False"
    )
    up = build_status(document, planned, observe(planned, replicas=0), NOON)
    assert condition_of(up, "Ready")["status"] == "True"
    assert up["modelStatus"]["modelRevisionStates"]["activeModelState"] == "Standby"


SAMPLES = sorted((Path(fleet.__file__).parent / "samples").glob("*.yaml"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_every_sample_gets_ready_and_stays_so(sample: Path) -> None:
    documents = read([sample]).documents
    cluster = cluster_facts([*documents, *shipped_runtimes()])
    for document in documents:
        if document["kind"] != "InferenceService":
            continue
        planned = plan(document, cluster)
        assert planned.problems == []
        body = {**document, "status": build_status(document, planned, observe(planned), NOON)}
        assert {condition["status"] for condition in body["status"]["conditions"]} == {"True"}
        assert body["status"]["url"] and schema.validate_status(body) == []
        assert build_status(body, planned, observe(planned), NOON + timedelta(days=1)) == body["status"]


def test_the_selected_accelerator_is_reported() -> None:
    [sample] = [sample for sample in SAMPLES if sample.stem == "accelerators"]
    documents = read([sample]).documents
    [asked] = [document for document in documents if document["kind"] == "InferenceService"]
    result = status_of(dict(asked), cluster=cluster_facts([*documents, *shipped_runtimes()]))
    chosen = result["components"]["engine"]["selectedAccelerator"]
    assert chosen["acceleratorClass"] and chosen["reason"] and chosen["nodeSelector"] and chosen["resourceRequests"]


def test_of_several_ray_clusters_one_is_enough() -> None:
    [sample] = [sample for sample in SAMPLES if sample.stem == "multi-node-ray"]
    documents = read([sample]).documents
    [found] = [document for document in documents if document["kind"] == "InferenceService"]
    body = {
        **found,
        "spec": {**found["spec"], "engine": {**found["spec"]["engine"], "minReplicas": 2, "maxReplicas": 2}},
    }
    planned = plan(body, cluster_facts([*documents, *shipped_runtimes()]))
    names = [manifest["metadata"]["name"] for manifest in planned.objects if manifest["kind"] == "RayCluster"]
    assert len(names) == 2
    one = condition_of(build_status(body, planned, observe(planned, down=names[:1]), NOON), "EngineReady")
    none = condition_of(build_status(body, planned, observe(planned, down=names), NOON), "EngineReady")
    assert one["status"] == "True" and (none["status"], none["reason"]) == ("False", "RayClusterFailed")


WORDS = st.sampled_from(
    ["", "True", "False", "Error", "OOMKilled", "CrashLoopBackOff", "not one word", "x\ny", "é" * 2000]
)
KINDS = st.sampled_from(["Ready", "Available", "Progressing", "PodScheduled", "RoutesReady", "Accepted", ""])
NUMBERS = st.integers(0, 100)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A mapping with some of these fields; or, now and then, something else."""
    return st.fixed_dictionaries({}, optional=fields) | WORDS | st.none()


def list_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | WORDS


CONDITIONS = list_of(some(type=KINDS, status=WORDS, reason=WORDS, message=WORDS, lastTransitionTime=WORDS))
STATE = some(
    running=some(),
    waiting=some(reason=WORDS, message=WORDS),
    terminated=some(exitCode=NUMBERS | WORDS, reason=WORDS, message=WORDS, finishedAt=WORDS),
)
CONTAINERS = list_of(some(name=WORDS, ready=st.booleans(), state=STATE, lastState=STATE))
TRAFFIC = list_of(some(revisionName=WORDS, percent=NUMBERS | WORDS, latestRevision=st.booleans(), tag=WORDS))
LIVE = some(
    conditions=CONDITIONS,
    parents=list_of(some(conditions=CONDITIONS)),
    traffic=TRAFFIC,
    state=WORDS,
    latestCreatedRevisionName=WORDS,
    latestReadyRevisionName=WORDS,
    replicas=NUMBERS,
    readyReplicas=NUMBERS | WORDS,
    updatedReplicas=NUMBERS,
    observedGeneration=NUMBERS,
)
POD = some(
    phase=WORDS,
    reason=WORDS,
    message=WORDS,
    conditions=CONDITIONS,
    containerStatuses=CONTAINERS,
    initContainerStatuses=CONTAINERS,
)
BEFORE = some(
    conditions=CONDITIONS,
    url=WORDS,
    components=some(engine=some(traffic=TRAFFIC, revisions=list_of(some(name=WORDS, digest=WORDS)), url=WORDS)),
    modelStatus=some(lastFailureInfo=some(reason=WORDS), modelRevisionStates=some(activeModelState=WORDS)),
)


@settings(max_examples=examples(150), deadline=None)
@given(LIVE, POD, BEFORE, st.sampled_from([LLAMA, ROUTED, {**LLAMA, "engine": {"minReplicas": 0}}]))
def test_for_any_observation_the_status_is_valid_and_stable(first: Any, second: Any, before: Any, spec: Any) -> None:
    document = service(spec)
    if isinstance(before, dict):
        document["status"] = before
    planned = plan(document, CLUSTER)
    objects = tuple({**manifest, "status": first} for manifest in map(live, planned.objects))
    pods = ({**pod("a"), "status": second}, {**pod("b", ready=True), "spec": first})
    document["status"] = build_status(document, planned, Observed(objects, pods), NOON)
    for later in range(1, 3):
        again = build_status(document, planned, Observed(objects, pods), NOON + timedelta(hours=later))
        # What somebody else wrote into it may take one round to go.
        assert later == 1 or again == document["status"]
        document["status"] = again
    assert isinstance(before, dict) or schema.validate_status(document) == []


CLUSTER = facts()
