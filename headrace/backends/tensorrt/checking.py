# SPDX-License-Identifier: Apache-2.0
"""A configuration held against a plan, or filled in from it.

Called by `backends.tensorrt.backend`. Stricter than other backends, as Triton is with plans: every binding must be in the
configuration. Knows the two descriptions, and neither TensorRT nor CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.backends.signature import Port, Signature, check_signature, completion
from headrace.backends.tensorrt.plan import DTYPES, LINEAR, Binding, Plan, Profile
from headrace.backends.tensorrt.profiles import described, most_rows
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec, SequenceBatching


def check_plan(config: ModelConfig, plan: Plan, profiles: Sequence[Profile]) -> None:
    """Refuse a plan that this server cannot feed, and a configuration that means another plan than this one."""
    for binding in plan.bindings:
        _check_carried(config, binding)
    check_signature(config, signature_of(config, plan))
    _check_all_outputs_named(config, plan)
    specs: tuple[InputSpec | OutputSpec, ...] = (*config.inputs, *config.outputs)
    for spec in specs:
        _check_shape_tensor(config, spec, _binding(plan, spec.name))
    _check_profiles(config, plan, profiles)


def completed(config: ModelConfig, plan: Plan, profiles: Sequence[Profile]) -> Any:
    """The inputs, outputs and batch size that the configuration leaves out, as a message."""
    for binding in plan.bindings:
        _check_carried(config, binding)
    batched = config.max_batch_size > 0
    # Without a batch size from the configuration, a shape tensor's fixed size says that there is none: whether its first
    # value counts rows is not in the plan.
    left_out = [each for each in plan.bindings if each.is_shape_tensor] if batched else []
    message = completion(config, signature_of(config, plan, without=left_out))
    if message.max_batch_size > 0:
        # The plan knows: no larger batch is possible, and a smaller limit would waste what it was built for.
        message.max_batch_size = max(_rows(plan, profile) for profile in profiles)
    for binding in left_out:
        described_tensor = (message.input if binding.is_input else message.output).add()
        types = described_tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type
        described_tensor.name = binding.name
        described_tensor.data_type = types.values_by_name[f"TYPE_{_name_of(binding)}"].number
        described_tensor.dims.extend(_sent(config, binding))
    shape_tensors = {binding.name for binding in plan.bindings if binding.is_shape_tensor}
    for tensor in (*message.input, *message.output):
        if tensor.name in shape_tensors:
            tensor.is_shape_tensor = True
    return message


def signature_of(config: ModelConfig, plan: Plan, without: Sequence[Binding] = ()) -> Signature:
    """The plan's bindings in the words that all backends share."""
    alone = config.max_batch_size == 1
    inputs = {each.name: _port(each, alone) for each in plan.inputs if each not in without}
    outputs = {each.name: _port(each, alone) for each in plan.outputs if each not in without}
    return Signature(inputs, outputs, {})


def batch_inputs(plan: Plan) -> list[str]:
    """The inputs whose first dimension is the batch, in a model that batches."""
    return [binding.name for binding in plan.inputs if not binding.is_shape_tensor]


def _port(binding: Binding, alone: bool) -> Port:
    shape = binding.shape
    if alone and shape[:1] == (1,) and not binding.is_shape_tensor:
        # A plan for exactly one row serves max_batch_size: 1 as well as one for any number does.
        shape = (-1, *shape[1:])
    return Port(binding.name, binding.kind, binding.dtype, shape or None)


def _check_carried(config: ModelConfig, binding: Binding) -> None:
    side = "input" if binding.is_input else "output"
    if binding.dtype is None:
        raise InvalidArgument(
            f"{side} '{binding.name}' of model '{config.name}' is {binding.kind}, which no request can carry: build the "
            f"plan with one of {', '.join(DTYPES)} there (trtexec --{side}IOFormats=fp16:chw)"
        )
    if binding.layout != LINEAR:
        raise InvalidArgument(
            f"{side} '{binding.name}' of model '{config.name}' has the layout {binding.layout}: build the plan with its "
            f"elements one after the other (trtexec --{side}IOFormats=fp32:chw)"
        )


