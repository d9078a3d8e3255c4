# SPDX-License-Identifier: Apache-2.0
"""The schemas that several routes share: requests and answers of v2, in the words of JSON Schema 2020-12.

Read by `document`. What a request may say beyond these is up to each model; see `models`.
"""

from __future__ import annotations

from typing import Any

from headrace.api.openapi.describing import NAME, Schema, ref
from headrace.core.dtypes import DTYPES
from headrace.core.limits import TENSOR_COUNT, TENSOR_RANK

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_LARGEST = (1 << 63) - 1


def thing(properties: dict[str, Any], needed: tuple[str, ...] = (), text: str = "", **more: Any) -> Schema:
    """An object."""
    made: Schema = {"type": "object", "properties": properties, **more}
    if needed:
        made["required"] = list(needed)
    if text:
        made["description"] = text
    return made


def list_of(items: Schema, **more: Any) -> Schema:
    """An array."""
    return {"type": "array", "items": items, **more}


def shared_schemas() -> dict[str, Schema]:
    """By name, for `components.schemas`."""
    return {**_small(), **_tensors(), **_inference(), **_repository(), **_statistics(), **_settings(), **_memory()}


def _small() -> dict[str, Schema]:
    return {
        "Error": thing({"error": _TEXT}, ("error",), "What is wrong, and what to do about it."),
        "ServerMetadata": thing(
            {"name": _TEXT, "version": _TEXT, "extensions": list_of(_TEXT)}, ("name", "version", "extensions")
        ),
        "TensorMetadata": thing(
            {
                "name": _TEXT,
                "datatype": {"type": "string", "description": "Empty for any."},
                "shape": list_of({"type": "integer", "minimum": -1}, description="-1 stands for any size."),
            },
            ("name", "datatype", "shape"),
        ),
        "ModelMetadata": thing(
            {
                "name": NAME,
                "versions": list_of(_TEXT),
                "platform": _TEXT,
                "inputs": list_of(ref("TensorMetadata")),
                "outputs": list_of(ref("TensorMetadata")),
            },
            ("name", "versions", "platform", "inputs", "outputs"),
        ),
        "ModelConfig": thing(
            {"name": NAME}, ("name",), "Triton's ModelConfig message as JSON.", additionalProperties=True
        ),
    }


def _tensors() -> dict[str, Schema]:
    return {
        "DataType": {"type": "string", "enum": list(DTYPES)},
        "Shape": list_of(
            {"type": "integer", "minimum": 0, "maximum": 1 << 48},
            maxItems=TENSOR_RANK,
            description="Sizes, outermost first; the batch, where the model has one, is the first.",
        ),
        "Data": {
            "type": "array",
            "description": "The elements, row by row: flat, or nested as the shape is. BYTES are strings.",
        },
        "ParameterValue": {"type": ["string", "integer", "number", "boolean"]},
        "Parameters": thing(
            {},
            text="Further settings by name. Those that begin with `triton_` are the server's own.",
            additionalProperties=ref("ParameterValue"),
        ),
    }


