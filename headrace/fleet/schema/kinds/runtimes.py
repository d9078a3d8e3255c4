# SPDX-License-Identifier: Apache-2.0
"""ServingRuntime and ClusterServingRuntime: a way to serve models of some formats and sizes."""

from __future__ import annotations

from headrace.fleet.schema.fields import (
    INT64,
    Column,
    Kind,
    choice,
    many,
    mapping,
    number,
    record,
    text,
    texts,
    truth,
    whole,
)
from headrace.fleet.schema.kinds.components import routed, served
from headrace.fleet.schema.kinds.models import DIFFUSION, SIZE, versioned
from headrace.fleet.schema.kinds.pods import POD

_ACCELERATED = record(
    "",
    "",
    number("minMemoryPerBillionParams", "GB.", least=0),
    record(
        "tensorParallelismOverride",
        "",
        whole("tensorParallelSize", least=1, most=INT64),
        whole("pipelineParallelSize", least=1, most=INT64),
        whole("dataParallelSize", least=1, most=INT64),
    ),
    texts("runtimeArgsOverride", "Arguments that replace or join the runner's."),
    mapping("environmentOverride", "Variables that replace or join the runner's."),
)

_FORMAT = record(
    "",
    "",
    text("name"),
    versioned("modelFormat", "Format of the files."),
    versioned("modelFramework", "Framework of the model."),
    text("modelArchitecture"),
    text("quantization"),
    DIFFUSION,
    truth("autoSelect", "Take this runtime for services that name none."),
    whole("priority", "Among several that fit, the highest is taken.", least=1),
    text("version"),
    text("modelType", "Deprecated."),
    mapping("acceleratorConfig", "By AcceleratorClass.", _ACCELERATED),
)

_SPEC = record(
    "spec",
    "What it can serve, and how.",
    many("supportedModelFormats", "What it can serve.", _FORMAT),
    record(
        "modelSizeRange",
        "Parameters of the models it is made for.",
        text("min", pattern=SIZE, example="7B"),
        text("max", pattern=SIZE, example="70B"),
    ),
    truth("disabled", "Not to be taken."),
    many(
        "protocolVersions",
        "Protocols it speaks.",
        choice("", "", "openAI", "openInference-v1", "openInference-v2", "cohere"),
    ),
    served("engineConfig", "Base of the service's engine."),
    served("decoderConfig", "Base of the service's decoder."),
    routed("routerConfig", "Base of the service's router."),
    record(
        "acceleratorRequirements",
        "What it runs on.",
        texts("acceleratorClasses"),
        whole("minMemory", "GB.", least=0, most=INT64),
        number("minComputePerformanceTFLOPS", "", least=0),
        text("minArchitectureVersion"),
        texts("requiredFeatures"),
        texts("preferredPrecisions"),
    ),
    *POD,
    mapping("labels"),
    mapping("annotations"),
    record("workers", "Deprecated: use engineConfig.worker.", *POD, whole("size", "Number of workers.")),
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
