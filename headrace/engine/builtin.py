# SPDX-License-Identifier: Apache-2.0
"""The models that every Headrace carries, for a first look without a repository. Served by `headrace serve` alone.

`identity` gives back what it gets, of any type and shape; `first1000` takes images `[n, 3, 224, 224]` and gives the first
1,000 numbers of each, so that a large request has the small answer of a classifier.
"""

from __future__ import annotations

from pathlib import Path

from headrace.backends.contract import ModelFiles
from headrace.core.clock import SystemClock
from headrace.core.dtypes import FP32
from headrace.core.telemetry.progress import Reporter, silent
from headrace.engine.opening import VersionOpener
from headrace.engine.repository.directory import Directory, ServedModel
from headrace.models.config.types import DynamicBatching, InputSpec, InstanceGroup, ModelConfig, OutputSpec

_NOWHERE = ModelFiles(Path(), 1, Path())

BUILTIN_MODELS = (
    ModelConfig(
        "identity",
        "identity",
        max_batch_size=64,
        inputs=(InputSpec("INPUT0", None, None),),
        outputs=(OutputSpec("OUTPUT0", None, None),),
        instance_groups=(InstanceGroup("identity", runs="inline"),),
        scheduling=DynamicBatching(),
    ),
    ModelConfig(
        "first1000",
        "identity",
        max_batch_size=64,
        inputs=(InputSpec("INPUT0", FP32, (3, 224, 224)),),
        outputs=(OutputSpec("OUTPUT0", FP32, (1000,)),),
        instance_groups=(InstanceGroup("first1000", runs="inline"),),
        scheduling=DynamicBatching(),
        parameters={"first": "1000"},
    ),
)


async def open_builtin_models(opener: VersionOpener, directory: Directory) -> None:
    """Put the built-in models into a directory."""
    for config in BUILTIN_MODELS:
        version = await opener.open(config, _NOWHERE, Reporter(silent, SystemClock(), config.name))
        directory.put(ServedModel(config.name), {1: version})
