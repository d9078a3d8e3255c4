# SPDX-License-Identifier: Apache-2.0
"""The ModelConfig protobuf message: its schema, its JSON and text forms, and its conversion to `types`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headrace.core.dtypes import BOOL, BY_CONFIG_NUMBER, FP32, INT32, INT64, DType
from headrace.core.protobuf import Schema
from headrace.models.config.types import (
    BatchInput,
    BatchOutput,
    ControlInput,
    ControlKind,
    Dims,
    DirectStrategy,
    DynamicBatching,
    EnsembleScheduling,
    EnsembleStep,
    InitialState,
    InputSpec,
    InstanceGroup,
    ModelConfig,
    OldestStrategy,
    OutputSpec,
    QueuePolicy,
    Resource,
    SequenceBatching,
    StateSpec,
    VersionPolicy,
    Warmup,
    WarmupInput,
)

CONFIG = "inference.ModelConfig"


@cache
def config_schema() -> Schema:
    """Load the schema at first use."""
    return Schema((files("headrace.models.config") / "_generated" / "model_config.binpb").read_bytes())


def new_config(**fields: Any) -> Any:
    """Return an empty ModelConfig message."""
    return config_schema().message(CONFIG)(**fields)


_FIRST_EXTENSION_NUMBER = 1001
_INT64_TYPES = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)


def to_json(message: Any) -> dict[str, Any]:
    """Return the JSON that Triton's clients expect: the schema's names, with defaults; numbers as numbers."""
    values = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _to_client_json(values, message.DESCRIPTOR)


def to_text(message: Any) -> str:
    """Return the text of a `config.pbtxt`."""
    return text_format.MessageToString(message, as_utf8=True)


def _to_client_json(values: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
    """Protobuf writes 64-bit numbers as strings, Triton does not. Headrace's own fields are shown only if they are set."""
    document: dict[str, Any] = {}
    for name, value in values.items():
        field = descriptor.fields_by_name[name]
        if field.number >= _FIRST_EXTENSION_NUMBER and _is_default(field, value):
            continue
        document[name] = _value(field, value)
    return document


def _is_default(field: FieldDescriptor, value: Any) -> bool:
    if field.has_presence:
        return False
    if field.enum_type is not None:
        return bool(value == field.enum_type.values_by_number[0].name)
    return not value


def _value(field: FieldDescriptor, value: Any) -> Any:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        inner = message.fields_by_name["value"]
        return {key: _value(inner, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_scalar(field, message, item) for item in value]
    return _scalar(field, message, value)


def _scalar(field: FieldDescriptor, message: Descriptor | None, value: Any) -> Any:
    if message is not None:
        return _to_client_json(value, message)
    return int(value) if field.type in _INT64_TYPES else value


_KINDS: tuple[Any, ...] = ("auto", "gpu", "cpu", "model")
_RUNS: tuple[Any, ...] = ("auto", "inline", "thread")
_CONTROLS: tuple[ControlKind, ...] = ("start", "ready", "end", "corrid")


def typed_config(message: Any, backend: str) -> ModelConfig:
    """Convert a message to the typed configuration."""
    return ModelConfig(
        name=message.name,
        backend=backend,
        platform=message.platform,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_input(tensor) for tensor in message.input),
        outputs=tuple(_output(tensor) for tensor in message.output),
        version_policy=_version_policy(message.version_policy),
        instance_groups=tuple(_group(group) for group in message.instance_group),
        scheduling=_scheduling(message),
        decoupled=message.model_transaction_policy.decoupled,
        response_cache=message.response_cache.enable,
        default_model_filename=message.default_model_filename,
        cc_model_filenames=MappingProxyType(dict(message.cc_model_filenames)),
        metric_tags=MappingProxyType(dict(message.metric_tags)),
        parameters=MappingProxyType({key: parameter.string_value for key, parameter in message.parameters.items()}),
        batch_inputs=tuple(_batch_input(tensor) for tensor in message.batch_input),
        batch_outputs=tuple(
            BatchOutput(tuple(tensor.target_name), tensor.source_input[0] if tensor.source_input else "")
            for tensor in message.batch_output
        ),
        warmups=tuple(_warmup(sample) for sample in message.model_warmup),
        proto=message,
    )


def dtype_of_field(message: Any) -> DType | None:
    """Return the data type of a tensor; None if it is not set."""
    return BY_CONFIG_NUMBER.get(message.data_type)


def _enum_name(message: Any, field: str) -> Any:
    value = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(getattr(message, field))
    return "" if value is None else value.name


def _enum_value(values: tuple[Any, ...], number: int) -> Any:
    return values[number] if 0 <= number < len(values) else values[0]


def _dims(dims: Any) -> Dims:
    return tuple(dims)


def _reshape(message: Any) -> Dims | None:
    return tuple(message.reshape.shape) if message.HasField("reshape") else None


def _input(message: Any) -> InputSpec:
    return InputSpec(
        name=message.name,
        dtype=dtype_of_field(message),
        dims=_dims(message.dims) or None,
        reshape=_reshape(message),
        optional=message.optional,
        allow_ragged_batch=message.allow_ragged_batch,
        pad_value=message.pad_value if message.HasField("pad_value") else None,
        finite=message.finite,
        is_shape_tensor=message.is_shape_tensor,
    )


def _output(message: Any) -> OutputSpec:
    return OutputSpec(
        name=message.name,
        dtype=dtype_of_field(message),
        dims=_dims(message.dims) or None,
        reshape=_reshape(message),
        label_filename=message.label_filename,
        padded_like=message.padded_like,
        is_shape_tensor=message.is_shape_tensor,
    )


