# SPDX-License-Identifier: Apache-2.0
"""The shared JSON schemas (2020-12) of the document: requests and responses of v2."""

from __future__ import annotations

from typing import Any

from headrace.api.openapi.operations import NAME, Schema, ref
from headrace.core.dtypes import DTYPES
from headrace.core.limits import TENSOR_COUNT, TENSOR_RANK

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_LARGEST = (1 << 63) - 1


def object_schema(properties: dict[str, Any], needed: tuple[str, ...] = (), text: str = "", **more: Any) -> Schema:
    """Return the schema of an object."""
    schema: Schema = {"type": "object", "properties": properties, **more}
    if needed:
        schema["required"] = list(needed)
    if text:
        schema["description"] = text
    return schema


def array_schema(items: Schema, **more: Any) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": items, **more}


def shared_schemas() -> dict[str, Schema]:
    """Return the schemas of `components.schemas` by name."""
    return {**_small(), **_tensors(), **_inference(), **_repository(), **_statistics(), **_settings(), **_memory()}


def _small() -> dict[str, Schema]:
    return {
        "Error": object_schema({"error": _TEXT}, ("error",), "What is wrong, and what to do."),
        "ServerMetadata": object_schema(
            {"name": _TEXT, "version": _TEXT, "extensions": array_schema(_TEXT)}, ("name", "version", "extensions")
        ),
        "TensorMetadata": object_schema(
            {
                "name": _TEXT,
                "datatype": {"type": "string", "description": "Empty: any type."},
                "shape": array_schema({"type": "integer", "minimum": -1}, description="-1: any size."),
            },
            ("name", "datatype", "shape"),
        ),
        "ModelMetadata": object_schema(
            {
                "name": NAME,
                "versions": array_schema(_TEXT),
                "platform": _TEXT,
                "inputs": array_schema(ref("TensorMetadata")),
                "outputs": array_schema(ref("TensorMetadata")),
            },
            ("name", "versions", "platform", "inputs", "outputs"),
        ),
        "ModelConfig": object_schema(
            {"name": NAME}, ("name",), "Triton's ModelConfig message as JSON.", additionalProperties=True
        ),
    }


def _tensors() -> dict[str, Schema]:
    return {
        "DataType": {"type": "string", "enum": list(DTYPES)},
        "Shape": array_schema(
            {"type": "integer", "minimum": 0, "maximum": 1 << 48},
            maxItems=TENSOR_RANK,
            description="Sizes, outermost first; the first is the batch, if the model has one.",
        ),
        "Data": {
            "type": "array",
            "description": "The elements in row-major order: flat, or nested like the shape. BYTES are strings.",
        },
        "ParameterValue": {"type": ["string", "integer", "number", "boolean"]},
        "Parameters": object_schema(
            {},
            text="Further settings by name. Those that begin with `triton_` are the server's own.",
            additionalProperties=ref("ParameterValue"),
        ),
    }


