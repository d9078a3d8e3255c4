# SPDX-License-Identifier: Apache-2.0
"""Summaries of documents and texts of errors: the pure functions of `headrace.fleet.client`."""

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

from headrace.cli import fleet_local
from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from headrace.fleet.client.contract import kinds_named, parse_targets
from headrace.fleet.client.describe import next_steps
from headrace.fleet.client.kubernetes import conflicts_with_us, explain_error
from headrace.fleet.client.manifests import collect, validate, with_documents
from headrace.fleet.client.readiness import WaitSettings, wait_until_deleted, wait_until_ready
from headrace.fleet.client.rollouts import promotion, rollback, rollouts_of
from headrace.fleet.client.tables import age, cells, columns_of, progress_of, reason_of, summary
from headrace.fleet.documents import ClusterFacts, cluster_facts
from headrace.fleet.schema.kinds import KINDS
from headrace.fleet.yaml_documents import parse, write
from headrace.platforms.kubernetes_client.api import ApiError, Unreachable
from support.programs import run

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
def test_names_and_short_names_of_kinds(word: str, names: list[str]) -> None:
    assert [kind.name for kind in kinds_named(word)] == names


def test_scale_outside_the_bounds_names_the_field_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"name": "digits-engine", "replicas": 3, "min": 2, "max": 3}
    monkeypatch.setattr(fleet_local, "_with_local_fleet", lambda folder, work: result)
    done = run("scale", "digits", "--replicas", "9")
    assert done.returncode == 0 and done.stdout == "digits-engine scaled to 3\n"
    warning, hint = done.stderr.splitlines()
    assert warning == "warning: 9 is outside its bounds: minReplicas is 2, maxReplicas is 3"
    assert "engine.maxReplicas to 9" in hint
    assert "engine.minReplicas to 1" in run("scale", "digits", "--replicas", "1").stderr


def test_kinds_and_names() -> None:
    assert (
        parse_targets([])[1] == []
        and parse_targets(["isvc", "a", "b"])[1] == ["a", "b"]
        and parse_targets(["isvc/a", "isvc/b"])[1] == ["a", "b"]
    )
    for words in (["isvc/a", "model/b"], ["isvc/"], ["pods"]):
        with pytest.raises(InvalidArgument):
            parse_targets(words)
    kinds, names = parse_targets(["two"], named=True)
    assert [kind.name for kind in kinds] == ["InferenceService"] and names == ["two"]
    assert parse_targets(["isvc"], named=True)[1] == []
    with pytest.raises(InvalidArgument, match="did you mean runtimes"):
        parse_targets(["runtmes", "two"], named=True)


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
    document = service(ready="False", reason="Pending", message="EngineReady: pod a: it waits")
    document["status"] |= changes
    return document


def test_how_far_a_service_is() -> None:
    assert progress_of(service()) == "ready" and reason_of(service()) == ""
    assert progress_of(edited()) == "waiting" and reason_of(edited()) == "Pending: pod a: it waits"
    assert progress_of(edited(observedGeneration=0)) == "waiting" and "last change" in reason_of(
        edited(observedGeneration=0)
    )
    assert progress_of({"metadata": {}}) == "waiting" and "not reconciled" in reason_of({"metadata": {}})
    assert progress_of(edited(modelStatus={"transitionStatus": "InvalidSpec"})) == "invalid"
    assert progress_of(edited(modelStatus={"transitionStatus": "BlockedByFailedLoad"})) == "failing"
    assert progress_of(service(ready="False", reason="ReconcileError", message="refused")) == "failing"
    assert (
        reason_of(service(ready="Unknown", reason="Waiting", message="EngineReady: Waiting")) == "EngineReady: Waiting"
    )
    rolling = service()
    rolling["status"]["conditions"].append(
        {"type": "LatestDeploymentReady", "status": "Unknown", "reason": "Progressing"}
    )
    assert (
        progress_of(rolling) == "waiting" and reason_of(rolling) == "Progressing" and summary(rolling).ready == "True"
    )


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
    lambda item: (
        st.lists(item, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "status", "reason", "percent", "traffic", "latestRevision", "engine", "name", "x"]
            ),
            item,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(status=JSON, spec=JSON, metadata=JSON, kind=st.sampled_from([kind.name for kind in KINDS]))
