# SPDX-License-Identifier: Apache-2.0
"""Tables of ServingRuntime and ClusterServingRuntime: how to serve models of some formats and sizes."""

from __future__ import annotations

from headrace.fleet.schema.fields import (
    INT64,
    Column,
    Kind,
    boolean,
    choice,
    integer,
    list_of,
    mapping,
    number,
    record,
    string,
    strings,
)
from headrace.fleet.schema.kinds.components import MORE_POD_FIELDS, POD_FIELDS, model_component, router_component
from headrace.fleet.schema.kinds.models import DIFFUSION, SIZE, versioned_field

_ACCELERATED = record(
    "",
    "",
    number("minMemoryPerBillionParams", "GB.", minimum=0),
    record(
        "tensorParallelismOverride",
        "",
        integer("tensorParallelSize", minimum=1, maximum=INT64),
        integer("pipelineParallelSize", minimum=1, maximum=INT64),
        integer("dataParallelSize", minimum=1, maximum=INT64),
    ),
    strings("runtimeArgsOverride", "Arguments that replace or join the runner's."),
    mapping("environmentOverride", "Variables that replace or join the runner's."),
)

_FORMAT = record(
    "",
    "",
    string("name"),
    versioned_field("modelFormat", "Format of the files."),
    versioned_field("modelFramework", "Framework of the model."),
    string("modelArchitecture"),
    string("quantization"),
    DIFFUSION,
    boolean("autoSelect", "Select this runtime for services that name none."),
    integer("priority", "The highest priority among matching runtimes wins.", minimum=1),
    string("version"),
    string("modelType", "Deprecated."),
    mapping("acceleratorConfig", "Settings by AcceleratorClass.", _ACCELERATED),
)

_SPEC = record(
    "spec",
    "Models it can serve, and how.",
    list_of("supportedModelFormats", "Supported model formats.", _FORMAT),
    record(
        "modelSizeRange",
        "Supported model sizes, in parameters.",
        string("min", pattern=SIZE, example="7B"),
        string("max", pattern=SIZE, example="70B"),
    ),
    boolean("disabled", "Must not be selected."),
    list_of(
        "protocolVersions",
        "Supported protocols.",
        choice("", "", "openAI", "openInference-v1", "openInference-v2", "cohere"),
    ),
    model_component("engineConfig", "Base of the service's engine."),
    model_component("decoderConfig", "Base of the service's decoder."),
    router_component("routerConfig", "Base of the service's router."),
    record(
        "acceleratorRequirements",
        "Required accelerators.",
        strings("acceleratorClasses"),
        integer("minMemory", "GB.", minimum=0, maximum=INT64),
        number("minComputePerformanceTFLOPS", "", minimum=0),
        string("minArchitectureVersion"),
        strings("requiredFeatures"),
        strings("preferredPrecisions"),
    ),
    *POD_FIELDS,
    mapping("labels"),
    mapping("annotations"),
    record(
        "workers",
        "Deprecated: use engineConfig.worker.",
        *POD_FIELDS,
        integer("size", "Number of workers."),
        unchecked=MORE_POD_FIELDS,
    ),
    unchecked=MORE_POD_FIELDS,
)

_COLUMNS = (
    Column("Disabled", ".spec.disabled", "boolean"),
    Column("ModelFormat", ".spec.supportedModelFormats[*].modelFormat.name"),
    Column("ModelFramework", ".spec.supportedModelFormats[*].modelFramework.name"),
    Column("ModelFrameworkVersion", ".spec.supportedModelFormats[*].modelFramework.version", wide=True),
    Column("ModelArchitecture", ".spec.supportedModelFormats[*].modelArchitecture"),
    Column("ModelSizeMin", ".spec.modelSizeRange.min"),
    Column("ModelSizeMax", ".spec.modelSizeRange.max"),
    Column("Images", ".spec.containers[*].image", wide=True),
    Column("Age", ".metadata.creationTimestamp", "date"),
)

SERVING_RUNTIME = Kind(
    "ServingRuntime", "servingruntimes", True, "A way to serve models, for one namespace.", _SPEC, columns=_COLUMNS
)
CLUSTER_SERVING_RUNTIME = Kind(
    "ClusterServingRuntime",
    "clusterservingruntimes",
    False,
    "A way to serve models, for every namespace.",
    _SPEC,
    columns=_COLUMNS,
)
