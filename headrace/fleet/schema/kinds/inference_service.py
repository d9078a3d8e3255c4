# SPDX-License-Identifier: Apache-2.0
"""Table of InferenceService: a model, its runtime and its components."""

from __future__ import annotations

from headrace.fleet.names import LONGEST_LABEL
from headrace.fleet.rollouts.state import PHASES
from headrace.fleet.schema.fields import (
    INT64,
    Column,
    Field,
    Kind,
    boolean,
    choice,
    integer,
    list_of,
    mapping,
    number,
    record,
    reference,
    rename_field,
    string,
    strings,
)
from headrace.fleet.schema.kinds.components import (
    ACCELERATOR_SELECTOR,
    KEDA,
    MORE_CONTAINER_FIELDS,
    MORE_POD_FIELDS,
    POD_FIELDS,
    SCALING_FIELDS,
    SLO,
    WORKER,
    container_fields,
    model_component,
    router_component,
)

_SPEC = record(
    "spec",
    "Desired state of the service.",
    choice(
        "deploymentMode",
        "How pods run. OMENative becomes a Deployment, or a LeaderWorkerSet for a component with a leader or worker.",
        "RawDeployment",
        "OMENative",
    ),
    record(
        "model",
        "The model to serve.",
        reference("name", "Name of the BaseModel or ClusterBaseModel.", required=True),
        choice("kind", "Kind of the model.", "ClusterBaseModel", "BaseModel", default="ClusterBaseModel"),
        choice("apiGroup", "", "ome.io", default="ome.io"),
        strings("fineTunedWeights", "Fine-tuned weights on top; one at most."),
    ),
    record(
        "runtime",
        "The runtime to serve it with; selected by the model if absent.",
        reference("name", "Name of the ServingRuntime or ClusterServingRuntime.", required=True),
        choice(
            "kind", "Kind of the runtime.", "ClusterServingRuntime", "ServingRuntime", default="ClusterServingRuntime"
        ),
        choice("apiGroup", "", "ome.io", default="ome.io"),
    ),
    model_component("engine", "Serves requests; with a decoder, only the prefill."),
    model_component("decoder", "The decode part of a disaggregated service."),
    router_component("router", "Distributes requests over the engines."),
    KEDA,
    SLO,
    ACCELERATOR_SELECTOR,
    record(
        "predictor",
        "Deprecated: becomes engine, model and runtime.",
        *POD_FIELDS,
        *SCALING_FIELDS,
        record(
            "model",
            "",
            string("baseModel"),
            string("runtime"),
            string("storageUri"),
            string("protocolVersion"),
            strings("fineTunedWeights"),
            *container_fields(needs_name=False),
            unchecked=MORE_CONTAINER_FIELDS,
        ),
        rename_field(WORKER, "workerSpec"),
        unchecked=MORE_POD_FIELDS,
    ),
)

_URL = string("url")
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

CONDITIONS: Field = list_of(
    "conditions",
    "Conditions of the object.",
    record(
        "",
        "",
        string("type", required=True),
        choice("status", "", "True", "False", "Unknown", required=True),
        string("reason"),
        string("message"),
        string("severity"),
        string("lastTransitionTime"),
        integer("observedGeneration", minimum=0, maximum=2**63 - 1),
    ),
)