def _inference() -> dict[str, Schema]:
    placed = {"shared_memory_region": _TEXT, "shared_memory_offset": _COUNT, "shared_memory_byte_size": _COUNT}
    any_parameter = ref("ParameterValue")
    return {
        "InferParameters": object_schema(
            {
                "sequence_id": {
                    "description": "The sequence of the request; 0: none.",
                    "anyOf": [{"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}, _TEXT],
                },
                "sequence_start": _FLAG,
                "sequence_end": _FLAG,
                "priority": {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1},
                "timeout": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": _LARGEST,
                    "description": "Maximum queue time in microseconds.",
                },
                "binary_data_output": {"type": "boolean", "description": "Answer with binary tensors."},
            },
            additionalProperties=any_parameter,
        ),
        "InferInput": object_schema(
            {
                "name": {"type": "string", "maxLength": 4096},
                "datatype": ref("DataType"),
                "shape": ref("Shape"),
                "data": ref("Data"),
                "parameters": object_schema({"binary_data_size": _COUNT, **placed}, additionalProperties=any_parameter),
            },
            ("name", "datatype", "shape"),
            "With `data`, or with `binary_data_size` and the bytes behind the JSON, or in shared memory.",
        ),
        "InferRequestedOutput": object_schema(
            {
                "name": _TEXT,
                "parameters": object_schema(
                    {
                        "binary_data": _FLAG,
                        "classification": {
                            "type": "integer",
                            "minimum": 1,
                            "description": "Return this many largest values with their labels instead of the tensor.",
                        },
                        **placed,
                    },
                    additionalProperties=any_parameter,
                ),
            },
            ("name",),
        ),
        "InferRequest": object_schema(
            {
                "id": _TEXT,
                "parameters": ref("InferParameters"),
                "inputs": array_schema(ref("InferInput"), minItems=1, maxItems=TENSOR_COUNT),
                "outputs": array_schema(ref("InferRequestedOutput"), maxItems=TENSOR_COUNT),
            },
            ("inputs",),
            "Without `outputs`, all of them are answered.",
        ),
        "InferOutput": object_schema(
            {
                "name": _TEXT,
                "datatype": ref("DataType"),
                "shape": array_schema(_COUNT),
                "data": ref("Data"),
                "parameters": ref("Parameters"),
            },
            ("name", "datatype", "shape"),
        ),
        "InferResponse": object_schema(
            {
                "model_name": _TEXT,
                "model_version": _TEXT,
                "id": _TEXT,
                "parameters": ref("Parameters"),
                "outputs": array_schema(ref("InferOutput")),
            },
            ("model_name", "model_version", "outputs"),
        ),
        "GenerateRequest": object_schema(
            {},
            text="Members that are named like an input become that input; the others become request parameters.",
            additionalProperties=True,
        ),
        "GenerateResponse": object_schema(
            {"model_name": _TEXT, "model_version": _TEXT},
            text="The outputs by name, those of one element without a list around it.",
            additionalProperties=True,
        ),
    }


def _repository() -> dict[str, Schema]:
    return {
        "RepositoryIndexRequest": object_schema(
            {"ready": {"type": "boolean", "description": "Only versions that are ready."}}
        ),
        "RepositoryIndex": array_schema(
            object_schema(
                {
                    "name": _TEXT,
                    "version": _TEXT,
                    "state": {"type": "string", "enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
                    "reason": _TEXT,
                },
                ("name",),
            )
        ),
        "LoadRequest": object_schema(
            {
                "parameters": object_schema(
                    {"config": {"type": "string", "description": "A configuration as JSON that replaces the file's."}},
                    patternProperties={"^file:": {"type": "string", "contentEncoding": "base64"}},
                    additionalProperties=False,
                )
            }
        ),
        "UnloadRequest": object_schema({"parameters": object_schema({"unload_dependents": _FLAG})}),
        "SleepRequest": object_schema({"level": {"type": "integer", "enum": [1, 2], "default": 1}}),
        "SleepReport": object_schema(
            {
                "model": _TEXT,
                "versions": {
                    "type": "object",
                    "additionalProperties": object_schema(
                        {
                            "state": {"type": "string", "enum": ["awake", "falling asleep", "asleep", "waking"]},
                            "level": {"type": "integer", "enum": [0, 1, 2]},
                            "freed_bytes": {"type": "object", "additionalProperties": _COUNT},
                            "seconds": {"type": ["number", "null"], "description": "Of the last change."},
                        }
                    ),
                },
            }
        ),
    }


def _statistics() -> dict[str, Schema]:
    parts = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    responses = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
    duration = ref("DurationStatistic")
    one = {
        "name": _TEXT,
        "version": _TEXT,
        "last_inference": {"type": "integer", "description": "Milliseconds since 1970; 0: never."},
        "inference_count": _COUNT,
        "execution_count": _COUNT,
        "inference_stats": object_schema(dict.fromkeys(parts, duration)),
        "response_stats": object_schema(
            {},
            text="Of a decoupled model: by the place of a response among those to its request, from 0.",
            additionalProperties=object_schema(dict.fromkeys(responses, duration)),
        ),
        "batch_stats": array_schema(object_schema({"batch_size": _COUNT, **dict.fromkeys(parts[3:6], duration)})),
        "memory_usage": array_schema({"type": "object"}),
        "failures": object_schema({}, text="How often each kind of error was answered.", additionalProperties=_COUNT),
        "batching": object_schema({}, text="Why batches have the size they have.", additionalProperties=True),
        "load_seconds": {
            "type": "object",
            "description": "How long each stage of the load took.",
            "additionalProperties": {"type": "number"},
        },
    }
    return {
        "DurationStatistic": object_schema({"count": _COUNT, "ns": _COUNT}, ("count", "ns")),
        "ModelStatistics": object_schema(
            {"model_stats": array_schema(object_schema(one, ("name", "version")))}, ("model_stats",)
        ),
    }


def _settings() -> dict[str, Schema]:
    level: Schema = {"type": "string", "enum": ["OFF", "TIMESTAMPS", "TENSORS"]}
    number: Schema = {"type": ["string", "integer", "null"], "pattern": "^-?[0-9]{1,10}$"}
    log: dict[str, Schema] = {
        "log_info": _FLAG,
        "log_warning": _FLAG,
        "log_error": _FLAG,
        "log_verbose_level": {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1},
        "log_format": {"type": "string", "enum": ["default", "ISO8601"]},
    }
    changes: dict[str, Schema] = {
        "trace_level": {"anyOf": [array_schema(level), level, {"type": "null"}]},
        "trace_rate": number,
        "trace_count": number,
        "log_frequency": number,
    }
    return {
        "TraceSettings": object_schema(
            {name: {"type": ["string", "array"]} for name in ("trace_file", *changes, "trace_mode")},
            additionalProperties=True,
        ),
        "TraceChanges": object_schema(
            changes, text="null takes a setting back to what it was.", additionalProperties=False
        ),
        "LogSettings": object_schema({"log_file": _TEXT, **log}, additionalProperties=True),
        "LogChanges": object_schema(log, additionalProperties=False),
    }


def _memory() -> dict[str, Schema]:
    size: Schema = {"type": "integer", "minimum": 0, "maximum": _LARGEST}
    region = {"name": _TEXT, "byte_size": _COUNT}
    handle = object_schema({"b64": {"type": "string", "contentEncoding": "base64"}}, ("b64",))
    return {
        "SystemMemoryRegistration": object_schema(
            {"key": {"type": "string", "minLength": 1}, "offset": size, "byte_size": size}, ("key", "byte_size")
        ),
        "CudaMemoryRegistration": object_schema(
            {"raw_handle": handle, "device_id": _COUNT, "byte_size": size}, ("raw_handle", "device_id", "byte_size")
        ),
        "SystemMemoryStatus": array_schema(
            object_schema({**region, "key": _TEXT, "offset": _COUNT}, ("name", "byte_size"))
        ),
        "CudaMemoryStatus": array_schema(object_schema({**region, "device_id": _COUNT}, ("name", "byte_size"))),
    }
