# SPDX-License-Identifier: Apache-2.0
"""Models on this machine: a model that is here is used in place, another is downloaded once for all services.

Pods ask for their model before they start. The state of a model is reported in its status, as the agent of a node does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError, ResourceExhausted
from headrace.core.telemetry.progress import ProgressEvent
from headrace.fleet.agent.model_sources import ModelSource, credentials_from, parse_source
from headrace.fleet.client.contract import NodeProgress
from headrace.fleet.documents import kind_key, namespace_of
from headrace.fleet.local.settings import LocalSettings
from headrace.models.storage.fetch import FetchSettings, fetch_location
from headrace.platforms.kubernetes_client.objects import Document, get_mapping, get_str, name_of

log = logging.getLogger("headrace.fleet")

_ROOT = "/mnt/models/"
READY, FAILED, IN_TRANSIT = "Ready", "Failed", "In_Transit"
Key = tuple[str, str, str]


@dataclass
class ModelState:
    """The state of one model."""

    uri: str
    state: str = IN_TRANSIT
    path: str = ""
    """Its local folder."""
    problem: str = ""
    done: int = 0
    total: int = 0
    task: asyncio.Task[None] | None = None
    tried: float = 0.0


class Models:
    """The models that services use. Used from the loop's thread only."""

    def __init__(
        self,
        settings: LocalSettings,
        secret: Callable[[str, str], Document | None],
        update_status: Callable[[Document, Mapping[str, Any]], None],
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._update_status = update_status
        self._states: dict[Key, ModelState] = {}

    def use(self, model: Document) -> ModelState:
        """Return the state of a model; starts its download if it is missing."""
        key, uri = kind_key(model), get_str(model, "spec", "storage", "storageUri")
        state = self._states.get(key)
        if state is None or state.uri != uri:
            if state is not None and state.task is not None:
                state.task.cancel()
            state = self._states[key] = ModelState(uri)
        now = asyncio.get_running_loop().time()
        if state.state == READY and Path(state.path).exists():
            return state
        if state.task is not None or (state.tried and now - state.tried < self._settings.retry_seconds):
            return state
        state.tried = now
        self._locate(model, state)
        return state

    def progress(self, model: Document) -> list[NodeProgress]:
        """Return the download progress, for `headrace describe`."""
        current = self._states.get(kind_key(model))
        if current is None or not (current.total or current.problem):
            return []  # the model is here already, or its size is unknown
        state = {IN_TRANSIT: "Updating"}.get(current.state, current.state)
        return [NodeProgress(self._settings.node, state, current.done, current.total, "", current.problem)]

    async def close(self) -> None:
        """Cancel the downloads; downloaded files stay."""
        tasks = [entry.task for entry in self._states.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _locate(self, model: Document, entry: ModelState) -> None:
        try:
            source = parse_source(model)
        except HeadraceError as error:
            self._set(model, entry, FAILED, problem=error.message)
            return
        candidates = [self._below_root(source.path), source.path]
        candidates.append(source.uri.partition("://")[2] if source.kind == "here" else "")
        folder = next((path for path in candidates if path.startswith("/") and Path(path).exists()), "")
        if folder:
            self._set(model, entry, READY, folder)
        elif source.kind == "download":
            self._set(model, entry, IN_TRANSIT)
            entry.task = asyncio.ensure_future(self._download(model, entry, source))
        else:
            message = f"{source.path or source.uri} is not on this machine: put the model's files there"
            self._set(model, entry, FAILED, problem=message)

    def _below_root(self, path: str) -> str:
        """Return the path of a model in the folder that is used as /mnt/models."""
        root = self._settings.models_root
        return str(root / path.removeprefix(_ROOT)) if root is not None and path.startswith(_ROOT) else ""

    async def _download(self, model: Document, entry: ModelState, source: ModelSource) -> None:
        loop = asyncio.get_running_loop()
        stop = False

        def on_progress(event: ProgressEvent) -> None:
            entry.done, entry.total = max(entry.done, int(event.done)), int(event.total or 0)

        def fetch() -> Path:
            if source.place is None:
                raise ResourceExhausted(f"{source.uri} cannot be downloaded")
            credentials = credentials_from(
                source, self._secret(namespace_of(model), source.key) if source.key else None
            )
            folder = self._settings.root / "models"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            settings = FetchSettings(hub_files=source.files)
            return fetch_location(source.place, folder, credentials, on_progress, lambda: stop, settings)

        try:
            folder = await loop.run_in_executor(None, fetch)
        except HeadraceError as error:
            self._set(model, entry, FAILED, problem=error.message)
        except OSError as error:
            log.warning("Cannot download %s: %s", source.uri, error)
            self._set(
                model, entry, FAILED, problem=f"{source.uri} cannot be written to {self._settings.root}; make room"
            )
        except asyncio.CancelledError:
            stop = True
            raise
        except Exception:
            log.exception("Cannot download %s", source.uri)
            self._set(model, entry, FAILED, problem=f"{source.uri} cannot be downloaded; see the log of `headrace up`")
        else:
            self._set(model, entry, READY, str(folder))
        finally:
            entry.task = None

    def _set(self, model: Document, entry: ModelState, state: str, path: str = "", problem: str = "") -> None:
        if problem and problem != entry.problem:
            log.warning("Model %s: %s", name_of(model), problem)
        entry.state, entry.path, entry.problem = state, path, problem
        node = [self._settings.node]
        status = {"state": state, "nodesReady": node if state == READY else [], "nodesFailed": node if problem else []}
        if problem:
            status["message"] = f"{self._settings.node}: {problem}"
        before = get_mapping(model, "status")
        if {name: before.get(name) for name in status} != status or ("message" in before) != bool(problem):
            self._update_status(model, status)
