# SPDX-License-Identifier: Apache-2.0
"""Complete a model's configuration with what its backend reports and with defaults, and validate it."""

from __future__ import annotations

from typing import Any

from headrace.models.config.drafts import Draft
from headrace.models.config.formats import CPU_BY_DEFAULT, FORMATS, find_format
from headrace.models.config.messages import typed_config
from headrace.models.config.problems import ConfigError
from headrace.models.config.types import ModelConfig
from headrace.models.config.validation import check_config

_AUTO, _GPU, _CPU = 0, 1, 2
_IDLE_MICROSECONDS = 1_000_000


def complete(draft: Draft, reported: Any | None, gpus: int = 0) -> ModelConfig:
    """Return the complete configuration; `reported` is the result of `Backend.complete`. Raises all problems at once."""
    message = type(draft.message)()
    message.CopyFrom(draft.message)
    if reported is not None:
        fill_missing(message, reported, keep_batch_size=draft.has_field("max_batch_size"))
    _set_defaults(message, draft, gpus)
    problems = check_config(message, draft, gpus=gpus, reported=reported)
    if problems:
        raise ConfigError(problems)
    return typed_config(message, draft.backend)


def fill_missing(message: Any, reported: Any, *, keep_batch_size: bool = False) -> None:
    """Copy fields that `message` leaves out from `reported`. `keep_batch_size`: keep a `max_batch_size` of 0."""
    can_batch = reported.max_batch_size > 0
    unbatched = can_batch and keep_batch_size and message.max_batch_size == 0
    if not message.max_batch_size and not keep_batch_size:
        message.max_batch_size = reported.max_batch_size
    for name in ("input", "output"):
        _merge_tensors(getattr(message, name), getattr(reported, name), unbatched=unbatched)
    for field, value in reported.ListFields():
        if field.name in ("input", "output", "max_batch_size", "name"):
            continue
        if field.name == "parameters":
            for name in value:
                if name not in message.parameters:
                    message.parameters[name].CopyFrom(value[name])
            continue
        if field.name == "dynamic_batching" and not message.max_batch_size:
            continue
        if _is_unset(message, field):
            if field.is_repeated:
                getattr(message, field.name).MergeFrom(value)
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(value)
            else:
                setattr(message, field.name, value)


def _is_unset(message: Any, field: Any) -> bool:
    if field.containing_oneof is not None:
        return message.WhichOneof(field.containing_oneof.name) is None
    if field.message_type is not None and not field.is_repeated:
        return not message.HasField(field.name)
    return not getattr(message, field.name)


def _merge_tensors(tensors: Any, reported: Any, *, unbatched: bool) -> None:
    # A model that could batch but is configured not to has its batch dimension among the dims.
    batch_dim = [-1] if unbatched else []
    if not tensors:
        tensors.MergeFrom(reported)
        for tensor in tensors if unbatched else ():
            dims = [*batch_dim, *tensor.dims]
            del tensor.dims[:]
            tensor.dims.extend(dims)
        return
    by_name = {tensor.name: tensor for tensor in reported}
    for tensor in tensors:
        other = by_name.get(tensor.name)
        if other is None:
            continue
        if not tensor.data_type:
            tensor.data_type = other.data_type
        if not tensor.dims:
            tensor.dims.extend([*batch_dim, *other.dims])
            if other.HasField("reshape") and not tensor.HasField("reshape"):
                tensor.reshape.CopyFrom(other.reshape)


def _set_defaults(message: Any, draft: Draft, gpus: int) -> None:
    """Set the defaults, which protocols return like written values."""
    if not message.version_policy.WhichOneof("policy_choice"):
        message.version_policy.latest.num_versions = 1
    if not message.default_model_filename:
        message.default_model_filename = _filename(message, draft)
    if not message.platform:
        message.platform = _platform(message, draft)
    if message.HasField("ensemble_scheduling"):
        for index, step in enumerate(message.ensemble_scheduling.step):
            if not draft.has_field(f"ensemble_scheduling.step[{index}].model_version"):
                step.model_version = step.model_version or -1
    elif draft.backend != "ensemble":
        _set_group_defaults(message, draft.backend, gpus)
    if message.HasField("sequence_batching") and not message.sequence_batching.max_sequence_idle_microseconds:
        message.sequence_batching.max_sequence_idle_microseconds = _IDLE_MICROSECONDS
    for warmup in message.model_warmup:
        warmup.batch_size = warmup.batch_size or 1


def _filename(message: Any, draft: Draft) -> str:
    by_platform = [
        model_format for model_format in FORMATS if model_format.platform and model_format.platform == message.platform
    ]
    formats = by_platform or [model_format for model_format in FORMATS if model_format.backend == draft.backend]
    if not formats:
        return ""
    return (find_format(formats, draft.model_folder) or formats[0]).filename


def _platform(message: Any, draft: Draft) -> str:
    """Return Triton's name of the format (`onnxruntime_onnx`), which it also sets where a configuration has a backend."""
    formats = [model_format for model_format in FORMATS if model_format.backend == draft.backend]
    if not formats:
        return ""
    return (find_format(formats, draft.model_folder, message.default_model_filename) or formats[0]).platform


def _set_group_defaults(message: Any, backend: str, gpus: int) -> None:
    if not message.instance_group:
        message.instance_group.add().name = message.name
    for index, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{index}"
        group.count = group.count or 1
        if group.kind == _AUTO:
            reachable = gpus > 0 and all(0 <= gpu < gpus for gpu in group.gpus)
            uses_gpu = bool(group.gpus) or backend not in CPU_BY_DEFAULT
            group.kind = _GPU if reachable and uses_gpu else _CPU
        if group.kind == _GPU and not group.gpus:
            group.gpus.extend(range(gpus))
