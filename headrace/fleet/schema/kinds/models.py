# SPDX-License-Identifier: Apache-2.0
"""Tables of BaseModel, ClusterBaseModel and FineTunedWeight: what a model is and where its files are."""

from __future__ import annotations

from headrace.fleet.schema.fields import (
    INT64,
    Column,
    Field,
    Kind,
    any_value,
    boolean,
    choice,
    integer,
    mapping,
    record,
    string,
    strings,
)

VERSION_OPERATORS = ("Equal", "GreaterThan", "GreaterThanOrEqual")


def versioned_field(name: str, description: str) -> Field:
    """Return the field of a format or a framework with a version."""
    return record(
        name,
        description,
        string("name", "", required=True),
        string("version"),
        choice("operator", "How a runtime's version is compared.", *VERSION_OPERATORS, default="Equal"),
        integer("weight", "Weight of a match.", minimum=0, maximum=INT64, default=1),
    )


COMPONENT_CLASS = (string("library"), string("type"))

DIFFUSION = record(
    "diffusionPipeline",
    "The parts of a diffusion model.",
    string("className"),
    *(record(name, "", *COMPONENT_CLASS) for name in ("scheduler", "textEncoder", "tokenizer", "transformer", "vae")),
    mapping("additionalComponents", "", record("", "", *COMPONENT_CLASS)),
)

SIZE = r"[0-9]+(\.[0-9]+)?[MBT]"

STORAGE = record(
    "storage",
    "Where the files are.",
    string(
        "storageUri",
        "hf://org/name, s3://bucket/prefix, pvc://claim/path, ...",
        pattern=r"[a-z0-9+.-]+://.+",
        example="hf://org/name",
    ),
    string("path", "Folder on the node.", pattern=r"/.*", example="/mnt/models/llama"),
    string("key", "Secret with the credentials."),
    mapping("parameters", "For the storage: token, secretKey, auth, region, ..."),
    string("schemaPath"),
    mapping("nodeSelector", "Nodes that get the model."),
    record("nodeAffinity", "Nodes that get the model."),
    choice("downloadPolicy", "", "AlwaysDownload", "ReuseIfExists"),
)

COMMON_FIELDS: tuple[Field, ...] = (
    string("displayName", "Display name."),
    string("version", "Version of the model."),
    string("vendor", "Vendor of the model."),
    boolean("disabled", "Must not be served."),
    string("compartmentID"),
    mapping("additionalMetadata"),
)

_SPEC = record(
    "spec",
    "Definition of the model.",
    versioned_field("modelFormat", "Format of the files: safetensors, onnx, ..."),
    versioned_field("modelFramework", "Framework of the model: transformers, ..."),
    string("modelType", "llama, qwen2, ..."),
    string("modelArchitecture", "LlamaForCausalLM, ..."),
    string("quantization", "fp8, fbgemm_fp8, int4, ..."),
    string("modelParameterSize", "Number of parameters.", pattern=SIZE, example="7B"),
    strings("modelCapabilities", "TEXT_TO_TEXT, EMBEDDING, ..."),
    strings("apiCapabilities", "OPENAI_V1_CHAT_COMPLETIONS, ..."),
    integer("maxTokens", "Maximum context length.", minimum=1),
    any_value("modelConfiguration", "The model's own configuration."),
    DIFFUSION,
    strings("servingMode", "On-demand, Dedicated."),
    STORAGE,
    *COMMON_FIELDS,
)

STATUS = record(
    "status",
    "State of the model on the nodes.",
    choice("state", "", "Creating", "Importing", "In_Transit", "In_Training", "Ready", "Failed"),
    string("lifecycle"),
    strings("nodesReady"),
    strings("nodesFailed"),
    string("message", "Why the download failed, with the nodes."),
)

_COLUMNS = (
    Column("Disabled", ".spec.disabled", "boolean"),
    Column("Version", ".spec.version"),
    Column("Vendor", ".spec.vendor"),
    Column("Framework", ".spec.modelFramework.name"),
    Column("FrameworkVersion", ".spec.modelFramework.version", wide=True),
    Column("ModelFormat", ".spec.modelFormat.name"),
    Column("Architecture", ".spec.modelArchitecture"),
    Column("Capabilities", ".spec.modelCapabilities", wide=True),
    Column("Size", ".spec.modelParameterSize"),
    Column("CompartmentID", ".spec.compartmentID", wide=True),
    Column("Ready", ".status.state"),
    Column("Age", ".metadata.creationTimestamp", "date"),
)

BASE_MODEL = Kind("BaseModel", "basemodels", True, "A model of one namespace.", _SPEC, STATUS, columns=_COLUMNS)
CLUSTER_BASE_MODEL = Kind(
    "ClusterBaseModel", "clusterbasemodels", False, "A model for every namespace.", _SPEC, STATUS, columns=_COLUMNS
)


FINE_TUNED_WEIGHT = Kind(
    "FineTunedWeight",
    "finetunedweights",
    False,
    "Weights trained on top of a model.",
    record(
        "spec",
        "Definition of the weights.",
        record("baseModelRef", "The model they belong to.", string("name"), string("namespace")),
        string("modelType", "LoRA, Adapter, Distillation, Tfew."),
        any_value("hyperParameters", "`strategy` is read: lora, tfew."),
        any_value("configuration", "`merged_weights: true`: the base model is not needed."),
        STORAGE,
        record("trainingJobRef", "", string("name"), string("namespace")),
        *COMMON_FIELDS,
    ),
    STATUS,
    columns=(
        Column("Disabled", ".spec.disabled", "boolean"),
        Column("Version", ".spec.version"),
        Column("Vendor", ".spec.vendor"),
        Column("CompartmentID", ".spec.compartmentID", wide=True),
        Column("ModelType", ".spec.modelType"),
        Column("Ready", ".status.state"),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
)