_COMPONENT = record(
    "",
    "",
    string("mode", "Deployment mode."),
    integer("replicas", "Desired number of pods.", minimum=0),
    integer("readyReplicas", "Number of ready pods.", minimum=0),
    string("latestReadyRevision"),
    string("latestCreatedRevision"),
    string("previousRolledoutRevision"),
    string("latestRolledoutRevision"),
    list_of("revisions", "Named revisions.", record("", "", string("name"), string("digest", "Digest of their pods."))),
    record(
        "rollout",
        "State of a rollout by steps.",
        string("revision", "Digest of the new pods."),
        choice("phase", "Phase of the rollout.", *PHASES),
        list_of("steps", "Shares of the requests, in percent.", integer("", minimum=1, maximum=99)),
        integer("step", "Current step, from 1.", minimum=1),
        integer("percent", "Current share of the requests, in percent.", minimum=0, maximum=100),
        string("since", "When the step began, or the rollout ended."),
        string("message", "Explanation of the state."),
        string("command", "The last command that was executed."),
        list_of(
            "counts",
            "Statistics of the routers when the step began.",
            record(
                "",
                "",
                string("router"),
                string("revision"),
                integer("requests", minimum=0, maximum=INT64),
                integer("errors", minimum=0, maximum=INT64),
                number("seconds"),
                string("times", "Number of requests per latency bucket."),
            ),
        ),
    ),
    list_of(
        "traffic",
        "",
        record(
            "",
            "",
            string("revisionName"),
            string("configurationName"),
            integer("percent", minimum=0, maximum=100),
            boolean("latestRevision"),
            string("tag"),
            _URL,
        ),
    ),
    _URL,
    string("restURL"),
    record("address", "", _URL),
    record(
        "selectedAccelerator",
        "",
        string("acceleratorClass"),
        string("reason"),
        mapping("nodeSelector"),
        record("resourceRequests", ""),
    ),
)

_MODEL_STATUS = record(
    "modelStatus",
    "State of the model.",
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
        string("location"),
        choice("reason", "", *FAILURES),
        string("message"),
        string("modelRevisionName"),
        string("time"),
        integer("exitCode"),
    ),
    record("modelCopies", "", integer("failedCopies", minimum=0), integer("totalCopies", minimum=0)),
)

_STATUS = record(
    "status",
    "Observed state of the service.",
    CONDITIONS,
    integer("observedGeneration", minimum=0, maximum=2**63 - 1),
    mapping("annotations"),
    record("address", "", _URL),
    _URL,
    record(
        "runtime",
        "The selected runtime.",
        string("name"),
        string("kind"),
        string("reason", "Why it was selected."),
    ),
    record(
        "model",
        "The served model.",
        string("name"),
        string("kind"),
        string("path", "Its folder on the nodes."),
    ),
    mapping("components", "Status by component: engine, decoder, router.", _COMPONENT),
    _MODEL_STATUS,
    list_of(
        "history",
        "The last revisions, oldest first, for `headrace rollout undo`.",
        record(
            "",
            "",
            integer("revision", "Number of the revision.", minimum=1),
            string("time", "When it became the newest one."),
            string("spec", "Its spec as JSON, without replica counts and the canary's share."),
        ),
    ),
)

_ENGINE = ".status.components.engine"

INFERENCE_SERVICE = Kind(
    "InferenceService",
    "inferenceservices",
    namespaced=True,
    description="A served model, with its runtime and components.",
    spec=_SPEC,
    status=_STATUS,
    short=("isvc",),
    name_pattern=r"[a-z]([-a-z0-9]*[a-z0-9])?",
    # The name is the value of a label on all objects, and the name of a Service.
    max_name_length=LONGEST_LABEL,
    columns=(
        Column("URL", ".status.url"),
        Column("Ready", ".status.conditions[?(@.type=='Ready')].status"),
        Column("Reason", ".status.conditions[?(@.type=='Ready')].reason"),
        Column("Model", ".status.model.name"),
        Column("Runtime", ".status.runtime.name"),
        Column("Prev", f"{_ENGINE}.traffic[?(@.tag=='prev')].percent", "integer"),
        Column("Latest", f"{_ENGINE}.traffic[?(@.latestRevision==true)].percent", "integer"),
        Column("PrevRolledoutRevision", f"{_ENGINE}.traffic[?(@.tag=='prev')].revisionName"),
        Column("LatestReadyRevision", f"{_ENGINE}.traffic[?(@.latestRevision==true)].revisionName"),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
)
