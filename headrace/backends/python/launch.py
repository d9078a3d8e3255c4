# SPDX-License-Identifier: Apache-2.0
"""What a child is told when it starts: which file, which interpreter, which arguments for `initialize`.

Made by `backend` from a configuration, read by `instance` and `completion`.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.python.configs import config_json
from headrace.backends.python.frames import Meta
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from headrace.models.config.types import ModelConfig

_INIT_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Launch:
    """How the processes of one version are started."""

    model_name: str
    version: int
    file: Path
    model_folder: Path
    python: str
    init_timeout_seconds: float
    max_batch_size: int
    decoupled: bool
    output_names: tuple[str, ...]
    config_json: str

    def settings(self, placement: Placement, *, complete: bool = False) -> Meta:
        """The first message to a child."""
        return {
            "file": str(self.file),
            "instance": placement.name,
            "decoupled": self.decoupled,
            "outputs": self.output_names,
            "log_level": logging.getLogger(f"headrace.model.{self.model_name}").getEffectiveLevel(),
            "complete": complete,
            "args": {
                "model_config": self.config_json,
                "model_instance_kind": placement.kind.upper(),
                "model_instance_name": placement.name,
                "model_instance_device_id": str(placement.device),
                "model_repository": str(self.model_folder),
                "model_version": str(self.version),
                "model_name": self.model_name,
            },
        }


def launch_of(config: ModelConfig, files: ModelFiles) -> Launch:
    """Work out how a version is started, or say why it cannot be."""
    file = (files.version_folder / (config.default_model_filename or "model.py")).absolute()
    if not file.is_file():
        raise NotFound(f"model '{config.name}' has no {file.name} in {files.version_folder}: put it there")
    return Launch(
        model_name=config.name,
        version=files.version,
        file=file,
        model_folder=files.model_folder.absolute(),
        python=_interpreter(config, files),
        init_timeout_seconds=_seconds(config, "INIT_TIMEOUT_SECONDS", _INIT_TIMEOUT_SECONDS),
        max_batch_size=config.max_batch_size,
        decoupled=config.decoupled,
        output_names=tuple(output.name for output in config.outputs),
        config_json=config_json(config),
    )


def _interpreter(config: ModelConfig, files: ModelFiles) -> str:
    given = config.parameters.get("EXECUTION_ENV_PATH", "")
    if not given:
        return sys.executable
    folder = Path(given.replace("$$TRITON_MODEL_DIRECTORY", str(files.model_folder)))
    if not folder.is_absolute():
        folder = files.model_folder / folder
    python = folder / "bin" / "python"
    if python.is_file() and os.access(python, os.X_OK):
        return str(python.absolute())
    if folder.is_file():
        raise Unimplemented(
            f"EXECUTION_ENV_PATH of model '{config.name}' is an archive, which is not supported: unpack it and name the "
            "folder, one that has bin/python"
        )
    raise FailedPrecondition(
        f"EXECUTION_ENV_PATH of model '{config.name}' names {folder}, which has no bin/python: name the folder of a "
        "virtual environment, or leave it out"
    )


def _seconds(config: ModelConfig, name: str, default: float) -> float:
    given = config.parameters.get(name)
    if given is None:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise InvalidArgument(f"parameter {name} of model '{config.name}' is {given[:32]!a}: use seconds above 0")
    return seconds
