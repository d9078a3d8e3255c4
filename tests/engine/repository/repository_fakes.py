# SPDX-License-Identifier: Apache-2.0
"""A side that computes without computing, and configurations of one line."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.backends.contract import ModelFiles
from headrace.core.clock import Clock, SystemClock
from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.progress import Reporter
from headrace.engine.repository.control import RepositoryControl
from headrace.engine.repository.load_plan import LoadPlan
from headrace.engine.repository.settings import RepositorySettings
from headrace.models.config.types import (
    EnsembleScheduling,
    EnsembleStep,
    InputSpec,
    ModelConfig,
    OutputSpec,
    VersionPolicy,
)


class FakeVersion:
    def __init__(self, opener: FakeOpener, config: ModelConfig, files: ModelFiles) -> None:
        self.config = config
        self.version = files.version
        self.files = files
        self.retired = False
        self.grace: float | None = None
        self.in_use = False
        self.last_used_ns = 0
        self._opener = opener

    async def retire(self, grace_seconds: float) -> None:
        self.retired = True
        self.grace = grace_seconds
        self._opener.log.append(f"retire {self}")
        await self._opener.retiring.wait()
        self._opener.log.append(f"retired {self}")

    def __str__(self) -> str:
        return f"{self.config.name}/{self.version}"


class FakeOpener:
    """An `OpenVersion` that keeps a log, fails and waits as told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.opened: list[FakeVersion] = []
        self.failures: dict[str, Exception] = {}
        """By `model/version`."""
        self.gates: dict[str, asyncio.Event] = {}
        """A version whose gate is there waits until it is set."""
        self.retiring = asyncio.Event()
        self.retiring.set()
        self.running = 0
        self.most_running = 0
        self.pause: Callable[[], Awaitable[None]] | None = None

    async def __call__(self, config: ModelConfig, files: ModelFiles, reporter: Reporter) -> FakeVersion:
        key = f"{config.name}/{files.version}"
        self.log.append(f"open {key}")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        reporter.update(message="reading weights")
        try:
            if self.pause is not None:
                await self.pause()
            if key in self.gates:
                await self.gates[key].wait()
        except asyncio.CancelledError:
            self.log.append(f"cancelled {key}")
            raise
        finally:
            self.running -= 1
        if key in self.failures:
            raise self.failures[key]
        version = FakeVersion(self, config, files)
        self.opened.append(version)
        self.log.append(f"opened {key}")
        return version

    def live(self) -> list[str]:
        return sorted(str(version) for version in self.opened if not version.retired)


def fake_plan(folder: Path, config_json: str | None, gpus: int) -> LoadPlan:
    """Configurations are JSON: policy, steps, backend, bad."""
    text = (folder / "config.pbtxt").read_text() if config_json is None else config_json
    said = json.loads(text or "{}")
    if "bad" in said:
        raise InvalidArgument(said["bad"])
    kind, _, numbers = said.get("policy", "latest:1").partition(":")
    policy = {
        "latest": lambda: VersionPolicy("latest", latest=int(numbers)),
        "all": lambda: VersionPolicy("all"),
        "specific": lambda: VersionPolicy("specific", specific=tuple(map(int, numbers.split(",")))),
    }[kind]()
    steps = tuple(EnsembleStep(name, -1, {"IN": "IN"}, {"OUT": f"FROM_{name}"}) for name in said.get("steps", ()))
    outputs = [f"FROM_{name}" for name in said.get("steps", ())] or ["OUT"]

    def finish(files: ModelFiles) -> ModelConfig:
        return ModelConfig(
            folder.name,
            "ensemble" if steps else "fake",
            inputs=(InputSpec("IN", FP32, (4,)),),
            outputs=tuple(OutputSpec(name, FP32, (4,)) for name in outputs),
            version_policy=policy,
            scheduling=EnsembleScheduling(steps) if steps else None,
            parameters={"tag": said.get("tag", "")},
        )

    plan = LoadPlan(policy, finish, bool(steps), steps, said.get("backend", ""))
    return replace(plan, residency=said.get("residency", ""))


def put_model(repository: Path, name: str, *versions: int, **config: Any) -> Path:
    folder = repository / name
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, **config)
    for version in versions:
        put_version(folder, version)
    return folder


def write_config(folder: Path, **config: Any) -> None:
    (folder / "config.pbtxt").write_text(json.dumps(config))


def put_version(folder: Path, version: int, content: str = "weights") -> Path:
    path = folder / str(version)
    path.mkdir(exist_ok=True)
    (path / "model.bin").write_text(content)
    return path


def drop_version(folder: Path, version: int) -> None:
    shutil.rmtree(folder / str(version))


class RepositoryFixture:
    """A control over `tmp_path` with a fake opener. `poll` looks twice, so that what changed has settled."""

    def __init__(self, *repositories: Path, clock: Clock | None = None, memory: Any = None, **settings: Any) -> None:
        self.opener = FakeOpener()
        settings = {"mode": "poll", "poll_seconds": 3600.0, "settle_seconds": 1800.0, "exit_on_error": False} | settings
        self.control = RepositoryControl(
            repositories,
            self.opener,
            RepositorySettings(**settings),
            clock or SystemClock(),
            read_plan=fake_plan,
            memory=memory,
        )

    async def __aenter__(self) -> RepositoryFixture:
        await self.control.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.control.close(5)

    async def poll_twice(self) -> None:
        """Poll twice; loads have begun when this returns."""
        await self.control.poll_once()
        await self.control.poll_once()

    async def poll(self) -> None:
        """Poll twice, and wait for all loads and unloads that follow."""
        await self.poll_twice()
        await self.control.settled(retired=True)

    def served(self, name: str) -> list[str]:
        model = self.control.directory.models.get(name)
        return [] if model is None else list(model.versions)

    def newest(self, name: str) -> FakeVersion:
        found = self.control.directory.find(name)
        assert isinstance(found, FakeVersion)
        return found

    def states(self, name: str) -> list[str]:
        return [
            f"{entry.version_text} {entry.state.value} {entry.reason}".strip()
            for entry in self.control.versions_of(name)
        ]