def test_whatever_a_document_is_it_is_shown(status: Any, spec: Any, metadata: Any, kind: str) -> None:
    document = {"kind": kind, "metadata": metadata, "spec": spec, "status": status}
    row = cells(document, columns_of([kind], wide=True, spaces=True), NOW)
    assert all(isinstance(cell, str) and cell for cell in row)
    assert progress_of(document) in ("ready", "invalid", "failing", "waiting") and next_steps(document, [document])
    rollouts_of(document)


@pytest.mark.parametrize(
    ("refused", "kind", "said"),
    [
        (Unreachable("ConnectError"), Unavailable, "https://it does not answer (ConnectError)"),
        (ApiError(401, "Unauthorized", ""), Unauthenticated, "log in"),
        (ApiError(403, "Forbidden", 'User "x" cannot list y'), PermissionDenied, "ask for that permission"),
        (ApiError(403, "Forbidden", "exceeded quota"), FailedPrecondition, "a policy of the cluster"),
        (
            ApiError(404, "", "404 page not found"),
            FailedPrecondition,
            "headrace operator manifests | kubectl apply -f -",
        ),
        (ApiError(404, "NotFound", 'namespaces "a" not found'), FailedPrecondition, "create it first"),
        (ApiError(409, "Conflict", 'conflict with "kubectl": .spec.a'), FailedPrecondition, "--force-conflicts"),
        (ApiError(409, "Conflict", "the object has been modified"), Unavailable, "try again"),
        (ApiError(422, "Invalid", "spec.a: Invalid\nvalue"), InvalidArgument, "spec.a: Invalid value"),
        (ApiError(429, "", ""), Unavailable, "try again later"),
        (ApiError(503, "", ""), Unavailable, "try again later"),
    ],
)
def test_refusals_say_what_to_do(refused: Any, kind: type[HeadraceError], said: str) -> None:
    result = explain_error(refused, "doing it", "https://it")
    assert type(result) is kind and said in result.message and "\n" not in result.message


def test_our_own_verbs_do_not_conflict() -> None:
    assert conflicts_with_us(ApiError(409, "Conflict", 'conflict with "headrace-cli" using v1: .spec.a'))
    assert not conflicts_with_us(
        ApiError(409, "Conflict", 'conflict with "headrace-cli": .a, conflict with "kubectl": .b')
    )
    assert not conflicts_with_us(ApiError(409, "Conflict", "modified"))


def test_a_canary_is_promoted_or_rolled_back_by_its_share() -> None:
    for change, percent in ((promotion(canary()), 100), (rollback(canary()), 0)):
        assert change["spec"] == {"engine": {"canaryTrafficPercent": percent}}
        assert change["metadata"] == {"resourceVersion": "7"}, "only what was looked at is moved"
    with pytest.raises(FailedPrecondition, match="apply its earlier file"):
        rollback(service())
    with pytest.raises(FailedPrecondition, match="undone already"):
        rollback(canary(percent=0))
    with pytest.raises(FailedPrecondition, match="its pods are all of one revision"):
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
    assert any("headrace rollout promote|undo digits" in next_step for next_step in next_steps(canary(), []))
    assert "apply the file again" in next_steps(edited(modelStatus={"transitionStatus": "InvalidSpec"}), [])[0]
    assert "get events" in next_steps(edited(), [])[0]


