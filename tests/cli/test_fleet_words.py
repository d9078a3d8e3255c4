# SPDX-License-Identifier: Apache-2.0
"""What is read out of documents for people, and what is said of refusals: the pure part of `headrace.fleet.client`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest
from fleet_in_memory import MemoryFleet, canary, model, service
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from headrace.fleet.client.advice import next_steps
from headrace.fleet.client.checking import checked, gathered, with_documents
from headrace.fleet.client.faults import conflicts_with_us, fault
from headrace.fleet.client.kinds import kinds_of, split
from headrace.fleet.client.rollouts import promotion, rollback, rollouts_of
from headrace.fleet.client.rows import cells, columns_of
from headrace.fleet.client.summaries import age, reason_of, summary, verdict
from headrace.fleet.client.waiting import Patience, until_gone, until_ready
from headrace.fleet.cluster.api import Refused, Unreachable
from headrace.fleet.documents import parse, write
from headrace.fleet.schema.kinds import KINDS
from headrace.fleet.words import ClusterFacts, cluster_facts

NOW = datetime(2024, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("isvc", ["InferenceService"]),
        ("isvcs", ["InferenceService"]),
        ("InferenceService", ["InferenceService"]),
        ("inferenceservices.ome.io", ["InferenceService"]),
        ("model", ["BaseModel", "ClusterBaseModel"]),
        ("models", ["BaseModel", "ClusterBaseModel"]),
        ("clusterbasemodel", ["ClusterBaseModel"]),
        ("runtimes", ["ServingRuntime", "ClusterServingRuntime"]),
        ("benchmarkjobs", ["BenchmarkJob"]),
        ("benchmark", ["BenchmarkJob"]),
        ("accelerators", ["AcceleratorClass"]),
        ("weights", ["FineTunedWeight"]),
    ],
)
def test_words_for_kinds(word: str, names: list[str]) -> None:
    assert [each.name for each in kinds_of(word)] == names


def test_kinds_and_names() -> None:
    assert (
        split([])[1] == []
        and split(["isvc", "a", "b"])[1] == ["a", "b"]
        and split(["isvc/a", "isvc/b"])[1] == ["a", "b"]
    )
    for words in (["isvc/a", "model/b"], ["isvc/"], ["pods"]):
        with pytest.raises(InvalidArgument):
            split(words)


@pytest.mark.parametrize(
    ("created", "said"),
    [
        ("2024-01-01T11:59:55Z", "5s"),
        ("2024-01-01T11:58:30Z", "90s"),
        ("2024-01-01T11:00:00Z", "60m"),
        ("2024-01-01T02:00:00Z", "10h"),
        ("2023-12-01T12:00:00Z", "31d"),
        ("2025-01-01T00:00:00Z", "0s"),
        ("2024-01-01T11:59:55", "5s"),
        ("", "-"),
        ("yesterday", "-"),
    ],
)
def test_ages(created: str, said: str) -> None:
    assert age(created, NOW) == said


def edited(**changes: Any) -> Any:
    made = service(ready="False", reason="Pending", message="EngineReady: pod a: it waits")
    made["status"] |= changes
    return made


def test_how_far_a_service_is() -> None:
    assert verdict(service()) == "ready" and reason_of(service()) == ""
    assert verdict(edited()) == "waiting" and reason_of(edited()) == "Pending: pod a: it waits"
    assert verdict(edited(observedGeneration=0)) == "waiting" and "last change" in reason_of(
        edited(observedGeneration=0)
    )
    assert verdict({"metadata": {}}) == "waiting" and "not looked" in reason_of({"metadata": {}})
    assert verdict(edited(modelStatus={"transitionStatus": "InvalidSpec"})) == "invalid"
    assert verdict(edited(modelStatus={"transitionStatus": "BlockedByFailedLoad"})) == "failing"
    assert verdict(service(ready="False", reason="ReconcileError", message="refused")) == "failing"
    assert (
        reason_of(service(ready="Unknown", reason="Waiting", message="EngineReady: Waiting")) == "EngineReady: Waiting"
    )
    rolling = service()
    rolling["status"]["conditions"].append(
        {"type": "LatestDeploymentReady", "status": "Unknown", "reason": "Progressing"}
    )
    assert verdict(rolling) == "waiting" and reason_of(rolling) == "Progressing" and summary(rolling).ready == "True"


def test_modes_and_shares() -> None:
    assert summary(canary()).traffic == "20% new, 80% old" and summary(service()).traffic == "100%"
    pair = service()
    pair["spec"]["decoder"] = {}
    assert summary(pair).mode == "PDDisaggregated"
    elsewhere = service()
    elsewhere["metadata"]["annotations"] = {"ome.io/deploymentMode": "VirtualDeployment"}
    assert summary(elsewhere).mode == "VirtualDeployment"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "True", "Ready", "2024-01-01T00:00:00Z"]),
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "status", "reason", "percent", "traffic", "latestRevision", "engine", "name", "x"]
            ),
            each,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(status=JSON, spec=JSON, metadata=JSON, kind=st.sampled_from([each.name for each in KINDS]))
def test_whatever_a_document_is_it_is_shown(status: Any, spec: Any, metadata: Any, kind: str) -> None:
    document = {"kind": kind, "metadata": metadata, "spec": spec, "status": status}
    row = cells(document, columns_of([kind], wide=True, spaces=True), NOW)
    assert all(isinstance(each, str) and each for each in row)
    assert verdict(document) in ("ready", "invalid", "failing", "waiting") and next_steps(document, [document])
    rollouts_of(document)


@pytest.mark.parametrize(
    ("refused", "kind", "said"),
    [
        (Unreachable("ConnectError"), Unavailable, "https://it does not answer (ConnectError)"),
        (Refused(401, "Unauthorized", ""), Unauthenticated, "log in"),
        (Refused(403, "Forbidden", 'User "x" cannot list y'), PermissionDenied, "ask for that right"),
        (Refused(403, "Forbidden", "exceeded quota"), FailedPrecondition, "a rule of the cluster"),
        (
            Refused(404, "", "404 page not found"),
            FailedPrecondition,
            "headrace operator manifests | kubectl apply -f -",
        ),
        (Refused(404, "NotFound", 'namespaces "a" not found'), FailedPrecondition, "create it first"),
        (Refused(409, "Conflict", 'conflict with "kubectl": .spec.a'), FailedPrecondition, "--force-conflicts"),
        (Refused(409, "Conflict", "the object has been modified"), Unavailable, "try again"),
        (Refused(422, "Invalid", "spec.a: Invalid\nvalue"), InvalidArgument, "spec.a: Invalid value"),
        (Refused(429, "", ""), Unavailable, "try again later"),
        (Refused(503, "", ""), Unavailable, "try again later"),
    ],
)
def test_refusals_say_what_to_do(refused: Any, kind: type[HeadraceError], said: str) -> None:
    found = fault(refused, "doing it", "https://it")
    assert type(found) is kind and said in found.message and "\n" not in found.message


def test_our_own_verbs_are_no_conflict() -> None:
    assert conflicts_with_us(Refused(409, "Conflict", 'conflict with "headrace-cli" using v1: .spec.a'))
    assert not conflicts_with_us(
        Refused(409, "Conflict", 'conflict with "headrace-cli": .a, conflict with "kubectl": .b')
    )
    assert not conflicts_with_us(Refused(409, "Conflict", "modified"))


def test_a_canary_is_promoted_or_taken_back_by_its_share() -> None:
    for change, percent in ((promotion(canary()), 100), (rollback(canary()), 0)):
        assert change["spec"] == {"engine": {"canaryTrafficPercent": percent}}
        assert change["metadata"] == {"resourceVersion": "7"}, "only what was looked at is moved"
    with pytest.raises(FailedPrecondition, match="apply its earlier file"):
        rollback(service())
    with pytest.raises(FailedPrecondition, match="undone already"):
        rollback(canary(percent=0))
    with pytest.raises(FailedPrecondition, match="its pods are all the same"):
        single = service()
        single["spec"]["engine"]["canaryTrafficPercent"] = 10
        promotion(single)
    with pytest.raises(InvalidArgument, match="there are engine"):
        promotion(canary(), "decoder")
    # Knative has kept the revision before.
    kept = service()
    kept["status"]["components"]["engine"] |= {"mode": "Serverless", "previousRolledoutRevision": "digits-engine-00000"}
    assert rollback(kept)["spec"] == {"engine": {"canaryTrafficPercent": 0}}


def pod(**container: Any) -> Any:
    return {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"name": "ome-container", **container}]}}


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (pod(state={"waiting": {"reason": "ErrImagePull"}}), "imagePullSecrets"),
        (pod(state={"waiting": {"reason": "CreateContainerConfigError"}}), "is not there"),
        (pod(lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}), "memory limit"),
        (pod(lastState={"terminated": {"exitCode": 1, "reason": "Error"}}), "logs p -c ome-container --previous"),
        (pod(state={"running": {}}, ready=False), "wait for the model to load"),
        ({"metadata": {"name": "p"}, "status": {"phase": "Failed", "reason": "Evicted"}}, "ran short"),
    ],
)
def test_each_failure_has_a_next_step(seen: Any, said: str) -> None:
    (found,) = next_steps(edited(), [seen])
    assert said in found


def test_next_steps_of_models_operators_and_ready_services() -> None:
    assert "kubectl -n headrace-system get pods" in next_steps({"metadata": {}}, [])[0]
    (found,) = next_steps(edited(), [], {**model(), "status": {"state": "In_Transit"}})
    assert "headrace describe model digits" in found
    (found,) = next_steps(service(), [])
    assert "kubectl -n default port-forward service/digits 8080:8080" in found
    assert any("headrace rollout promote|undo digits" in each for each in next_steps(canary(), []))
    assert "apply the file again" in next_steps(edited(modelStatus={"transitionStatus": "InvalidSpec"}), [])[0]
    assert "get events" in next_steps(edited(), [])[0]


def test_files_are_gathered_in_order_with_their_namespaces() -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}
    job = {"apiVersion": "ome.io/v1beta1", "kind": "BenchmarkJob", "metadata": {"name": "j"}}
    found = gathered(parse(write([job, service(), model(), claim]), "a.yaml"), "mine")
    assert not found.errors
    assert [each.document["kind"] for each in found.sources] == [
        "PersistentVolumeClaim",
        "BaseModel",
        "InferenceService",
        "BenchmarkJob",
    ]
    assert [each.document["metadata"].get("namespace") for each in found.sources] == [
        None,
        "default",
        "default",
        "mine",
    ]
    assert "status" not in found.sources[2].document and "uid" not in found.sources[2].document["metadata"]
    other = gathered(parse(write([service()]), "a.yaml"), "mine", "theirs")
    assert other.errors[0].problem.field == "metadata.namespace" and other.errors[0].place.startswith("a.yaml:")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("apiVersion: ome.io/v1beta1\nkind: InferenceServce\nmetadata: {name: a}", "kind"),
        ("apiVersion: ome.io/v1beta1\nkind: InferenceService\nmetadata: {generateName: a}", "metadata.name"),
        ("kind: ConfigMap\nmetadata: {name: a}", "apiVersion"),
        ("", ""),
    ],
)
def test_what_cannot_be_sent_is_told(text: str, field: str) -> None:
    (error,) = gathered(parse(text, "a.yaml"), "default").errors
    assert error.problem.field == field


def test_what_comes_along_counts_and_what_only_the_cluster_lacks_is_a_warning() -> None:
    asked = gathered(parse(write([service(), model()]), "a.yaml"), "default")
    found = checked(asked, ClusterFacts())
    assert not found.errors and any("runtime" in str(each) for each in found.warnings), found.warnings
    alone = gathered(parse(write([service()]), "a.yaml"), "default")
    assert [each.problem.field for each in checked(alone, ClusterFacts()).errors] == ["spec.model.name"]
    assert not checked(alone, cluster_facts([model()])).errors
    assert not checked(alone, None).errors
    newer = {**model(), "spec": {"modelFormat": {"name": "other"}}}
    assert with_documents(cluster_facts([model()]), [newer]).models == (newer,)


QUICK = Patience(seconds=30, invalid_seconds=0.05, failing_seconds=0.1, look_seconds=0.01)


def test_waiting_ends_when_it_must_be_edited_or_keeps_failing() -> None:
    for transition in ("InvalidSpec", "BlockedByFailedLoad"):
        fleet = MemoryFleet(edited(modelStatus={"transitionStatus": transition}))
        (found,) = asyncio.run(until_ready(fleet, [service()], [].append, QUICK))
        assert not found.ready and found.reason == "Pending: pod a: it waits"


def test_waiting_outlives_a_server_that_is_away_and_sees_a_deletion() -> None:
    fleet, tries = MemoryFleet(service()), [Unavailable("away")]

    def looks(_: MemoryFleet) -> None:
        if tries:
            raise tries.pop()

    fleet.looks = looks
    (found,) = asyncio.run(until_ready(fleet, [service()], [].append, QUICK))
    assert found.ready and found.url
    (found,) = asyncio.run(until_ready(MemoryFleet(), [service()], [].append, QUICK))
    assert not found.ready and "deleted" in found.reason


async def _waited(wait: Coroutine[Any, Any, list[str]]) -> list[str]:
    """What a wait comes to by a clock that goes on while it sleeps and at no other time."""
    moved, real = [0.0], asyncio.sleep
    asyncio.get_running_loop().time = lambda: moved[0]  # type: ignore[method-assign]

    async def sleep(seconds: float) -> None:
        moved[0] += seconds
        await real(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.fleet.client.waiting.asyncio.sleep", sleep)
        return await wait


def test_a_service_of_the_same_name_is_another() -> None:
    fleet, told = MemoryFleet(), list[str]()
    again = copy.deepcopy(service())
    again["metadata"]["uid"] = "new"
    fleet.documents["InferenceService", "default", "digits"] = again
    assert asyncio.run(until_gone(fleet, [service()], told.append, QUICK)) == [] and told == []
    fleet.documents["InferenceService", "default", "digits"] = service()
    left = asyncio.run(_waited(until_gone(fleet, [service()], told.append, Patience(seconds=0.05, look_seconds=0.01))))
    assert left == ["InferenceService digits"] and told == ["waiting for the end of InferenceService digits"]
