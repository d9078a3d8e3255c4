# SPDX-License-Identifier: Apache-2.0
"""What the API server is answered, without a cluster."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from fleet_documents import document, service, small_cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_values import path, put, sample, ways, whole_document, wrong

from headrace.core.errors import InvalidArgument
from headrace.fleet.admission import validate, with_defaults
from headrace.fleet.admission.defaults import WARNING
from headrace.fleet.cluster.webhooks.reviews import ClusterSnapshot, json_patch, mutate, review, validate_document
from headrace.fleet.documents import ClusterFacts, FleetSettings
from headrace.fleet.names import DEPLOYMENT_MODE, LAST_APPLIED
from headrace.fleet.schema.kinds import KINDS
from support.properties import examples

FITS = {"supportedModelFormats": [{"name": "safetensors", "modelFormat": {"name": "safetensors"}, "autoSelect": False}]}
FACTS = small_cluster(document("ClusterServingRuntime", "fits", FITS))
SEEN = ClusterSnapshot(FACTS, True)
UNSEEN = ClusterSnapshot(ClusterFacts(settings=FleetSettings()), False)
PLAIN = {"model": {"name": "llama"}, "runtime": {"name": "fits"}, "engine": {}}


def ask(made: Any, before: Any = None, **more: Any) -> bytes:
    request = {"uid": "u-1", "operation": "UPDATE" if before else "CREATE", "object": made, "oldObject": before}
    request |= {"namespace": "default", "dryRun": False, **more}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def told(body: bytes, deed: Any = validate_document, sight: ClusterSnapshot = SEEN) -> Any:
    answer, _ = review(body, deed, sight)
    answer = json.loads(json.dumps(answer))
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert answer["response"]["uid"] == "u-1"
    return answer["response"]


def patched(before: Any, changes: list[Any]) -> Any:
    """RFC 6902, as far as it is used."""
    after = copy.deepcopy(before)
    for each in changes:
        *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in each["path"].split("/")[1:]]
        place = after
        for step in steps:
            place = place[step]
        if each["op"] == "remove":
            del place[last]
        else:
            assert (last in place) == (each["op"] == "replace")
            place[last] = each["value"]
    return after


def filled(made: Any, before: Any = None, sight: ClusterSnapshot = SEEN) -> Any:
    """The document after the mutating webhook, as the API server makes it."""
    response = told(ask(made, before), mutate, sight)
    assert response["allowed"]
    if "patch" not in response:
        return made
    assert response["patchType"] == "JSONPatch"
    return patched(made, json.loads(base64.b64decode(response["patch"])))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~é", max_size=3), inner, max_size=4),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(st.text("ab/~é", max_size=3), VALUES, max_size=4)


@given(MAPPINGS, MAPPINGS)
def test_a_patch_makes_one_document_of_the_other(before: Any, after: Any) -> None:
    changes = json_patch(before, after)
    assert json.dumps(patched(before, changes), sort_keys=True) == json.dumps(after, sort_keys=True)
    assert json_patch(after, copy.deepcopy(after)) == []


REPLICAS = st.fixed_dictionaries({}, optional={"minReplicas": st.integers(0, 9), "maxReplicas": st.integers(0, 9)})
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "engine": REPLICAS,
        "decoder": REPLICAS,
        "router": REPLICAS,
        "model": st.sampled_from([{"name": "llama"}, {"name": "own"}, {"name": "nobody"}]),
        "runtime": st.just({"name": "vllm"}),
        "predictor": st.fixed_dictionaries(
            {}, optional={"model": st.just({"baseModel": "own"}), "minReplicas": st.integers(0, 3)}
        ),
    },
)


@settings(max_examples=examples(200))
@given(SPECS, st.sampled_from([{}, {DEPLOYMENT_MODE: "Serverless"}]))
def test_the_patched_document_is_what_admission_makes_of_it(spec: Any, annotations: Any) -> None:
    made = service(spec, **annotations)
    made["metadata"]["namespace"] = "default"
    after = filled(made)
    assert after == json.loads(json.dumps(with_defaults(made, FACTS)))
    assert filled(after) == after, "a second time there is nothing to do"
    assert filled(after, after) == after, "nor when it is sent again as an edit"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_field_that_is_wrong_is_refused_with_its_name_and_a_fix(kind: Any) -> None:
    for steps, field, _ in ways(kind.spec):
        bad = next(iter(wrong(field)), None)
        if bad is None:
            continue
        made = whole_document(kind, put(kind.spec, steps, bad))
        response = told(ask(made))
        causes = response["status"]["details"]["causes"]
        place = path(steps)
        assert not response["allowed"] and place in [each["field"] for each in causes], place
        assert all(each["message"] for each in causes) and place in response["status"]["message"]


def test_all_problems_are_reported_together_in_text_and_as_causes() -> None:
    made = service(
        {
            "model": {"name": "llama"},
            "engine": {"minReplicas": 5, "maxReplicas": 2, "canaryTrafficPercent": 130},
            "router": {"config": {"routing_strategy": "fastest"}},
        }
    )
    status = told(ask(made))["status"]
    expected = validate({**made, "metadata": {**made["metadata"], "namespace": "default"}}, FACTS)
    assert len(expected) == 3 and (status["code"], status["reason"]) == (422, "Invalid")
    assert status["details"]["kind"] == "InferenceService" and status["details"]["name"] == "llama-chat"
    assert [each["field"] for each in status["details"]["causes"]] == [each.field for each in expected]
    for each in expected:
        assert str(each) in status["message"], "field, what is wrong, what to change"
    assert status["message"].startswith("InferenceService default/llama-chat:")


def test_what_is_not_there_yet_is_a_warning_and_what_is_disabled_is_refused() -> None:
    absent = told(ask(service({"model": {"name": "later"}, "runtime": {"name": "soon"}, "engine": {}})))
    assert absent["allowed"] and len(absent["warnings"]) == 2
    assert "there is no model later" in absent["warnings"][0] and "spec.runtime.name" in absent["warnings"][1]
    disabled = told(ask(service({"model": {"name": "old"}, "runtime": {"name": "dead"}, "engine": {}})))
    assert not disabled["allowed"] and "the runtime dead is disabled" in disabled["status"]["message"]
    runtime = document("ClusterServingRuntime", "r", {"acceleratorRequirements": {"acceleratorClasses": ["b200"]}})
    response = told(ask(runtime, namespace=""))
    assert response["allowed"] and "there is no AcceleratorClass b200" in response["warnings"][0]


def test_that_no_runtime_fits_is_a_warning() -> None:
    response = told(ask(service({"model": {"name": "llama"}, "engine": {}})))
    assert response["allowed"] and "runtime" in response["warnings"][0]
    assert "warnings" not in told(ask(service(PLAIN)))


def test_misspelt_fields_are_refused_and_kept_in_documents_that_have_them() -> None:
    made = service({**PLAIN, "engine": {"minReplica": 1}})
    for sight in (SEEN, UNSEEN):
        refused = told(ask(made), sight=sight)
        assert not refused["allowed"] and "did you mean minReplicas?" in refused["status"]["message"]
    # The API server asks the validating webhook about the document with its defaults.
    assert "did you mean minReplicas?" in told(ask(filled(made)))["status"]["message"]
    runtime = document("ClusterServingRuntime", "r", {"modelSizeRanges": {}})
    assert "did you mean modelSizeRange?" in told(ask(runtime))["status"]["message"]
    edited = {**made, "metadata": {**made["metadata"], "labels": {"team": "a"}}}
    kept = told(ask(edited, made))
    assert kept["allowed"] and "did you mean minReplicas?" in kept["warnings"][0]


def test_fields_of_kubernetes_that_are_almost_right_are_warned_of_once() -> None:
    made = service({**PLAIN, "engine": {"runner": {"livenessProbe": {"periodSecond": 1}}}})
    for sight in (SEEN, UNSEEN):
        (warning,) = told(ask(made), mutate, sight)["warnings"]
        assert "livenessProbe.periodSecond:" in warning and "did you mean periodSeconds?" in warning
    assert "warnings" not in told(ask(made))


def test_warnings_are_short_and_few() -> None:
    names = {f"c{number}\n{'y' * 300}": {"minReplica": 1} for number in range(30)}
    selector = {"acceleratorClass": "z" * 400 + "\n"}
    weights = [f"w{number}" for number in range(30)]
    made = service({**PLAIN, **names, "model": {"name": "llama", "fineTunedWeights": weights[:1]}})
    made["spec"]["acceleratorSelector"] = selector
    (first, second) = told(ask(made))["warnings"]
    assert len(second) == 250 and second.endswith("...") and second.isprintable() and "w0" in first
    runtime = {"acceleratorRequirements": {"acceleratorClasses": weights}}
    assert len(told(ask(document("ClusterServingRuntime", "r", runtime)))["warnings"]) == 12


def test_before_the_first_sync_only_the_document_itself_counts() -> None:
    made = service({"model": {"name": "later"}, "engine": {}})
    response = told(ask(made), sight=UNSEEN)
    assert response["allowed"] and "warnings" not in response
    assert not told(ask(service({"engine": {"minReplicas": 3, "maxReplicas": 1}})), sight=UNSEEN)["allowed"]
    assert "patch" not in told(ask(made), mutate, UNSEEN), "its settings may say another mode"


def test_an_edit_is_refused_for_what_it_makes_wrong_alone() -> None:
    before = service({**PLAIN, "engine": {"minReplicas": 5, "maxReplicas": 2}})
    after = copy.deepcopy(before)
    after["metadata"]["labels"] = {"team": "a"}
    response = told(ask(after, before))
    assert response["allowed"] and "spec.engine.minReplicas" in response["warnings"][0]
    after["spec"]["engine"]["canaryTrafficPercent"] = 200
    causes = told(ask(after, before))["status"]["details"]["causes"]
    assert [each["field"] for each in causes] == ["spec.engine.canaryTrafficPercent"]


def test_what_is_being_deleted_or_of_another_operation_is_let_through() -> None:
    broken = service({"engine": {"minReplicas": "many"}})
    broken["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for deed in (validate_document, mutate):
        for body in (ask(broken, broken), ask(None, broken, operation="DELETE"), ask(broken, operation="CONNECT")):
            response = told(body, deed)
            assert response["allowed"] and "patch" not in response


def test_a_dry_run_is_answered_like_any_other_review() -> None:
    made = service(PLAIN)
    assert told(ask(made, dryRun=True), mutate) == told(ask(made), mutate)


def test_derived_defaults_follow_what_they_were_derived_from() -> None:
    first = filled(service(PLAIN))
    assert first["spec"]["engine"] == {"minReplicas": 1, "maxReplicas": 3}
    assert first["metadata"]["annotations"] == {DEPLOYMENT_MODE: "RawDeployment"}
    more = copy.deepcopy(first)
    more["spec"]["engine"]["minReplicas"] = 5
    more = filled(more, first)
    assert more["spec"]["engine"] == {"minReplicas": 5, "maxReplicas": 5}
    assert told(ask(more, first))["allowed"]
    fewer = copy.deepcopy(more)
    fewer["spec"]["engine"]["minReplicas"] = 2
    assert filled(fewer, more)["spec"]["engine"]["maxReplicas"] == 3
    pair = copy.deepcopy(first)
    pair["spec"]["decoder"] = {}
    assert filled(pair, first)["metadata"]["annotations"] == {DEPLOYMENT_MODE: "PDDisaggregated"}
    zero = copy.deepcopy(first)
    zero["spec"]["engine"]["minReplicas"] = 0
    assert filled(zero, first)["metadata"]["annotations"] == {}


def test_a_value_written_by_the_user_stays_even_if_it_is_the_default() -> None:
    made = service({**PLAIN, "engine": {"maxReplicas": 3}})
    made["metadata"]["annotations"] = {LAST_APPLIED: json.dumps({"spec": made["spec"]})}
    first = filled(made)
    more = copy.deepcopy(first)
    more["spec"]["engine"]["minReplicas"] = 5
    assert filled(more, first)["spec"]["engine"] == {"minReplicas": 5, "maxReplicas": 3}
    assert not told(ask(filled(more, first), first))["allowed"]
    more["metadata"]["annotations"][LAST_APPLIED] = "{no"
    assert filled(more, first)["spec"]["engine"]["maxReplicas"] == 5


def test_a_predictor_may_be_applied_again_and_again() -> None:
    made = service({"predictor": {"model": {"baseModel": "own"}, "minReplicas": 2}})
    assert told(ask(made), mutate)["warnings"] == [WARNING]
    first = filled(made)
    assert "predictor" not in first["spec"] and first["spec"]["model"]["kind"] == "BaseModel"
    # What kubectl sends: the live document with the predictor, which it misses, put back.
    again = copy.deepcopy(first)
    again["spec"]["predictor"] = made["spec"]["predictor"]
    assert filled(again, first) == first
    again["spec"]["predictor"] = {"model": {"baseModel": "own"}, "minReplicas": 4}
    assert filled(again, first)["spec"]["engine"] == {"minReplicas": 4, "maxReplicas": 4}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"{}",
        b'{"apiVersion":"admission.k8s.io/v1beta1","request":{"uid":"1"}}',
        b"[" * 100_000,
    ]
    + [b'{"apiVersion":"admission.k8s.io/v1","request":{}}', b'{"apiVersion":"admission.k8s.io/v1","request":[1]}'],
)
def test_a_body_that_is_not_a_review_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="AdmissionReview"):
        review(body, validate_document, SEEN)


@given(st.sampled_from(KINDS), VALUES, VALUES, VALUES)
def test_no_document_makes_a_review_raise(kind: Any, spec: Any, metadata: Any, before: Any) -> None:
    made = {"apiVersion": "ome.io/v1beta1", "kind": kind.name, "metadata": metadata, "spec": spec}
    old = {**made, "spec": before}
    for deed in (mutate, validate_document):
        for sight in (SEEN, UNSEEN):
            told(ask(made, old), deed, sight)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_document_with_every_field_is_reviewed(kind: Any) -> None:
    made = whole_document(kind, sample(kind.spec, full=True))
    assert told(ask(made), mutate)["allowed"]
    told(ask(made, made))
