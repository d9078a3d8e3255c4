# SPDX-License-Identifier: Apache-2.0
"""The processes that are just being started, so that a server that is closing need not wait until they are.

Filled by `completion` and `instance`, asked by `backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock


class Starting:
    """How to end what is being started, by the folder of the model. From any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ends: dict[object, tuple[Path, Callable[[], None]]] = {}

    @contextmanager
    def noted(self, model_folder: Path, end: Callable[[], None]) -> Iterator[None]:
        """While this lasts, `end` ends it."""
        key = object()
        with self._lock:
            self._ends[key] = (model_folder, end)
        try:
            yield
        finally:
            with self._lock:
                del self._ends[key]

    def end(self, model_folder: Path) -> None:
        """End everything that is being started for a model."""
        with self._lock:
            ends = [end for folder, end in self._ends.values() if folder == model_folder]
        for end in ends:
            end()
