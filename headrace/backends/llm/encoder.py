# SPDX-License-Identifier: Apache-2.0
"""What embedding models, cross-encoders and speech models share: loading weights on each device, and computing a batch.

Weights are read from safetensors only, and nothing is downloaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from headrace.backends.contract import SleepLevel
from headrace.backends.llm.embedding.config import EmbeddingSettings, read_settings, read_transformer_config
from headrace.backends.signature import Signature, check_signature, completion
from headrace.backends.sleeping_weights import FileStamps, SleepingWeights, add_bytes, difference, free_unused
from headrace.backends.torch_import import TRANSFORMERS
from headrace.backends.weight_files import WeightFiles, check_memory, check_sizes
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, ResourceExhausted
from headrace.core.telemetry.load_stages import READ_WEIGHTS, TO_DEVICE, stage
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

Weights = TypeVar("Weights")


class DeviceWeights(Generic[Weights]):
    """The weights of a model version on each device. The first instance on a device loads them; they may sleep."""

    def __init__(
        self,
        name: str,
        folders: Iterable[Path],
        load: Callable[[torch.device], Weights],
        tensors: Callable[[Weights], Sequence[torch.Tensor]],
    ) -> None:
        """`name`: of the model. `folders`: where `load` reads. `tensors`: those of the weights that take memory."""
        self._name = name
        self._load = load
        self._tensors = tensors
        self._weights: dict[torch.device, Weights] = {}
        self._sleeping: dict[torch.device, SleepingWeights] = {}
        self._files = FileStamps(file for folder in folders for file in sorted(folder.glob("*.safetensors")))
        self._lock = threading.Lock()
        self._batches = 0
        self._idle = threading.Condition()

    def on(self, device: torch.device) -> Weights:
        """Return the weights on a device; load them if they are not there yet."""
        with self._lock:
            if device not in self._weights:
                self._weights[device] = self._load(device)
            return self._weights[device]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the weights for a batch: they stay where they are until it is computed."""
        with self._idle:
            self._batches += 1
        try:
            yield
        finally:
            with self._idle:
                self._batches -= 1
                self._idle.notify_all()

    def sleep(self, level: SleepLevel) -> dict[str, int]:
        """Move the weights to host memory (level 1) or drop them (level 2); return the bytes given back, by place."""
        freed: dict[str, int] = {}
        with self._lock, self._idle:
            self._idle.wait_for(lambda: not self._batches)
            for device, weights in self._weights.items():
                sleeping = self._sleeping.setdefault(device, SleepingWeights(self._tensors(weights)))
                before = sleeping.bytes
                if level == 1:
                    sleeping.move_to_host()
                else:
                    sleeping.drop()
                add_bytes(freed, difference(before, sleeping.bytes))
        free_unused()
        return freed

    def wake(self) -> None:
        """Move the weights back, or read them again."""
        with self._lock:
            for device, sleeping in self._sleeping.items():
                if sleeping.dropped:
                    self._files.check(f"model '{self._name}'")
                    sleeping.put_back(self._tensors(self._load(device)), f"model '{self._name}'")
                else:
                    sleeping.move_back()
            self._sleeping.clear()

    def clear(self) -> None:
        """Free the weights."""
        self._sleeping.clear()
        self._weights.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class TransformerFolder:
    """A model folder whose files and configuration were checked, with its tokenizer."""

    name: str
    """Name of the model."""
    path: Path
    settings: EmbeddingSettings
    config: Any
    """Configuration of transformers."""
    tokenizer: Any
    sizes: WeightFiles

    @classmethod
    def read(cls, config: ModelConfig, path: Path, signature: Signature, does: str, max_batch_size: int) -> Self:
        """Check a folder and the configuration of its model. `does`: what the model does, for errors."""
        from transformers import AutoConfig, AutoTokenizer

        check_safetensors(config.name, path)
        settings = read_settings(config.parameters)
        sizes = check_sizes(path, read_transformer_config(path))
        check_signature(config, signature)
        check_batch_size(config, does, max_batch_size)
        return cls(
            config.name,
            path,
            settings,
            from_pretrained(path, "config.json", AutoConfig.from_pretrained, settings),
            from_pretrained(path, "tokenizer", AutoTokenizer.from_pretrained, settings),
            sizes,
        )

    def load_weights(self, model_class: Any, device: torch.device) -> Any:
        """Load the weights on a device."""
        return load_encoder(self.name, self.path, model_class, self.config, self.settings, device, weights=self.sizes)


