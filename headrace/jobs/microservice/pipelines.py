# SPDX-License-Identifier: Apache-2.0
"""Where a video-generating pipeline is plugged in, and what it is asked.

Headrace has no such pipeline of its own: the weights and the code of cosmos-predict2.5 come from NVIDIA. A package adds one
by an entry point of the group `headrace.pipelines`, named like the architecture; or `--pipeline module:function` (or
`file.py:function`) names it. Either is a function from `PipelineSettings` to an object with `generate(VideoRequest)`.
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
from headrace.core.generation import Clip, Picture

ENTRY_POINTS = "headrace.pipelines"


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """What a pipeline is opened with."""

    checkpoint: Path | None
    """A local folder or file; None where `model_key` says which weights are meant."""
    model_key: str = ""
    """A name that the pipeline's own registry knows: base-2b, base-14b, auto-multiview."""
    output_dir: Path | None = None
    context_parallel_size: int = 1
    options: Mapping[str, bool] = field(default_factory=dict)
    """disable_guardrails, offload_guardrail_models, offload_diffusion_model."""


@dataclass(frozen=True, slots=True)
class VideoRequest:
    """One video to be made."""

    prompt: str
    inference_type: str
    """text2world, image2world or video2world; the last two have a picture or a clip."""
    num_output_frames: int
    guidance: int
    num_steps: int
    seed: int
    negative_prompt: str | None = None
    """None: the pipeline's own."""
    picture: Picture | None = None
    clip: Clip | None = None


class Pipeline(Protocol):
    """What a plug-in gives. Called by one thread at a time."""

    def generate(self, request: VideoRequest) -> bytes | Path:
        """An MP4 file: its bytes, or where it lies. A `HeadraceError` is told to the client; others go to the log."""


OpenPipeline = Callable[[PipelineSettings], Pipeline]


def find_pipeline(network_arch: str, named: str) -> OpenPipeline:
    """The plug-in; raises what to do where there is none."""
    if named:
        return _named(named)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == network_arch:
            return _callable(point.load(), f"the entry point {point.value}")
    raise FailedPrecondition(
        f"no pipeline for {network_arch} is installed, and Headrace carries none: install a package with an entry point "
        f"'{network_arch}' in the group {ENTRY_POINTS}, or name a function with --pipeline module:function"
    )


def _named(named: str) -> OpenPipeline:
    module_name, colon, function = named.rpartition(":")
    if not colon or not function.isidentifier():
        raise InvalidArgument(f"--pipeline {named[:128]!a}: write module:function or file.py:function")
    if module_name.endswith(".py"):
        module = _from_file(Path(module_name))
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise FailedPrecondition(
                f"--pipeline {named[:128]!a}: there is no module {(error.name or module_name)[:128]!a} here: install it, or "
                "put its folder on PYTHONPATH"
            ) from None
    found = getattr(module, function, None)
    if found is None:
        raise InvalidArgument(f"--pipeline {named[:128]!a}: {module_name} has no {function}")
    return _callable(found, f"--pipeline {named[:128]}")


def _from_file(path: Path) -> Any:
    name = f"headrace_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise FailedPrecondition(f"--pipeline {str(path)[:128]!a} is not there: name a file that is")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look there
    spec.loader.exec_module(module)
    return module


def _callable(found: Any, what: str) -> OpenPipeline:
    if not callable(found):
        raise InvalidArgument(f"{what} is no function: name one that takes PipelineSettings and gives a pipeline")
    opened: OpenPipeline = found
    return opened
