# SPDX-License-Identifier: Apache-2.0
"""A data plane with several versions of one model, each a plain function, for tests of splits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from headrace.backends.contract import ModelFiles
from headrace.core.clock import Clock, SystemClock
from headrace.core.dtypes import FP32
from headrace.core.requests import GuidedRequest, InferRequest
from headrace.core.telemetry.metrics import Registry
from headrace.core.telemetry.progress import Reporter, silent
from headrace.engine import model_loader
from headrace.engine.dataplane import DataPlane
from headrace.engine.model_loader import ModelLoader
from headrace.engine.repository.directory import Directory, ServedModel
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.services import ModelServices
from headrace.engine.traffic.settings import SplitSettings
from headrace.engine.traffic.splits import TrafficSplits
from headrace.models.config.types import InputSpec, OutputSpec
from support.engines import FunctionBackend, RecordingCaller, config_of, tensors_of

ONE = np.ones((1, 4), np.float32)
PLAIN: dict[str, Any] = {
    "inputs": (InputSpec("INPUT0", FP32, (4,)),),
    "outputs": (OutputSpec("OUTPUT0", FP32, (4,)),),
    "scheduling": None,
}
"""With these a version has the express way."""


def echo(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"OUTPUT0": inputs["INPUT0"]}


def fail(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    raise RuntimeError("a secret of the model")


class SplitPlane:
    """One model `m` with versions that come and go, and its splits."""

    def __init__(self, clock: Clock | None = None, seed: int = 7) -> None:
        self.registry = Registry(clock or SystemClock())
        self._loader = ModelLoader(
            ModelServices(self.registry), ThreadPoolExecutor(2), cache=None, limiter=RateLimiter()
        )
        self.directory = Directory()
        self.plane = DataPlane(self.directory)
        self.served = ServedModel("m")
        self.versions: dict[int, Any] = {}
        self.traffic = TrafficSplits(self.plane, self.registry, clock=clock, chance=random.Random(seed).random)

    async def load(self, number: int, function: Any = echo, **more: Any) -> Any:
        config = config_of("m", **{**PLAIN, **more})
        backend = FunctionBackend({"m": function})
        with patch.object(model_loader, "backend_named", lambda _: backend):
            files = ModelFiles(Path(), number, Path())
            version = await self._loader.load(config, files, Reporter(silent, SystemClock(), "m"))
        self.versions = {**self.versions, number: version}
        self.directory.put(self.served, self.versions)
        return version

    async def unload(self, number: int) -> None:
        versions = dict(self.versions)
        gone = versions.pop(number)
        self.versions = versions
        self.directory.put(self.served, versions)
        await gone.retire(1.0)

    def split(self, text: str, **more: Any) -> None:
        """`split("1=0.9 2=0.1")`."""
        weights = dict(pair.split("=") for pair in text.split())
        self.traffic.set("m", SplitSettings({name: float(share) for name, share in weights.items()}, **more))

    def begin(self, key: str = "", array: Any = ONE, **parameters: Any) -> RecordingCaller:
        """Ask on the long way."""
        request = RecordingCaller()
        request.pending = self.plane.infer(self.request(key, array, **parameters), request)
        return request

    def request(self, key: str = "", array: Any = ONE, **parameters: Any) -> InferRequest:
        tensors = tensors_of(INPUT0=array)
        if key:
            return GuidedRequest("m", tensors, sticky_key=key)
        return InferRequest("m", tensors, parameters=parameters)

    async def ask(self, key: str = "", array: Any = ONE, **parameters: Any) -> str:
        """As protocols do: the short way if there is one, else the long one. The version that answered."""
        request = self.request(key, array, **parameters)
        answer = self.plane.answer(request)
        if answer is None:
            caller = RecordingCaller()
            caller.pending = self.plane.infer(request, caller)
            result = await caller.answer()
            if isinstance(result, BaseException):
                raise result
            answer = result
        return answer.model_version

    def report(self) -> dict[str, Any]:
        return self.traffic.report("m")

    def of(self, version: str) -> dict[str, Any]:
        """A version's or a shadow's part of the report."""
        report = self.report()
        return next(one for one in (*report["versions"], *report["shadows"]) if one["version"] == version)

    def metric(self, name: str, **labels: str) -> float:
        (family,) = [family for family in self.registry.families if family.name == name]
        return next(
            (
                getattr(series, "value", 0.0)
                for values, series in family.collect()
                if dict(zip(family.label_names, values, strict=True)) == {"model": "m", **labels}
            ),
            0.0,
        )

    async def close(self) -> None:
        self.traffic.close()
        for version in self.versions.values():
            await version.retire(5)


async def open_split_plane(*functions: Any, clock: Clock | None = None, seed: int = 7, **more: Any) -> SplitPlane:
    """With versions 1, 2, ... that are these functions."""
    split_plane = SplitPlane(clock, seed)
    for number, function in enumerate(functions, 1):
        await split_plane.load(number, function, **more)
    return split_plane
