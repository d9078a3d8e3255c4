# SPDX-License-Identifier: Apache-2.0
"""How a configuration sets TensorRT up, and which of a version's files is for which GPU.

Called by `backends.tensorrt.backend`. Opens nothing.

    parameters
      execution_context_allocation_strategy   Triton's: STATIC takes the memory for the largest profile when an instance is
                                              opened; ON_PROFILE_CHANGE takes what the profile in use needs
      version_compatible                      1: also read plans built with trtexec --versionCompatible, which carry a
                                              runtime of their own; 0 unless told (Triton's --backend-config
                                              tensorrt,version-compatible)
    cc_model_filenames                        the file for each compute capability: "8.6" -> "model8_6.plan"
    default_model_filename                    the file for all others; model.plan unless told
    instance_group.profile                    the optimization profiles of a group's instances, by number: see `profiles`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.backends.contract import ModelFiles
from headrace.backends.model_files import model_path, named_path
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

DEFAULT_FILENAME = "model.plan"

_STRATEGY = "execution_context_allocation_strategy"
_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")
_COMPATIBLE = "version_compatible"
_SWITCH = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, slots=True)
class Settings:
    """What the parameters say."""

    strategy: str = "STATIC"
    """A name of `tensorrt.ExecutionContextAllocationStrategy`."""
    version_compatible: bool = False


def settings_of(config: ModelConfig) -> Settings:
    """Read the parameters; others than these are left to others."""
    strategy = config.parameters.get(_STRATEGY, "STATIC")
    if strategy not in _STRATEGIES:
        raise InvalidArgument(f"parameter {_STRATEGY} is '{strategy[:32]}': use one of {', '.join(_STRATEGIES)}")
    compatible = config.parameters.get(_COMPATIBLE, "0")
    if compatible.lower() not in _SWITCH:
        raise InvalidArgument(f"parameter {_COMPATIBLE} is '{compatible[:32]}': use 0 or 1")
    return Settings(strategy, _SWITCH[compatible.lower()])


def plan_file(config: ModelConfig, files: ModelFiles, capability: str) -> Path:
    """The file for a GPU of this compute capability, such as "8.6"."""
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
