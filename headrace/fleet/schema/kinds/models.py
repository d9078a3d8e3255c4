# SPDX-License-Identifier: Apache-2.0
"""BaseModel and ClusterBaseModel: what a model is and where its files lie."""

from __future__ import annotations

from headrace.fleet.schema.fields import (
    INT64,
    Column,
    Field,
    Kind,
    anything,
    choice,
    mapping,
    record,
    text,
    texts,
    truth,
    whole,
)

VERSION_OPERATORS = ("Equal", "GreaterThan", "GreaterThanOrEqual")


def versioned(name: str, says: str) -> Field:
    """A format or a framework, with a version."""
    return record(
        name,
        says,
        text("name", "", required=True),
        text("version"),
        choice("operator", "How a runtime's version is compared.", *VERSION_OPERATORS, default="Equal"),
        whole("weight", "What a match counts.", least=0, most=INT64, default=1),
    )


COMPONENT_CLASS = (text("library"), text("type"))

DIFFUSION = record(
    "diffusionPipeline",
    "The parts of a diffusion model.",
    text("className"),
    *(record(name, "", *COMPONENT_CLASS) for name in ("scheduler", "textEncoder", "tokenizer", "transformer", "vae")),
    mapping("additionalComponents", "", record("", "", *COMPONENT_CLASS)),
)

SIZE = r"[0-9]+(\.[0-9]+)?[MBT]"

STORAGE = record(
    "storage",
    "Where the files lie.",
    text(
        "storageUri",
        "hf://org/name, s3://bucket/prefix, pvc://claim/path, ...",
        pattern=r"[a-z0-9+.-]+://.+",
        example="hf://org/name",
    ),
    text("path", "Folder on the node.", pattern=r"/.*", example="/mnt/models/llama"),
    text("key", "Secret with the credentials."),
    mapping("parameters", "For the storage: token, secretKey, auth, region, ..."),
    text("schemaPath"),
    mapping("nodeSelector", "Nodes that get the model."),
    record("nodeAffinity", "Nodes that get the model."),
    choice("downloadPolicy", "", "AlwaysDownload", "ReuseIfExists"),
)

ABOUT: tuple[Field, ...] = (
    text("displayName", "Name for people."),
    text("version", "Version of the model."),
    text("vendor", "Who made it."),
    truth("disabled", "Not to be served."),
    text("compartmentID"),
    mapping("additionalMetadata"),
)

_SPEC = record(
    "spec",
    "What the model is.",
    versioned("modelFormat", "Format of the files: safetensors, onnx, ..."),
    versioned("modelFramework", "What it was made with: transformers, ..."),
    text("modelType", "llama, qwen2, ..."),
    text("modelArchitecture", "LlamaForCausalLM, ..."),
    text("quantization", "fp8, fbgemm_fp8, int4, ..."),
    text("modelParameterSize", "Number of parameters.", pattern=SIZE, example="7B"),
    texts("modelCapabilities", "TEXT_TO_TEXT, EMBEDDING, ..."),
    texts("apiCapabilities", "OPENAI_V1_CHAT_COMPLETIONS, ..."),
    whole("maxTokens", "Longest context.", least=1),
    anything("modelConfiguration", "The model's own configuration."),
    DIFFUSION,
    texts("servingMode", "On-demand, Dedicated."),
    STORAGE,
    *ABOUT,
)

STATUS = record(
    "status",
    "Where the model is.",
    choice("state", "", "Creating", "Importing", "In_Transit", "In_Training", "Ready", "Failed"),
    text("lifecycle"),
    texts("nodesReady"),
    texts("nodesFailed"),
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
