# SPDX-License-Identifier: Apache-2.0
"""The controller on a real API server, and what people write: a condition and an event that say what to change.

A table of what is wrong, all of it at once beside a service that is fine; then what looks wrong and is not.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

ENGINE = {"minReplicas": 1, "maxReplicas": 2}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "two-weights": ({"model": {"name": "M", "fineTunedWeights": ["a", "b"]}, "engine": ENGINE}, "", "fineTunedWeights"),
    "no-such-weight": ({"model": {"name": "M", "fineTunedWeights": ["a"]}, "engine": ENGINE}, "", "FineTunedWeight"),
    "min-above-max": ({"model": {"name": "M"}, "engine": {"minReplicas": 5, "maxReplicas": 2}}, "", "minReplicas"),
    "no-such-model": ({"model": {"name": "nothing"}, "engine": ENGINE}, "BaseModelNotFound", "nothing"),
    "no-such-runtime": (
        {"model": {"name": "M"}, "runtime": {"name": "nothing"}, "engine": ENGINE}, "RuntimeNotRecognized", "nothing",
    ),
    "disabled-runtime": ({"model": {"name": "M"}, "runtime": {"name": "off"}, "engine": ENGINE}, "RuntimeDisabled", "off"),
    "decoder-alone": ({"model": {"name": "M"}, "decoder": ENGINE}, "", "engine"),
    "n" * 63: ({"model": {"name": "nothing"}, "engine": ENGINE}, "BaseModelNotFound", "nothing"),
}  # fmt: skip
REFUSED = {
    "canary": {"engine": {"canaryTrafficPercent": 101}},
    "type": {"engine": {"minReplicas": "many"}},
    "least": {"engine": {"minReplicas": -1}},
}
OFF = {
    "apiVersion": "ome.io/v1beta1",
    "kind": "ServingRuntime",
    "metadata": {"name": "off", "namespace": "default"},
    "spec": {
        "disabled": True,
        "supportedModelFormats": [{"modelFormat": {"name": "onnx"}, "autoSelect": True}],
        "containers": [{"name": "ome-container", "image": "one:1"}],
    },
}


def service(name: str, spec: dict[str, Any], model: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default"}
    said = json.loads(json.dumps(spec).replace('"M"', json.dumps(model)))
    return {"apiVersion": "ome.io/v1beta1", "kind": "InferenceService", "metadata": metadata, "spec": said}


def test_an_invalid_document_is_reported_and_the_others_are_not_affected(clean: Any) -> None:
    from controller_site import SERVICES, Running, until

    good = clean.sample("cpu")
    model = good[0]["metadata"]["name"]
    with Running(clean.server.kubeconfig) as running:
        clean.apply(*good)
        clean.apply(OFF)  # before the service that names it: they come to the controller by different ways
        running.settle()
        made, count = clean.children(), len(running.writes)
        clean.apply(*(service(name, spec, model) for name, (spec, _, _) in WRONG.items()))
        for name, (_, reason, said) in WRONG.items():
            told = until(lambda name=name: clean.ready(name))
            assert told["status"] == "False" and said in told["message"], (name, told)
            assert not reason or told["reason"] == reason, (name, told)
            assert told["observedGeneration"] == 1
            until(lambda name=name: "Warning" in [each["type"] for each in clean.events(name)])
        running.settle()
        # Not their versions: the cluster's own controllers write what they find into objects, in their own time.
        assert clean.children().keys() == made.keys(), "the rest of the fleet is untouched"
        told = {f"{SERVICES}/{name}/status" for name in WRONG}
        wrote = {each.partition(" ")[2] for each in running.writes[count:]}
        assert wrote == told | {"/api/v1/namespaces/default/events"}, "nothing is written but what is wrong"
        for name, spec in REFUSED.items():
            answer = clean.server.kubectl("apply", "-f", "-", input=json.dumps(service(name, spec, model)), check=False)
            assert "spec.engine" in answer and "nvalid" in answer, answer
    clean.server.kubectl("delete", "servingruntime", "off")


def test_templates_percent_signs_and_long_names_are_fine(clean: Any) -> None:
    from controller_site import Running

    (model, plain), keda = clean.sample("cpu"), clean.sample("keda")
    jinja = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    runner = {"name": "ome-container", "image": "one:1", "command": ["serve", "--chat-template", jinja]}
    templated = {**plain, "metadata": {"name": "jinja", "namespace": "default"}}
    templated["spec"] = {**plain["spec"], "engine": {**ENGINE, "runner": runner}}
    long = {**plain, "metadata": {"name": f"a{'b' * 61}c", "namespace": "default"}}
    query = "sum(a{x='%s', path=~'/50%25'}) % 7"
    keda[-1]["spec"]["kedaConfig"]["customPromQuery"] = query
    with Running(clean.server.kubeconfig) as running:
        # The models first: a service that is seen before its model is warned of that, and this is not about that.
        clean.apply(model, *keda[:-1])
        running.settle()
        clean.apply(templated, long, keda[-1])
        running.settle()
        for name in ("jinja", long["metadata"]["name"], "llama-keda"):
            assert clean.ready(name).get("reason") not in ("ReconcileError", "InternalError"), clean.ready(name)
            assert not [each for each in clean.events(name) if each["type"] == "Warning"], "merely pending"
        made = clean.fetch("/apis/apps/v1/namespaces/default/deployments/jinja-engine")
        assert made["spec"]["template"]["spec"]["containers"][0]["command"][-1] == jinja
        path = "/apis/keda.sh/v1alpha1/namespaces/default/scaledobjects/scaledobject-llama-keda-engine"
        (trigger,) = clean.fetch(path)["spec"]["triggers"]
        assert trigger["metadata"]["query"] == "sum(a{x='llama-keda-engine', path=~'/50%25'}) % 7"
        count = len(running.writes)
        clean.apply(model, templated, long, *keda)
        running.settle()
        assert running.writes[count:] == []


@pytest.mark.parametrize(
    ("capability", "sample", "says"),
    [
        ("lws", "multi-node", "LeaderWorkerSet"),
        ("keda", "keda", "KEDA"),
        ("knative", "serverless", "Knative"),
        ("inference-pool", "inference-pool", "InferencePool"),
    ],
)
def test_missing_objects_may_be_created_later(clean: Any, capability: str, sample: str, says: str) -> None:
    from controller_site import FOREIGN, Running, until

    (kind,) = [each for each in FOREIGN if each.capability == capability]
    documents = clean.sample(sample)
    name = documents[-1]["metadata"]["name"]
    clean.take(kind)
    try:
        with Running(clean.server.kubeconfig) as running:
            clean.apply(*documents[:-1])  # else the service may be seen before its model, and is warned of that
            running.settle()
            clean.apply(documents[-1])
            if (
                sample == "serverless"
                and clean.service(name)["metadata"].get("annotations", {}).get("ome.io/deploymentMode") != "Serverless"
            ):
                until(lambda: any("Deployment" in each for each in clean.children()))  # our router wakes it instead
            else:
                said = until(lambda: clean.ready(name))
                assert said["status"] == "False" and says in said["message"], said
                until(lambda: clean.events(name))  # it is told after the status is written
                assert [each["type"] for each in clean.events(name)] == ["Warning"]
            clean.bring(kind)
            until(lambda: any(each.startswith(f"{kind.kind}.{kind.group}") for each in clean.children()))
            running.settle()
    finally:
        clean.bring(kind)


def test_a_frozen_and_a_killed_api_server(clean: Any) -> None:
    from controller_site import Running, until

    documents = clean.sample("cpu")
    with Running(clean.server.kubeconfig) as running:
        clean.apply(*documents)
        running.settle()
        made = clean.children()
        clean.server.freeze()
        try:
            running.controller._view.enqueue_all()
        finally:
            clean.server.thaw()
        words = clean.server.kill_api()
        until(lambda: running.lost > 3)  # it has noticed, and goes on asking
        clean.server.start_api(words)
        # It says that it is ready before it tells of custom resources, without which kubectl cannot apply them.
        until(lambda: clean.reachable() and clean.has("ome.io", "v1beta1", "inferenceservices") is True)
        until(lambda: clean.has("ome.io", "v1beta1", "basemodels") is True)
        documents[-1]["spec"]["engine"]["maxReplicas"] = 9
        clean.apply(*documents)
        path = "/apis/autoscaling/v2beta2/namespaces/default/horizontalpodautoscalers/digits-engine"
        until(lambda: clean.fetch(path)["spec"]["maxReplicas"] == 9)
        running.settle()
        assert clean.children().keys() == made.keys(), "nothing was rebuilt"