def _batch_input(message: Any) -> BatchInput:
    source = message.source_input[0] if message.source_input else ""
    kind = _enum_name(message, "kind")
    return BatchInput(kind, tuple(message.target_name), dtype_of_field(message) or INT32, source)


def _version_policy(message: Any) -> VersionPolicy:
    choice = message.WhichOneof("policy_choice")
    if choice == "all":
        return VersionPolicy("all")
    if choice == "specific":
        return VersionPolicy("specific", specific=tuple(message.specific.versions))
    return VersionPolicy("latest", max(1, message.latest.num_versions))


def _group(message: Any) -> InstanceGroup:
    limiter = message.rate_limiter
    return InstanceGroup(
        name=message.name,
        kind=_enum_value(_KINDS, message.kind),
        count=message.count,
        gpus=tuple(message.gpus),
        passive=message.passive,
        # `global` is a keyword of Python.
        resources=tuple(Resource(item.name, item.count, getattr(item, "global")) for item in limiter.resources),
        priority=limiter.priority,
        runs=_enum_value(_RUNS, message.runs),
    )


def _scheduling(message: Any) -> DynamicBatching | SequenceBatching | EnsembleScheduling | None:
    choice = message.WhichOneof("scheduling_choice")
    if choice == "dynamic_batching":
        return _dynamic(message.dynamic_batching)
    if choice == "sequence_batching":
        return _sequence(message.sequence_batching)
    if choice == "ensemble_scheduling":
        steps = tuple(
            EnsembleStep(
                step.model_name,
                step.model_version,
                MappingProxyType(dict(step.input_map)),
                MappingProxyType(dict(step.output_map)),
            )
            for step in message.ensemble_scheduling.step
        )
        return EnsembleScheduling(steps, message.ensemble_scheduling.max_inflight_requests)
    return None


def _policy(message: Any) -> QueuePolicy:
    return QueuePolicy(
        timeout_action="delay" if message.timeout_action else "reject",
        default_timeout_microseconds=message.default_timeout_microseconds,
        allow_timeout_override=message.allow_timeout_override,
        max_queue_size=message.max_queue_size,
    )


def _dynamic(message: Any) -> DynamicBatching:
    policies = {level: _policy(policy) for level, policy in message.priority_queue_policy.items()}
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted(set(message.preferred_batch_size))),
        max_queue_delay_microseconds=message.max_queue_delay_microseconds,
        preserve_ordering=message.preserve_ordering,
        priority_levels=message.priority_levels,
        default_priority_level=message.default_priority_level,
        default_queue_policy=_policy(message.default_queue_policy),
        priority_queue_policies=MappingProxyType(policies),
        auto_delay=message.max_queue_delay_auto,
        latency_target_ms=message.latency_target_ms,
    )


def _sequence(message: Any) -> SequenceBatching:
    strategy: DirectStrategy | OldestStrategy = DirectStrategy(
        message.direct.max_queue_delay_microseconds, message.direct.minimum_slot_utilization
    )
    if message.HasField("oldest"):
        strategy = OldestStrategy(
            max_candidate_sequences=message.oldest.max_candidate_sequences,
            preferred_batch_sizes=tuple(sorted(set(message.oldest.preferred_batch_size))),
            max_queue_delay_microseconds=message.oldest.max_queue_delay_microseconds,
            preserve_ordering=message.oldest.preserve_ordering,
        )
    return SequenceBatching(
        strategy=strategy,
        max_sequence_idle_microseconds=message.max_sequence_idle_microseconds or 1_000_000,
        controls=tuple(
            _control(tensor.name, control) for tensor in message.control_input for control in tensor.control
        ),
        states=tuple(_state(state) for state in message.state),
        iterative=message.iterative_sequence,
    )


def _control(name: str, message: Any) -> ControlInput:
    kind = _enum_value(_CONTROLS, message.kind)
    if kind == "corrid":
        return ControlInput(name, kind, dtype_of_field(message) or INT64)
    for values, dtype in (
        (message.int32_false_true, INT32),
        (message.fp32_false_true, FP32),
        (message.bool_false_true, BOOL),
    ):
        if len(values) == 2:
            return ControlInput(name, kind, dtype, values[0], values[1])
    return ControlInput(name, kind, dtype_of_field(message) or INT32)


def _state(message: Any) -> StateSpec:
    dtype = dtype_of_field(message) or FP32
    return StateSpec(
        input_name=message.input_name,
        output_name=message.output_name,
        dtype=dtype,
        dims=_dims(message.dims),
        initial=tuple(
            InitialState(
                state.name, dtype_of_field(state) or dtype, _dims(state.dims), not state.data_file, state.data_file
            )
            for state in message.initial_state
        ),
        use_same_buffer=message.use_same_buffer_for_input_output,
        use_growable_memory=message.use_growable_memory,
    )


def _warmup(message: Any) -> Warmup:
    inputs = {name: _warmup_input(tensor) for name, tensor in message.inputs.items()}
    return Warmup(message.name, max(1, message.batch_size), MappingProxyType(inputs), max(1, message.count))


def _warmup_input(message: Any) -> WarmupInput:
    choice = message.WhichOneof("input_data_type")
    source: Any = {"random_data": "random", "input_data_file": "file"}.get(choice, "zero")
    return WarmupInput(dtype_of_field(message) or FP32, _dims(message.dims), source, message.input_data_file)
