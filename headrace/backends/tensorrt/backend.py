# SPDX-License-Identifier: Apache-2.0
"""The TensorRT backend: plans, on NVIDIA GPUs only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path, named_path, parse_bool, parse_choice
from headrace.backends.signature import Port, Signature, check_signature, completion, is_declared
from headrace.backends.tensorrt import device
from headrace.backends.tensorrt.instance import TensorRTInstance
from headrace.backends.tensorrt.plan import (
    DTYPES,
    LINEAR,
    Binding,
    Plan,
    Profile,
    described,
    most_rows,
    usable_profiles,
)
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec, SequenceBatching

DEFAULT_FILENAME = "model.plan"

_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")


@dataclass(frozen=True, slots=True)
class Settings:
    """The parsed parameters of a configuration."""

    strategy: str = "STATIC"
    """A name of `tensorrt.ExecutionContextAllocationStrategy`."""
    version_compatible: bool = False


def settings_of(config: ModelConfig) -> Settings:
    """Parse the parameters; ignore unknown ones."""
    return Settings(
        parse_choice(config.parameters, "execution_context_allocation_strategy", "STATIC", _STRATEGIES),
        parse_bool(config.parameters, "version_compatible", False),
    )


def plan_file(config: ModelConfig, files: ModelFiles, capability: str) -> Path:
    """Return the file for a GPU of this compute capability, such as "8.6"."""
    name = config.cc_model_filenames.get(capability)
    if name:
        return named_path(config, files, name, f"cc_model_filenames[{capability}]")
    try:
        return model_path(config, files, DEFAULT_FILENAME)
    except FailedPrecondition:
        if not config.cc_model_filenames:
            raise
        others = ", ".join(sorted(config.cc_model_filenames))
        raise FailedPrecondition(
            f"model '{config.name}' version {files.version} has no plan for this GPU, whose compute capability is "
            f"{capability}: cc_model_filenames has plans for {others}, and there is no "
            f"'{config.default_model_filename or DEFAULT_FILENAME}' for the rest. Build a plan with trtexec on this "
            "machine and name it there"
        ) from None


def check_plan(config: ModelConfig, plan: Plan, profiles: Sequence[Profile]) -> None:
    """Reject a plan that this server cannot feed, and a configuration that does not fit the plan."""
    for binding in plan.bindings:
        _check_carried(config, binding)
    check_signature(config, signature_of(config, plan))
    _check_all_outputs_named(config, plan)
    specs: tuple[InputSpec | OutputSpec, ...] = (*config.inputs, *config.outputs)
    for spec in specs:
        _check_shape_tensor(config, spec, _binding(plan, spec.name))
    _check_profiles(config, plan, profiles)


def completed(config: ModelConfig, plan: Plan, profiles: Sequence[Profile]) -> Any:
    """Return the inputs, outputs and batch size that the configuration omits, as a message."""
    for binding in plan.bindings:
        _check_carried(config, binding)
    batched = config.max_batch_size > 0
    # Without a configured batch size, the fixed size of a shape tensor means that there is none: the plan does not say
    # whether its first value is the number of rows.
    omitted = [binding for binding in plan.bindings if binding.is_shape_tensor] if batched else []
    message = completion(config, signature_of(config, plan, without=omitted))
    if message.max_batch_size > 0:
        # The plan's own limit: no larger batch is possible, and a smaller limit would waste the plan.
        message.max_batch_size = max(_rows(plan, profile) for profile in profiles)
    for binding in omitted:
        described_tensor = (message.input if binding.is_input else message.output).add()
        types = described_tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type
        described_tensor.name = binding.name
        described_tensor.data_type = types.values_by_name[f"TYPE_{_name_of(binding)}"].number
        described_tensor.dims.extend(_request_dims(config, binding))
    shape_tensors = {binding.name for binding in plan.bindings if binding.is_shape_tensor}
    for tensor in (*message.input, *message.output):
        if tensor.name in shape_tensors:
            tensor.is_shape_tensor = True
    return message


def signature_of(config: ModelConfig, plan: Plan, without: Sequence[Binding] = ()) -> Signature:
    """Return the plan's bindings as a `Signature`."""
    alone = config.max_batch_size == 1
    inputs = {binding.name: _port(binding, alone) for binding in plan.inputs if binding not in without}
    outputs = {binding.name: _port(binding, alone) for binding in plan.outputs if binding not in without}
    return Signature(inputs, outputs, {})


def batch_inputs(plan: Plan) -> list[str]:
    """Return the inputs whose first dimension is the batch, in a model that batches."""
    return [binding.name for binding in plan.inputs if not binding.is_shape_tensor]


def _port(binding: Binding, alone: bool) -> Port:
    shape = binding.shape
    if alone and shape[:1] == (1,) and not binding.is_shape_tensor:
        # A plan for exactly one row also serves max_batch_size: 1.
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
        is_one = "is a shape tensor in the plan" if binding.is_shape_tensor else "is not a shape tensor in the plan"
        wanted = "true" if binding.is_shape_tensor else "false"
        raise InvalidArgument(
            f"{side} '{spec.name}' of model '{config.name}' {is_one}: write is_shape_tensor: {wanted}"
        )
    dims = _dims(spec)
    if not binding.is_shape_tensor or dims is None:
        return
    expected = _request_dims(config, binding)
    if dims != expected:
        first = " (the number of rows is its first value, and not sent)" if config.max_batch_size > 0 else ""
        raise InvalidArgument(
            f"{side} '{spec.name}' of model '{config.name}' has dims {list(dims)} in the configuration and is a shape "
            f"tensor of {list(binding.shape)} in the plan: write dims: {list(expected)}{first}"
        )