def complete_batched(config: ModelConfig, signature: Signature, max_batch_size: int) -> Any:
    """Add the tensors and the batch size to a configuration that leaves them out."""
    message = completion(config, signature)
    if not config.max_batch_size and message.max_batch_size:
        message.max_batch_size = max_batch_size
    return message


def complete_transformer(config: ModelConfig, folder: Path, signature: Signature, max_batch_size: int) -> Any:
    """Check the weights of a transformer's folder, and complete its configuration."""
    check_sizes(folder, read_transformer_config(folder))
    return complete_batched(config, signature, max_batch_size)


def check_batch_size(config: ModelConfig, does: str, max_batch_size: int) -> None:
    """Refuse a configuration without batches. `does`: what the model does, for the error."""
    if config.max_batch_size < 1:
        raise InvalidArgument(
            f"model '{config.name}' {does}, and its configuration has max_batch_size: 0: set {max_batch_size}, or leave it "
            "out"
        )


def check_safetensors(name: str, folder: Path) -> None:
    """Refuse a folder without safetensors."""
    if not any(folder.glob("*.safetensors")):
        raise FailedPrecondition(
            f"'{folder.name}' of model '{name}' has no *.safetensors: other formats of weights can run code when they are "
            "read. Convert the model with save_pretrained(..., safe_serialization=True)"
        )


def load_encoder(
    name: str,
    folder: Path,
    auto_class: Any,
    config: Any,
    settings: EmbeddingSettings,
    device: Any,
    *,
    weights: Any,
    unused: str = "",
) -> Any:
    """Load a model with its weights on a device. `unused`: a prefix of tensors that may be missing."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    dtype = settings.dtype
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    if device.type == "cpu":
        size = 0 if dtype == "auto" else getattr(torch, dtype).itemsize
        check_memory(folder, weights, size, settings.max_weight_bytes)
    with TRANSFORMERS, stage(READ_WEIGHTS):
        model, report = from_pretrained(
            folder,
            "weights",
            auto_class.from_pretrained,
            settings,
            config=config,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
    missing = [key for key in report["missing_keys"] if not unused or not key.startswith(unused)]
    if missing:
        raise FailedPrecondition(
            f"the weights of model '{name}' lack {len(missing)} tensors of its architecture, such as '{missing[0]}': copy "
            "the whole model folder"
        )
    with stage(TO_DEVICE):
        return model.eval().to(device)


def from_pretrained(folder: Path, what: str, function: Any, settings: EmbeddingSettings, **more: Any) -> Any:
    """Call a `from_pretrained` function of transformers; its errors go to the log."""
    try:
        return function(str(folder), local_files_only=True, trust_remote_code=settings.trust_remote_code, **more)
    except HeadraceError:
        raise
    except Exception as error:
        log.exception("The %s in %s could not be read.", what, folder)
        hint = (
            "it needs Python code of its own: read that code, then set parameter trust_remote_code: true"
            if "trust_remote_code" in str(error)
            else "copy the whole model folder, and see the server's log"
        )
        raise FailedPrecondition(f"the {what} in '{folder.name}' could not be read: {hint}") from None


@contextmanager
def computing(name: str, weights: DeviceWeights[Any]) -> Iterator[None]:
    """Use the weights for a batch. Log an unexpected exception, and raise what a client is sent for it."""
    try:
        with weights.used(), torch.inference_mode():
            yield
    except HeadraceError:
        raise
    except Exception as error:
        log.exception("Model %s could not compute a batch.", name)
        raise _compute_error(name, error) from None


def set_threads(threads: int) -> None:
    """Set the number of threads that PyTorch computes with in this thread; 0: leave it."""
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _compute_error(name: str, error: Exception) -> HeadraceError:
    """Return what a client is sent for an exception of a batch."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return ResourceExhausted(
            f"model '{name}' has not enough memory for this batch: send fewer or shorter texts at a time, or lower "
            "max_batch_size"
        )
    return Internal(f"model '{name}' failed to compute this request; the server's log has the details")
