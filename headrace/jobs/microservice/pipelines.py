# SPDX-License-Identifier: Apache-2.0
"""The plug-in interface of video-generation pipelines.

Headrace has no such pipeline: the weights and code of cosmos-predict2.5 come from NVIDIA. A package adds one with an entry
point of the group `headrace.pipelines`, named like the architecture; or `--pipeline module:function` (or `file.py:function`)
names it. Either is a function from `PipelineSettings` to an object with `generate(VideoRequest)`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import PromptImage, PromptVideo

ENTRY_POINTS = "headrace.pipelines"


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Settings that open a pipeline."""

    checkpoint: Path | None
    """A local folder or file; None if `model_key` names the weights."""
    model_key: str = ""
    """A name in the pipeline's own registry: base-2b, base-14b, auto-multiview."""
    output_dir: Path | None = None
    context_parallel_size: int = 1
    options: Mapping[str, bool] = field(default_factory=dict)
    """disable_guardrails, offload_guardrail_models, offload_diffusion_model."""


@dataclass(frozen=True, slots=True)
class VideoRequest:
    """A request for one video."""

    prompt: str
    inference_type: str
    """text2world, image2world or video2world; the last two have an image or a clip."""
    num_output_frames: int
    guidance: int
    num_steps: int
    seed: int
    negative_prompt: str | None = None
    """None: the pipeline's default."""
    picture: PromptImage | None = None
    clip: PromptVideo | None = None


class Pipeline(Protocol):
    """A pipeline of a plug-in; called by one thread at a time."""

    def generate(self, request: VideoRequest) -> bytes | Path:
        """Return an MP4 file: its bytes or its path. The client sees a `HeadraceError`; other errors are logged."""


OpenPipeline = Callable[[PipelineSettings], Pipeline]


def find_pipeline(network_arch: str, name: str) -> OpenPipeline:
    """Return the plug-in; the error says how to install one."""
    if name:
        return _load_named(name)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == network_arch:
            return _check_callable(point.load(), f"the entry point {point.value}")
    raise FailedPrecondition(
        f"no pipeline for {network_arch} is installed: install a package with an entry point "
        f"'{network_arch}' in the group {ENTRY_POINTS}, or name a function with --pipeline module:function"
    )


def _load_named(name: str) -> OpenPipeline:
    module_name, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        raise InvalidArgument(f"--pipeline {name[:128]!a}: write module:function or file.py:function")
    if module_name.endswith(".py"):
        module = _import_file(Path(module_name))
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise FailedPrecondition(
                f"--pipeline {name[:128]!a}: module {(error.name or module_name)[:128]!a} not found: install it, or "
                "put its folder on PYTHONPATH"
            ) from None
    factory = getattr(module, function, None)
    if factory is None:
        raise InvalidArgument(f"--pipeline {name[:128]!a}: {module_name} has no {function}")
    return _check_callable(factory, f"--pipeline {name[:128]}")


def _import_file(path: Path) -> Any:
    name = f"headrace_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise FailedPrecondition(f"--pipeline {str(path)[:128]!a} does not exist: use an existing file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need it
    spec.loader.exec_module(module)
    return module


def _check_callable(factory: Any, name: str) -> OpenPipeline:
    if not callable(factory):
        raise InvalidArgument(f"{name} is not a function: use one that takes PipelineSettings and returns a pipeline")
    open_pipeline: OpenPipeline = factory
    return open_pipeline