def _request_dims(config: ModelConfig, binding: Binding) -> Dims:
    """Return the part of a shape tensor that requests carry: not its first value in a batch, which is the row count."""
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
    fitting = [profile for profile in profiles if all(_holds(profile, *dims, batched) for dims in fixed.items())]
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
    # Sizes that vary by request are checked with each request.
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


log = logging.getLogger("headrace.backends")


class TensorRTBackend:
    """`backend: "tensorrt"`, `platform: "tensorrt_plan"`."""

    def usable_gpus(self, present: int) -> int:
        """Return the number of GPUs that CUDA sees."""
        return min(present, device.count_gpus())

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size from the plan for the model's first GPU."""
        if is_declared(config):
            return None
        gpu = next((gpu for group in config.instance_groups for gpu in group.gpus), 0)
        # The instances deserialize the engine again: a plan cannot be read without its GPU.
        engine = _Engine(config, files, gpu, settings_of(config))
        try:
            return completed(config, engine.plan, engine.plan.profiles)
        finally:
            engine.close()

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> TensorRTModel:
        """Check the settings. An instance reads the plan for its GPU."""
        return TensorRTModel(config, files, settings_of(config))


class TensorRTModel:
    """One version: an engine for each GPU that has instances."""

    def __init__(self, config: ModelConfig, files: ModelFiles, settings: Settings) -> None:
        self._config = config
        self._files = files
        self._settings = settings
        self._engines: dict[int, _Engine] = {}
        self._lock = Lock()

    def open(self, placement: Placement) -> TensorRTInstance:
        """Create an execution context. The first one on a GPU reads the plan and rejects one that does not fit."""
        if placement.kind != "gpu":
            raise InvalidArgument(
                f"model '{self._config.name}' is a TensorRT plan, which only a GPU can compute, and instance "
                f"'{placement.name}' is to run on the CPU: say KIND_GPU in instance_group, on a machine with a GPU"
            )
        with self._lock:
            engine = self._engines.get(placement.device)
            if engine is None:
                engine = _Engine(self._config, self._files, placement.device, self._settings)
                self._engines[placement.device] = engine
        profiles = usable_profiles(self._config, placement, engine.plan)
        check_plan(self._config, engine.plan, profiles)
        try:
            device.activate(placement.device)
            context = device.open_context(engine.engine, self._settings.strategy)
            return TensorRTInstance(self._config, placement.device, context, engine.plan, profiles)
        except device.DeviceError:
            log.exception("model %s: no execution context for %s", self._config.name, placement.name)
            raise FailedPrecondition(
                f"model '{self._config.name}': TensorRT {device.version()} could not create an instance on GPU "
                f"{placement.device}. Its memory is used up, or it does not work; the server's log says which"
            ) from None

    def close(self) -> None:
        """Free the engines with their weights. TensorRT frees objects without references."""
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()


class _Engine:
    """A deserialized plan on one GPU."""

    def __init__(self, config: ModelConfig, files: ModelFiles, gpu: int, settings: Settings) -> None:
        _check_machine(config, gpu)
        try:
            device.activate(gpu)
            self.file = plan_file(config, files, device.capability(gpu))
            content = _content(config, self.file)
            self._runtime, self.engine = device.read_engine(content, version_compatible=settings.version_compatible)
            self.plan: Plan = device.described(self.engine)
        except device.DeviceError:
            log.exception("model %s: %s could not be read on GPU %d", config.name, files.version_folder, gpu)
            raise FailedPrecondition(
                f"model '{config.name}': TensorRT {device.version()} cannot read its plan for GPU {gpu}. It was built for "
                "another GPU or TensorRT version, or is damaged: build it again with trtexec on this machine. The "
                "server's log has TensorRT's messages"
            ) from None

    def close(self) -> None:
        """Free the engine first: it depends on its runtime."""
        self.engine = None
        self._runtime = None


def _check_machine(config: ModelConfig, gpu: int) -> None:
    if int(device.version().split(".")[0]) < device.OLDEST_VERSION:
        raise FailedPrecondition(
            f"model '{config.name}' is a TensorRT plan, and TensorRT {device.version()} is too old for this server: install "
            f"TensorRT {device.OLDEST_VERSION} or newer and build the plan again with it"
        )
    seen = device.count_gpus()
    if gpu >= seen:
        raise FailedPrecondition(
            f"model '{config.name}' is a TensorRT plan for GPU {gpu}, and CUDA sees {seen} GPUs here: check the driver with "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or correct gpus in instance_group"
        )


def _content(config: ModelConfig, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        log.exception("model %s: %s could not be read", config.name, file)
        raise FailedPrecondition(
            f"model '{config.name}': '{file.name}' cannot be read. It must be a file that the server's user may read"
        ) from None
