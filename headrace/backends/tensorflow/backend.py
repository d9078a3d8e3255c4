# SPDX-License-Identifier: Apache-2.0
"""Models in TensorFlow's formats, frozen GraphDef and SavedModel, computed by TensorFlow, on the CPU or a GPU.

Called by the engine through `backends.contract`. Each instance has a session of its own, so that instances compute side by
side, unless the configuration lets some share one; what a session is made with is in `settings`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headrace.backends.contract import Array, EngineServices, ModelFiles, Placement
from headrace.backends.model_files import model_path
from headrace.backends.signature import Signature, check_signature, completion, is_declared
from headrace.backends.tensorflow import graphdef, savedmodel, settings
from headrace.backends.tensorflow.function import Function, declared_inputs, declared_outputs, dismantle
from headrace.backends.tensorflow.session import Session
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

GRAPHDEF = "tensorflow_graphdef"
SAVEDMODEL = "tensorflow_savedmodel"

_USUAL = {GRAPHDEF: (graphdef.FILENAME,), SAVEDMODEL: (savedmodel.FOLDER,)}


class TensorFlowBackend:
    """`backend: "tensorflow"`."""

    def usable_gpus(self, present: int) -> int:
        """Those that this build of TensorFlow sees."""
        return min(present, settings.gpus())

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Inputs, outputs and batch size: as a signature has them, or by the ends of a frozen graph."""
        if is_declared(config):
            return None
        platform, path = _found(config, files)
        signature: Signature
        if platform == GRAPHDEF:
            signature = graphdef.describe_graphdef(config, files, path)
        else:
            signature = savedmodel.describe_savedmodel(config, path)
        return completion(config, signature)

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> TensorFlowModel:
        """Find the file and check the settings. The file is read by the instances, each into its own session."""
        settings.check(config)
        platform, path = _found(config, files)
        return TensorFlowModel(config, files, platform, path)


class TensorFlowModel:
    """One version: a file, and the sessions that instances compute with."""

    def __init__(self, config: ModelConfig, files: ModelFiles, platform: str, path: Path) -> None:
        self._config = config
        self._files = files
        self._platform = platform
        self._path = path
        self._share_count = settings.share_count(config)
        self._lock = threading.Lock()
        self._shared: dict[tuple[str, int], _Shared] = {}

    def open(self, placement: Placement) -> TensorFlowInstance:
        """Read the file into a session, or share one. Refuses a configuration that does not fit what the file has."""
        with self._lock:
            key = (placement.kind, placement.device)
            shared = self._shared.get(key)
            if shared is None or not shared.join(self._share_count):
                shared = self._shared[key] = _Shared(self._session(placement))
            return TensorFlowInstance(shared)

    def close(self) -> None:
        """The instances have closed their sessions."""
        self._shared.clear()

    def _session(self, placement: Placement) -> Session:
        config = self._config
        device = settings.device_name(config, placement)
        function: Function
        if self._platform == GRAPHDEF:
            function = graphdef.read_graphdef(config, self._files, self._path, device)
        else:
            function = savedmodel.read_savedmodel(config, self._path, device)
        try:
            check_signature(config, function.signature)
        except InvalidArgument:
            dismantle(function.graph)
            raise
        inputs = list(dict.fromkeys(declared_inputs(config)))
        outputs = list(dict.fromkeys(declared_outputs(config)))
        return Session(config.name, function, inputs, outputs, settings.session_config(config, placement))


class TensorFlowInstance:
    """One of those that compute with a session."""

    def __init__(self, shared: _Shared) -> None:
        self._shared: _Shared | None = shared
        self._compute = shared.session.compute

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch."""
        return self._compute(inputs, wanted)

    def close(self) -> None:
        """Let the session go; the last one closes it."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.leave()


class _Shared:
    """A session, and how many compute with it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._users = 1
        self._lock = threading.Lock()

    def join(self, most: int) -> bool:
        """One more, if there may be so many and the session is still open."""
        with self._lock:
            if not 0 < self._users < most:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """One less; with the last, the session is closed."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.session.close()


def _found(config: ModelConfig, files: ModelFiles) -> tuple[str, Path]:
    """Which of the two formats it is, and where: by the platform, or else by what is there."""
    if config.platform in _USUAL:
        return config.platform, model_path(config, files, *_USUAL[config.platform])
    path = model_path(config, files, savedmodel.FOLDER, graphdef.FILENAME)
    return (SAVEDMODEL if path.is_dir() else GRAPHDEF), path