def _check_all_outputs_named(config: ModelConfig, plan: Plan) -> None:
    named = {spec.name for spec in config.outputs}
    if isinstance(config.scheduling, SequenceBatching):
        named |= {state.output_name for state in config.scheduling.states}
    missing = [binding.name for binding in plan.outputs if binding.name not in named]
    if missing:
        names = ", ".join(f"'{name}'" for name in missing)
        raise InvalidArgument(
            f"model '{config.name}' gives outputs that its configuration does not name: {names}. Add them to `output`"
        )


def _check_shape_tensor(config: ModelConfig, spec: InputSpec | OutputSpec, binding: Binding) -> None:
    side = "input" if binding.is_input else "output"
    if spec.is_shape_tensor != binding.is_shape_tensor:
        is_one = "is a shape tensor in the plan" if binding.is_shape_tensor else "is no shape tensor in the plan"
        wanted = "true" if binding.is_shape_tensor else "false"
        raise InvalidArgument(
            f"{side} '{spec.name}' of model '{config.name}' {is_one}: write is_shape_tensor: {wanted}"
        )
    dims = _dims(spec)
    if not binding.is_shape_tensor or dims is None:
        return
    expected = _sent(config, binding)
    if dims != expected:
        first = " (the number of rows is its first value, and not sent)" if config.max_batch_size > 0 else ""
        raise InvalidArgument(
            f"{side} '{spec.name}' of model '{config.name}' has dims {list(dims)} in the configuration and is a shape "
            f"tensor of {list(binding.shape)} in the plan: write dims: {list(expected)}{first}"
        )


def _sent(config: ModelConfig, binding: Binding) -> Dims:
    """What requests carry of a shape tensor: in a batch the first value is the number of rows, and not sent."""
    if config.max_batch_size == 0:
        return binding.shape
    if not binding.shape or binding.shape[0] < 2:
        raise InvalidArgument(
            f"shape tensor '{binding.name}' of model '{config.name}' has shape {list(binding.shape)}, which leaves no value "
            "for requests beside the number of rows: set max_batch_size: 0"
        )
    return (binding.shape[0] - 1,)


def _check_profiles(config: ModelConfig, plan: Plan, profiles: Sequence[Profile]) -> None:
    batched = config.max_batch_size > 0
    fixed = {spec.name: _dims(spec) for spec in config.inputs if not (spec.allow_ragged_batch or spec.is_shape_tensor)}
    fitting = [profile for profile in profiles if all(_holds(profile, *each, batched) for each in fixed.items())]
    if not fitting:
        dims = ", ".join(f"'{name}' {list(sizes)}" for name, sizes in fixed.items() if sizes is not None)
        raise InvalidArgument(
            f"model '{config.name}' is to take {dims}{' and a batch in front' if batched else ''}, and no profile of the "
            f"plan does: {described(profiles, list(fixed))}. Correct the dims, or build the plan with --minShapes and "
            "--maxShapes for them"
        )
    most = max(_rows(plan, profile) for profile in fitting)
    if config.max_batch_size > most:
        raise InvalidArgument(
            f"max_batch_size of model '{config.name}' is {config.max_batch_size}, and the plan was built for batches of "
            f"at most {most}: lower it, or build the plan with --maxShapes for more"
        )


def _holds(profile: Profile, name: str, dims: Dims | None, batched: bool) -> bool:
    if dims is None:
        return True
    allowed = profile.shapes[name]
    full = (*allowed.lowest[:1], *dims) if batched else dims
    if len(full) != len(allowed.lowest):
        return False
    # A size that requests decide is checked with each request.
    known = tuple(low if size == -1 else size for low, size in zip(allowed.lowest, full, strict=True))
    return allowed.holds(known)


def _rows(plan: Plan, profile: Profile) -> int:
    return most_rows(profile, batch_inputs(plan))


def _dims(spec: InputSpec | OutputSpec) -> Dims | None:
    return spec.dims if spec.reshape is None else spec.reshape


def _binding(plan: Plan, name: str) -> Binding:
    return next(binding for binding in plan.bindings if binding.name == name)


def _name_of(binding: Binding) -> str:
    return DTYPES[binding.kind].name
