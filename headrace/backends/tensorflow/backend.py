# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow backend: frozen GraphDefs and SavedModels, run by TensorFlow on the CPU or a GPU.

Each instance has a session of its own, so that instances run in parallel, unless the configuration lets some share one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_config import model_path
from headrace.backends.signature import Signature, check_signature, completion, is_declared
from headrace.backends.tensorflow import graphdef, savedmodel, session
from headrace.backends.tensorflow.function import Function, declared_inputs, declared_outputs, free_graph
from headrace.backends.tensorflow.session import Session
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

GRAPHDEF = "tensorflow_graphdef"
SAVEDMODEL = "tensorflow_savedmodel"

_USUAL = {GRAPHDEF: (graphdef.FILENAME,), SAVEDMODEL: (savedmodel.FOLDER,)}


class TensorFlowBackend:
    """`backend: "tensorflow"`."""

    def usable_gpus(self, present: int) -> int:
        """Return the number of GPUs that this build of TensorFlow sees."""
        return min(present, session.gpus())

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return inputs, outputs and batch size, from a signature or from the ends of a frozen graph."""
        if is_declared(config):
            return None
        platform, path = _find_model(config, files)
        signature: Signature
        if platform == GRAPHDEF:
            signature = graphdef.describe_graphdef(config, files, path)
        else:
            signature = savedmodel.describe_savedmodel(config, path)
        return completion(config, signature)

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> TensorFlowModel:
        """Find the file and check the settings. Each instance reads the file into its own session."""
        session.check(config)
        platform, path = _find_model(config, files)
        return TensorFlowModel(config, files, platform, path)


class TensorFlowModel:
    """One version: a file, and the sessions of its instances."""

    def __init__(self, config: ModelConfig, files: ModelFiles, platform: str, path: Path) -> None:
        self._config = config
        self._files = files
        self._platform = platform
        self._path = path
        self._share_count = session.share_count(config)
        self._lock = threading.Lock()
        self._shared: dict[tuple[str, int], _SharedSession] = {}

    def open(self, placement: Placement) -> TensorFlowInstance:
        """Read the file into a session, or share one. Reject a configuration that does not fit the file."""
        with self._lock:
            key = (placement.kind, placement.device)
            shared = self._shared.get(key)
            if shared is None or not shared.join(self._share_count):
                shared = self._shared[key] = _SharedSession(self._session(placement))
            return TensorFlowInstance(shared)

    def close(self) -> None:
        """Do nothing: the instances have closed their sessions."""
        self._shared.clear()

    def _session(self, placement: Placement) -> Session:
        config = self._config
        device = session.device_name(config, placement)
        function: Function
        if self._platform == GRAPHDEF:
            function = graphdef.read_graphdef(config, self._files, self._path, device)
        else:
            function = savedmodel.read_savedmodel(config, self._path, device)
        try:
            check_signature(config, function.signature)
        except InvalidArgument:
            free_graph(function.graph)
            raise
        inputs = list(dict.fromkeys(declared_inputs(config)))
        outputs = list(dict.fromkeys(declared_outputs(config)))
        return Session(config.name, function, inputs, outputs, session.session_config(config, placement))


class TensorFlowInstance:
    """An instance that uses a session, possibly a shared one."""

    def __init__(self, shared: _SharedSession) -> None:
        self._shared: _SharedSession | None = shared
        self._compute = shared.session.compute

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Run a batch."""
        return self._compute(inputs, requested)

    def close(self) -> None:
        """Release the session; the last instance closes it."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.leave()


class _SharedSession:
    """A session with a reference count."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._users = 1
        self._lock = threading.Lock()

    def join(self, limit: int) -> bool:
        """Add a user; return False if there are `most` already or the session is closed."""
        with self._lock:
            if not 0 < self._users < limit:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """Remove a user; the last one closes the session."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.session.close()


def _find_model(config: ModelConfig, files: ModelFiles) -> tuple[str, Path]:
    """Return the format and the path of the model: by `platform`, or else by what exists."""
    if config.platform in _USUAL:
        return config.platform, model_path(config, files, *_USUAL[config.platform])
    path = model_path(config, files, savedmodel.FOLDER, graphdef.FILENAME)
    return (SAVEDMODEL if path.is_dir() else GRAPHDEF), path