def _inference() -> dict[str, Schema]:
    placed = {"shared_memory_region": _TEXT, "shared_memory_offset": _COUNT, "shared_memory_byte_size": _COUNT}
    any_parameter = ref("ParameterValue")
    return {
        "InferParameters": thing(
            {
                "sequence_id": {
                    "description": "Which sequence the request is of; 0 or nothing for none.",
                    "anyOf": [{"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}, _TEXT],
                },
                "sequence_start": _FLAG,
                "sequence_end": _FLAG,
                "priority": {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1},
                "timeout": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": _LARGEST,
                    "description": "How long the request may wait, in microseconds.",
                },
                "binary_data_output": {"type": "boolean", "description": "Answer with binary tensors."},
            },
            additionalProperties=any_parameter,
        ),
        "InferInput": thing(
            {
                "name": {"type": "string", "maxLength": 4096},
                "datatype": ref("DataType"),
                "shape": ref("Shape"),
                "data": ref("Data"),
                "parameters": thing({"binary_data_size": _COUNT, **placed}, additionalProperties=any_parameter),
            },
            ("name", "datatype", "shape"),
            "With `data`, or with `binary_data_size` and the bytes behind the JSON, or in shared memory.",
        ),
        "InferRequestedOutput": thing(
            {
                "name": _TEXT,
                "parameters": thing(
                    {
                        "binary_data": _FLAG,
                        "classification": {
                            "type": "integer",
                            "minimum": 1,
                            "description": "Answer the so many largest values with their labels instead of the tensor.",
                        },
                        **placed,
                    },
                    additionalProperties=any_parameter,
                ),
            },
            ("name",),
        ),
        "InferRequest": thing(
            {
                "id": _TEXT,
                "parameters": ref("InferParameters"),
                "inputs": list_of(ref("InferInput"), minItems=1, maxItems=TENSOR_COUNT),
                "outputs": list_of(ref("InferRequestedOutput"), maxItems=TENSOR_COUNT),
            },
            ("inputs",),
            "Without `outputs`, all of them are answered.",
        ),
        "InferOutput": thing(
            {
                "name": _TEXT,
                "datatype": ref("DataType"),
                "shape": list_of(_COUNT),
                "data": ref("Data"),
                "parameters": ref("Parameters"),
            },
            ("name", "datatype", "shape"),
        ),
        "InferResponse": thing(
            {
                "model_name": _TEXT,
                "model_version": _TEXT,
                "id": _TEXT,
                "parameters": ref("Parameters"),
                "outputs": list_of(ref("InferOutput")),
            },
            ("model_name", "model_version", "outputs"),
        ),
        "GenerateRequest": thing(
            {},
            text="Members that are named like an input become that input; the others become request parameters.",
            additionalProperties=True,
        ),
        "GenerateResponse": thing(
            {"model_name": _TEXT, "model_version": _TEXT},
            text="The outputs by name, those of one element without a list around it.",
            additionalProperties=True,
        ),
    }


def _repository() -> dict[str, Schema]:
    return {
        "RepositoryIndexRequest": thing({"ready": {"type": "boolean", "description": "Only what can be asked now."}}),
        "RepositoryIndex": list_of(
            thing(
                {
                    "name": _TEXT,
                    "version": _TEXT,
                    "state": {"type": "string", "enum": ["UNKNOWN", "READY", "UNAVAILABLE", "LOADING", "UNLOADING"]},
                    "reason": _TEXT,
                },
                ("name",),
            )
        ),
        "LoadRequest": thing(
            {
                "parameters": thing(
                    {"config": {"type": "string", "description": "A configuration as JSON, in place of the file's."}},
                    patternProperties={"^file:": {"type": "string", "contentEncoding": "base64"}},
                    additionalProperties=False,
                )
            }
        ),
        "UnloadRequest": thing({"parameters": thing({"unload_dependents": _FLAG})}),
    }


def _statistics() -> dict[str, Schema]:
    parts = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    responses = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
    duration = ref("DurationStatistic")
    one = {
        "name": _TEXT,
        "version": _TEXT,
        "last_inference": {"type": "integer", "description": "Milliseconds since 1970; 0 for never."},
        "inference_count": _COUNT,
        "execution_count": _COUNT,
        "inference_stats": thing(dict.fromkeys(parts, duration)),
        "response_stats": thing(
            {},
            text="Of a decoupled model: by the place of a response among those to its request, from 0.",
            additionalProperties=thing(dict.fromkeys(responses, duration)),
        ),
        "batch_stats": list_of(thing({"batch_size": _COUNT, **dict.fromkeys(parts[3:6], duration)})),
        "memory_usage": list_of({"type": "object"}),
        "failures": thing({}, text="How often each kind of error was answered.", additionalProperties=_COUNT),
        "batching": thing({}, text="Why batches have the size they have.", additionalProperties=True),
    }
    return {
        "DurationStatistic": thing({"count": _COUNT, "ns": _COUNT}, ("count", "ns")),
        "ModelStatistics": thing({"model_stats": list_of(thing(one, ("name", "version")))}, ("model_stats",)),
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
        "trace_level": {"anyOf": [list_of(level), level, {"type": "null"}]},
        "trace_rate": number,
        "trace_count": number,
        "log_frequency": number,
    }
    return {
        "TraceSettings": thing(
            {name: {"type": ["string", "array"]} for name in ("trace_file", *changes, "trace_mode")},
            additionalProperties=True,
        ),
        "TraceChanges": thing(changes, text="null takes a setting back to what it was.", additionalProperties=False),
        "LogSettings": thing({"log_file": _TEXT, **log}, additionalProperties=True),
        "LogChanges": thing(log, additionalProperties=False),
    }


def _memory() -> dict[str, Schema]:
    size: Schema = {"type": "integer", "minimum": 0, "maximum": _LARGEST}
    region = {"name": _TEXT, "byte_size": _COUNT}
    handle = thing({"b64": {"type": "string", "contentEncoding": "base64"}}, ("b64",))
    return {
        "SystemMemoryRegistration": thing(
            {"key": {"type": "string", "minLength": 1}, "offset": size, "byte_size": size}, ("key", "byte_size")
        ),
        "CudaMemoryRegistration": thing(
            {"raw_handle": handle, "device_id": _COUNT, "byte_size": size}, ("raw_handle", "device_id", "byte_size")
        ),
        "SystemMemoryStatus": list_of(thing({**region, "key": _TEXT, "offset": _COUNT}, ("name", "byte_size"))),
        "CudaMemoryStatus": list_of(thing({**region, "device_id": _COUNT}, ("name", "byte_size"))),
    }
