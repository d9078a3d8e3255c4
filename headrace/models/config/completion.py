# SPDX-License-Identifier: Apache-2.0
"""Complete a model's configuration with what its backend reports and with defaults, and validate it."""

from __future__ import annotations

from typing import Any

from headrace.models.config.drafts import Draft
from headrace.models.config.formats import CPU_UNLESS_TOLD, FORMATS, find_format
from headrace.models.config.messages import typed_config
from headrace.models.config.problems import ConfigError
from headrace.models.config.types import ModelConfig
from headrace.models.config.validation import check_config

_AUTO, _GPU, _CPU = 0, 1, 2
_IDLE_MICROSECONDS = 1_000_000


def complete(draft: Draft, told: Any | None, gpus: int = 0) -> ModelConfig:
    """Return the configuration to serve with; `told` is the result of `Backend.complete`. Raises all problems at once."""
    message = type(draft.message)()
    message.CopyFrom(draft.message)
    if told is not None:
        fill_missing(message, told, keep_batch_size=draft.wrote("max_batch_size"))
    _fill_in(message, draft, gpus)
    problems = check_config(message, draft, gpus=gpus, told=told is not None)
    if problems:
        raise ConfigError(problems)
    return typed_config(message, draft.backend)


def fill_missing(message: Any, told: Any, *, keep_batch_size: bool = False) -> None:
    """Copy into `message` what it leaves out. `keep_batch_size`: keep its `max_batch_size` even if it is 0."""
    told_batches = told.max_batch_size > 0
    unbatched = told_batches and keep_batch_size and message.max_batch_size == 0
    if not message.max_batch_size and not keep_batch_size:
        message.max_batch_size = told.max_batch_size
    for name in ("input", "output"):
        _merge_tensors(getattr(message, name), getattr(told, name), unbatched=unbatched)
    for descriptor, value in told.ListFields():
        if descriptor.name in ("input", "output", "max_batch_size", "name"):
            continue
        if descriptor.name == "dynamic_batching" and not message.max_batch_size:
            continue
        if _is_left_out(message, descriptor):
            if descriptor.is_repeated:
                getattr(message, descriptor.name).MergeFrom(value)
            elif descriptor.message_type is not None:
                getattr(message, descriptor.name).CopyFrom(value)
            else:
                setattr(message, descriptor.name, value)


def _is_left_out(message: Any, field: Any) -> bool:
    if field.containing_oneof is not None:
        return message.WhichOneof(field.containing_oneof.name) is None
    if field.message_type is not None and not field.is_repeated:
        return not message.HasField(field.name)
    return not getattr(message, field.name)


def _merge_tensors(written: Any, told: Any, *, unbatched: bool) -> None:
    # A model that could batch but is configured not to has its batch dimension among the dims.
    front = [-1] if unbatched else []
    if not written:
        written.MergeFrom(told)
        for tensor in written if unbatched else ():
            dims = [*front, *tensor.dims]
            del tensor.dims[:]
            tensor.dims.extend(dims)
        return
    by_name = {tensor.name: tensor for tensor in told}
    for tensor in written:
        known = by_name.get(tensor.name)
        if known is None:
            continue
        if not tensor.data_type:
            tensor.data_type = known.data_type
        if not tensor.dims:
            tensor.dims.extend([*front, *known.dims])
            if known.HasField("reshape") and not tensor.HasField("reshape"):
                tensor.reshape.CopyFrom(known.reshape)


def _fill_in(message: Any, draft: Draft, gpus: int) -> None:
    """Set the defaults, which the protocols show like written values."""
    if not message.version_policy.WhichOneof("policy_choice"):
        message.version_policy.latest.num_versions = 1
    if not message.default_model_filename:
        message.default_model_filename = _filename(message, draft)
    if message.HasField("ensemble_scheduling"):
        for index, step in enumerate(message.ensemble_scheduling.step):
            if not draft.wrote(f"ensemble_scheduling.step[{index}].model_version"):
                step.model_version = step.model_version or -1
    elif draft.backend != "ensemble":
        _fill_in_groups(message, draft.backend, gpus)
    if message.HasField("sequence_batching") and not message.sequence_batching.max_sequence_idle_microseconds:
        message.sequence_batching.max_sequence_idle_microseconds = _IDLE_MICROSECONDS
    for warmup in message.model_warmup:
        warmup.batch_size = warmup.batch_size or 1


def _filename(message: Any, draft: Draft) -> str:
    named = [known for known in FORMATS if known.platform and known.platform == message.platform]
    formats = named or [known for known in FORMATS if known.backend == draft.backend]
    if not formats:
        return ""
    return (find_format(formats, draft.model_folder) or formats[0]).filename


def _fill_in_groups(message: Any, backend: str, gpus: int) -> None:
    if not message.instance_group:
        message.instance_group.add().name = message.name
    for index, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{index}"
        group.count = group.count or 1
        if group.kind == _AUTO:
            reachable = gpus > 0 and all(0 <= gpu < gpus for gpu in group.gpus)
            wanted = bool(group.gpus) or backend not in CPU_UNLESS_TOLD
            group.kind = _GPU if reachable and wanted else _CPU
        if group.kind == _GPU and not group.gpus:
            group.gpus.extend(range(gpus))
