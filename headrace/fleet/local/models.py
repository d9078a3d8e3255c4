# SPDX-License-Identifier: Apache-2.0
"""Models on this machine: those that are here are used where they are, others are brought once, for all services.

Asked by pods before they start, through `kubelet`. What is known of a model is told in its status, as a node's agent would.
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
from headrace.fleet.agent.sources import Source, credentials_of, source_of
from headrace.fleet.client.contract import NodeProgress
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.words import Document, kind_of, name_of, namespace_of, part, text
from headrace.models.storage.bringing import BringSettings, bring

log = logging.getLogger("headrace.fleet")

_ROOT = "/mnt/models/"
READY, FAILED, IN_TRANSIT = "Ready", "Failed", "In_Transit"
Key = tuple[str, str, str]


@dataclass
class Known:
    """How it stands with one model."""

    uri: str
    state: str = IN_TRANSIT
    path: str = ""
    """Where it is here."""
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
        told: Callable[[Document, Mapping[str, Any]], None],
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._told = told
        self._known: dict[Key, Known] = {}

    def use(self, model: Document) -> Known:
        """Make sure that it is here, or on its way. `state` says how far."""
        key, uri = _key(model), text(model, "spec", "storage", "storageUri")
        known = self._known.get(key)
        if known is None or known.uri != uri:
            if known is not None and known.task is not None:
                known.task.cancel()
            known = self._known[key] = Known(uri)
        now = asyncio.get_running_loop().time()
        if known.state == READY and Path(known.path).exists():
            return known
        if known.task is not None or (known.tried and now - known.tried < self._settings.retry_seconds):
            return known
        known.tried = now
        self._try(model, known)
        return known

    def progress(self, model: Document) -> list[NodeProgress]:
        """For `headrace describe`."""
        known = self._known.get(_key(model))
        if known is None or not known.total:
            return []  # it is here already, or nobody knows how much is to come
        state = {IN_TRANSIT: "Updating"}.get(known.state, known.state)
        return [NodeProgress(self._settings.node, state, known.done, known.total, "")]

    async def close(self) -> None:
        """End what is under way; what has come stays."""
        tasks = [each.task for each in self._known.values() if each.task is not None]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _try(self, model: Document, known: Known) -> None:
        try:
            source = source_of(model)
        except HeadraceError as error:
            self._set(model, known, FAILED, problem=error.message)
            return
        places = [self._below_root(source.path), source.path]
        places.append(source.uri.partition("://")[2] if source.way == "here" else "")
        here = next((each for each in places if each.startswith("/") and Path(each).exists()), "")
        if here:
            self._set(model, known, READY, here)
        elif source.way == "download":
            self._set(model, known, IN_TRANSIT)
            known.task = asyncio.ensure_future(self._bring(model, known, source))
        else:
            said = f"{source.path or source.uri} is not on this machine: put the model's files there"
            self._set(model, known, FAILED, problem=said)

    def _below_root(self, path: str) -> str:
        """Where a model would be in the folder that stands for /mnt/models."""
        root = self._settings.models_root
        return str(root / path.removeprefix(_ROOT)) if root is not None and path.startswith(_ROOT) else ""

    async def _bring(self, model: Document, known: Known, source: Source) -> None:
        loop = asyncio.get_running_loop()
        stop = False

        def heard(event: ProgressEvent) -> None:
            known.done, known.total = max(known.done, int(event.done)), int(event.total or 0)

        def blocking() -> Path:
            if source.place is None:
                raise ResourceExhausted(f"{source.uri} is nothing to download")
            credentials = credentials_of(source, self._secret(namespace_of(model), source.key) if source.key else None)
            folder = self._settings.root / "models"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            settings = BringSettings(hub_files=source.files)
            return bring(source.place, folder, credentials, heard, lambda: stop, settings)

        try:
            brought = await loop.run_in_executor(None, blocking)
        except HeadraceError as error:
            self._set(model, known, FAILED, problem=error.message)
        except OSError as error:
            log.warning("%s cannot be brought: %s", source.uri, error)
            self._set(
                model, known, FAILED, problem=f"{source.uri} cannot be written to {self._settings.root}; make room"
            )
        except asyncio.CancelledError:
            stop = True
            raise
        except Exception:
            log.exception("%s cannot be brought", source.uri)
            self._set(
                model, known, FAILED, problem=f"{source.uri} cannot be brought; the log of `headrace up` says why"
            )
        else:
            self._set(model, known, READY, str(brought))
        finally:
            known.task = None

    def _set(self, model: Document, known: Known, state: str, path: str = "", problem: str = "") -> None:
        if problem and problem != known.problem:
            log.warning("model %s: %s", name_of(model), problem)
        known.state, known.path, known.problem = state, path, problem
        node = [self._settings.node]
        status = {"state": state, "nodesReady": node if state == READY else [], "nodesFailed": node if problem else []}
        if {name: part(model, "status").get(name) for name in status} != status:
            self._told(model, status)


def _key(model: Document) -> Key:
    return kind_of(model), namespace_of(model), name_of(model)
