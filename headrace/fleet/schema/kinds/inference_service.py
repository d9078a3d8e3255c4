# SPDX-License-Identifier: Apache-2.0
"""InferenceService: which model, by which runtime, as which components."""

from __future__ import annotations

from headrace.fleet.names import LONGEST_LABEL
from headrace.fleet.rollouts.state import PHASES
from headrace.fleet.schema.fields import (
    INT64,
    Column,
    Field,
    Kind,
    choice,
    many,
    mapping,
    number,
    record,
    reference,
    renamed,
    text,
    texts,
    truth,
    whole,
)
from headrace.fleet.schema.kinds.components import ACCELERATOR_SELECTOR, EXTENSION, KEDA, WORKER, routed, served
from headrace.fleet.schema.kinds.pods import POD, container

_SPEC = record(
    "spec",
    "What is asked for.",
    record(
        "model",
        "The model to serve.",
        reference("name", "Name of the BaseModel or ClusterBaseModel.", required=True),
        choice("kind", "Kind of the model.", "ClusterBaseModel", "BaseModel", default="ClusterBaseModel"),
        choice("apiGroup", "", "ome.io", default="ome.io"),
        texts("fineTunedWeights", "Fine-tuned weights on top; one at most."),
    ),
    record(
        "runtime",
        "The runtime to serve it with; chosen by the model if absent.",
        reference("name", "Name of the ServingRuntime or ClusterServingRuntime.", required=True),
        choice(
            "kind", "Kind of the runtime.", "ClusterServingRuntime", "ServingRuntime", default="ClusterServingRuntime"
        ),
        choice("apiGroup", "", "ome.io", default="ome.io"),
    ),
    served("engine", "Answers requests; with a decoder, the prefill half."),
    served("decoder", "The decode half of a disaggregated service."),
    routed("router", "Spreads requests over the engines."),
    KEDA,
    ACCELERATOR_SELECTOR,
    record(
        "predictor",
        "Deprecated: becomes engine, model and runtime.",
        *POD,
        *EXTENSION,
        record(
            "model",
            "",
            text("baseModel"),
            text("runtime"),
            text("storageUri"),
            text("protocolVersion"),
            texts("fineTunedWeights"),
            *container(named=False),
        ),
        renamed(WORKER, "workerSpec"),
    ),
)

_URL = text("url")
_STATES = ("", "Pending", "Standby", "Loading", "Loaded", "FailedToLoad")
FAILURES = (
    "BaseModelNotReady",
    "BaseModelNotFound",
    "ModelLoadFailed",
    "RuntimeUnhealthy",
    "RuntimeDisabled",
    "NoSupportingRuntime",
    "RuntimeNotRecognized",
    "InvalidPredictorSpec",
)
TRANSITIONS = ("", "UpToDate", "InProgress", "BlockedByFailedLoad", "InvalidSpec")

CONDITIONS: Field = many(
    "conditions",
    "What is so, and why.",
    record(
        "",
        "",
        text("type", required=True),
        choice("status", "", "True", "False", "Unknown", required=True),
        text("reason"),
        text("message"),
        text("severity"),
        text("lastTransitionTime"),
        whole("observedGeneration", least=0, most=2**63 - 1),
    ),
)

_COMPONENT = record(
    "",
    "",
    text("mode", "How it is run."),
    whole("replicas", "Pods that it should have.", least=0),
    whole("readyReplicas", "Pods that answer.", least=0),
    text("latestReadyRevision"),
    text("latestCreatedRevision"),
    text("previousRolledoutRevision"),
    text("latestRolledoutRevision"),
    many("revisions", "Revisions that have a name.", record("", "", text("name"), text("digest", "Of their pods."))),
    record(
        "rollout",
        "How far a rollout by steps is.",
        text("revision", "Digest of the pods that come."),
        choice("phase", "Where it is.", *PHASES),
        many("steps", "Shares of the requests, in percent.", whole("", least=1, most=99)),
        whole("step", "The one it is at, from 1.", least=1),
        whole("percent", "The share that it is given.", least=0, most=100),
        text("since", "When the step began, or the rollout ended."),
        text("message", "In words."),
        text("command", "The last one that was seen."),
        many(
            "counts",
            "What routers had counted when the step began.",
            record(
                "",
                "",
                text("router"),
                text("revision"),
                whole("requests", least=0, most=INT64),
                whole("errors", least=0, most=INT64),
                number("seconds"),
                text("times", "How many took how long, by bucket."),
            ),
        ),
    ),
    many(
        "traffic",
        "",
        record(
            "",
            "",
            text("revisionName"),
            text("configurationName"),
            whole("percent", least=0, most=100),
            truth("latestRevision"),
            text("tag"),
            _URL,
        ),
    ),
    _URL,
    text("restURL"),
    record("address", "", _URL),
    record(
        "selectedAccelerator",
        "",
        text("acceleratorClass"),
        text("reason"),
        mapping("nodeSelector"),
        record("resourceRequests", ""),
    ),
)

_MODEL_STATUS = record(
    "modelStatus",
    "How far the model is.",
    choice("transitionStatus", "", *TRANSITIONS),
    record(
        "modelRevisionStates",
        "",
        choice("activeModelState", "", *_STATES),
        choice("targetModelState", "", *_STATES),
    ),
    record(
        "lastFailureInfo",
        "",
        text("location"),
        choice("reason", "", *FAILURES),
        text("message"),
        text("modelRevisionName"),
        text("time"),
        whole("exitCode"),
    ),
    record("modelCopies", "", whole("failedCopies", least=0), whole("totalCopies", least=0)),
)

_STATUS = record(
    "status",
    "What is.",
    CONDITIONS,
    whole("observedGeneration", least=0, most=2**63 - 1),
    mapping("annotations"),
    record("address", "", _URL),
    _URL,
    record(
        "runtime",
        "The runtime that was chosen.",
        text("name"),
        text("kind"),
        text("reason", "Why this one."),
    ),
    record("model", "The model that is served.", text("name"), text("kind"), text("path", "Where it is on the nodes.")),
    mapping("components", "By engine, decoder, router.", _COMPONENT),
    _MODEL_STATUS,
)

_ENGINE = ".status.components.engine"

INFERENCE_SERVICE = Kind(
    "InferenceService",
    "inferenceservices",
    namespaced=True,
    says="A model that is served: which, by which runtime, with how many replicas.",
    spec=_SPEC,
    status=_STATUS,
    short=("isvc",),
    named=r"[a-z]([-a-z0-9]*[a-z0-9])?",
    # The name is the value of a label on all objects, and the name of a Service.
    longest_name=LONGEST_LABEL,
    columns=(
        Column("URL", ".status.url"),
        Column("Ready", ".status.conditions[?(@.type=='Ready')].status"),
        Column("Reason", ".status.conditions[?(@.type=='Ready')].reason"),
        Column("BaseModel", ".spec.model.name"),
        Column("Runtime", ".spec.runtime.name"),
        Column("Prev", f"{_ENGINE}.traffic[?(@.tag=='prev')].percent", "integer"),
        Column("Latest", f"{_ENGINE}.traffic[?(@.latestRevision==true)].percent", "integer"),
        Column("PrevRolledoutRevision", f"{_ENGINE}.traffic[?(@.tag=='prev')].revisionName"),
        Column("LatestReadyRevision", f"{_ENGINE}.traffic[?(@.latestRevision==true)].revisionName"),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
)
