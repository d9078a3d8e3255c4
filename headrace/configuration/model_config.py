# SPDX-License-Identifier: Apache-2.0
"""The `config.json` of a model that is served straight from a path. Called by `staging`.

What the configuration of the server says comes before what lies beside the model; what neither says is left to the model's
file, which most formats tell. TorchScript does not: then one FP32 input and output of any length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.configuration.single_model import SingleModel
from headrace.core.errors import InvalidArgument
from headrace.modelconfig.detect import Detected
from headrace.modelconfig.drafts import draft_from_json, read_draft
from headrace.modelconfig.schema import new_config
from headrace.modelconfig.showing import to_json

DEFAULT_BATCH = 32
"""For formats that do not tell whether they batch."""

LABELS = "version_labels"


def config_json(single: SingleModel, detected: Detected, labels: Mapping[int, str], *, own: bool) -> str:
    """The whole configuration. `own`: there is one beside the model, to begin with."""
    message = read_draft(single.path).message if own else new_config(backend=detected.backend)
    message.name = single.name
    if not own:
        message.platform = detected.platform
    if not message.backend and not message.platform:
        message.backend = detected.backend
    # Only what is to be served is in the folder.
    message.version_policy.Clear()
    message.version_policy.all.SetInParent()
    _add_device(message, single)
    _add_tensors(message, single, detected)
    unbatched = _add_batching(message, single, detected)
    if single.cached:
        message.response_cache.enable = True
    _add_parameters(message, single, detected, labels)
    values = to_json(message)
    if not (message.max_batch_size or unbatched):
        del values["max_batch_size"]  # 0 says something else than nothing
    text = json.dumps(values, indent=2)
    draft_from_json(single.path, text)  # what is wrong is told now
    return text


def _add_device(message: Any, single: SingleModel) -> None:
    if message.instance_group and single.auto_device and single.instances is None:
        return
    del message.instance_group[:]
    group = message.instance_group.add()
    group.count = single.instances or 1
    if not single.auto_device:
        group.kind = group.KIND_CPU if single.gpu is None else group.KIND_GPU
        if single.gpu is not None and single.gpu >= 0:
            group.gpus.append(single.gpu)


def _add_tensors(message: Any, single: SingleModel, detected: Detected) -> None:
    for name, rows in (("input", single.inputs), ("output", single.outputs)):
        tensors = getattr(message, name)
        if rows:
            del tensors[:]
            for row in rows:
                _add_tensor(tensors, str(row["name"]), str(row["dtype"]), row["shape"] or (-1,))
        elif not tensors and not detected.tells:
            _add_tensor(tensors, f"{name.upper()}__0", "FP32", (-1,))


def _add_tensor(tensors: Any, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    tensor = tensors.add()
    tensor.name = name
    tensor.dims.extend(shape)
    types = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type
    word = dtype.upper().removeprefix("TYPE_")
    known = types.values_by_name.get(f"TYPE_{'STRING' if word == 'BYTES' else word}")
    if known is None or not known.number:
        words = ", ".join(each.name.removeprefix("TYPE_") for each in types.values if each.number)
        raise InvalidArgument(f"model: the dtype of {name[:64]!a} is {dtype[:32]!a}: use {words}")
    tensor.data_type = known.number


def _add_batching(message: Any, single: SingleModel, detected: Detected) -> bool:
    """Whether no batches are asked for."""
    if single.max_batch_size is not None:
        message.max_batch_size = single.max_batch_size
    elif not message.max_batch_size and not detected.tells:
        message.max_batch_size = DEFAULT_BATCH
    if single.max_batch_size == 0:
        if message.HasField("dynamic_batching"):
            message.ClearField("dynamic_batching")
        return True
    if message.WhichOneof("scheduling_choice") in (None, "dynamic_batching"):
        batching = message.dynamic_batching
        if message.max_batch_size or single.batch_timeout_ms is not None:
            batching.SetInParent()
        if single.batch_timeout_ms is not None:
            batching.max_queue_delay_microseconds = round(single.batch_timeout_ms * 1000)
        if single.queue_timeout_ms:
            batching.default_queue_policy.default_timeout_microseconds = round(single.queue_timeout_ms * 1000)
        if single.max_queue_size:
            batching.default_queue_policy.max_queue_size = single.max_queue_size
    return False


def _add_parameters(message: Any, single: SingleModel, detected: Detected, labels: Mapping[int, str]) -> None:
    if single.precision != "fp32":
        if detected.backend != "pytorch":
            raise InvalidArgument(
                f"model.precision: {single.precision} converts PyTorch models, and {single.path} is {detected.what}: "
                "convert the file itself, and write precision: fp32"
            )
        message.parameters["precision"].string_value = single.precision
    for name, value in single.parameters.items():
        message.parameters[name].string_value = value
    if labels:
        pairs = sorted(labels.items())
        message.parameters[LABELS].string_value = ",".join(f"{number}={label}" for number, label in pairs)