def test_files_are_gathered_in_order_with_their_namespaces() -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}
    job = {"apiVersion": "ome.io/v1beta1", "kind": "BenchmarkJob", "metadata": {"name": "j"}}
    result = collect(parse(write([job, service(), model(), claim]), "a.yaml"), "mine")
    assert not result.errors
    assert [source.document["kind"] for source in result.sources] == [
        "PersistentVolumeClaim",
        "BaseModel",
        "InferenceService",
        "BenchmarkJob",
    ]
    assert [source.document["metadata"].get("namespace") for source in result.sources] == [
        None,
        "default",
        "default",
        "mine",
    ]
    assert "status" not in result.sources[2].document and "uid" not in result.sources[2].document["metadata"]
    other = collect(parse(write([service()]), "a.yaml"), "mine", "theirs")
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
def test_documents_that_cannot_be_sent_are_reported(text: str, field: str) -> None:
    (error,) = collect(parse(text, "a.yaml"), "default").errors
    assert error.problem.field == field


def test_objects_in_the_same_file_count_and_those_missing_only_in_the_cluster_are_a_warning() -> None:
    request = collect(parse(write([service(), model()]), "a.yaml"), "default")
    result = validate(request, ClusterFacts())
    assert not result.errors and any("runtime" in str(warning) for warning in result.warnings), result.warnings
    alone = collect(parse(write([service()]), "a.yaml"), "default")
    assert [error.problem.field for error in validate(alone, ClusterFacts()).errors] == ["spec.model.name"]
    assert not validate(alone, cluster_facts([model()])).errors
    assert not validate(alone, None).errors
    newer = {**model(), "spec": {"modelFormat": {"name": "other"}}}
    assert with_documents(cluster_facts([model()]), [newer]).models == (newer,)


QUICK = WaitSettings(seconds=30, invalid_seconds=0.05, failing_seconds=0.1, poll_seconds=0.01)


def test_waiting_ends_when_it_must_be_edited_or_keeps_failing() -> None:
    for transition in ("InvalidSpec", "BlockedByFailedLoad"):
        fleet = MemoryFleet(edited(modelStatus={"transitionStatus": transition}))
        (found,) = asyncio.run(wait_until_ready(fleet, [service()], [].append, QUICK))
        assert not found.ready and found.reason == "Pending: pod a: it waits"


def test_waiting_survives_a_server_restart_and_notices_a_deletion() -> None:
    fleet, tries = MemoryFleet(service()), [Unavailable("away")]

    def fail_once(_: MemoryFleet) -> None:
        if tries:
            raise tries.pop()

    fleet.looks = fail_once
    (found,) = asyncio.run(wait_until_ready(fleet, [service()], [].append, QUICK))
    assert found.ready and found.url
    (found,) = asyncio.run(wait_until_ready(MemoryFleet(), [service()], [].append, QUICK))
    assert not found.ready and "deleted" in found.reason


async def _waited(wait: Coroutine[Any, Any, list[str]]) -> list[str]:
    """What a wait comes to by a clock that goes on while it sleeps and at no other time."""
    moved, real = [0.0], asyncio.sleep
    asyncio.get_running_loop().time = lambda: moved[0]  # type: ignore[method-assign]

    async def sleep(seconds: float) -> None:
        moved[0] += seconds
        await real(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.fleet.client.readiness.asyncio.sleep", sleep)
        return await wait


def test_a_service_of_the_same_name_is_another() -> None:
    fleet, told = MemoryFleet(), list[str]()
    again = copy.deepcopy(service())
    again["metadata"]["uid"] = "new"
    fleet.documents["InferenceService", "default", "digits"] = again
    assert asyncio.run(wait_until_deleted(fleet, [service()], told.append, QUICK)) == [] and told == []
    fleet.documents["InferenceService", "default", "digits"] = service()
    left = asyncio.run(
        _waited(wait_until_deleted(fleet, [service()], told.append, WaitSettings(seconds=0.05, poll_seconds=0.01)))
    )
    assert left == ["InferenceService digits"] and told == ["waiting for the deletion of InferenceService digits"]
