# SPDX-License-Identifier: Apache-2.0
"""The backend `llm`: Hugging Face folders that generate text, or embed it, computed by PyTorch.

Called by the engine through `backends.contract`. A folder for embeddings is handed to `embedding`; all others are opened
as causal models here: tokenizer and weights in the loader's thread, the rest in the thread of the instance's engine.
"""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch

from headrace.backends.contract import EngineServices, Model, ModelFiles, Placement
from headrace.backends.llm.adapters.layers import Adapters
from headrace.backends.llm.adapters.loading import read_adapters
from headrace.backends.llm.embedding.folder import embeds
from headrace.backends.llm.embedding.model import EmbeddingModel
from headrace.backends.llm.embedding.model import complete as complete_embedding
from headrace.backends.llm.engine import Limits, Opened, open_scheduler
from headrace.backends.llm.handing.hands import SharedHands
from headrace.backends.llm.handing.identity import pages_identity, weights_identity
from headrace.backends.llm.instance import LlmInstance
from headrace.backends.llm.metrics import LlmMetrics
from headrace.backends.llm.running.loading import context_of, load_model, open_runner
from headrace.backends.llm.running.runner import Runner
from headrace.backends.llm.sampling.constraints import Constraints
from headrace.backends.llm.sampling.sampler import Sampler
from headrace.backends.llm.scheduling.scheduler import Scheduler
from headrace.backends.llm.seeing.looking import Looker
from headrace.backends.llm.seeing.opening import open_eyes
from headrace.backends.llm.settings import LlmSettings, model_folder, read_settings
from headrace.backends.llm.text.tokenizer import Tokenizer
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import TEXT_INPUT, TEXT_OUTPUT
from headrace.core.telemetry.registry import Registry
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends.llm")

_INPUTS = ((TEXT_INPUT, "TYPE_STRING"), ("stream", "TYPE_BOOL"), ("sampling_parameters", "TYPE_STRING"))
"""What v2 may send; all of it optional, because other protocols send none of it."""


class LlmBackend:
    """See `contract.Backend`."""

    def __init__(self) -> None:
        self._metrics: WeakKeyDictionary[Registry, LlmMetrics] = WeakKeyDictionary()
        self._hands: WeakKeyDictionary[Registry, SharedHands] = WeakKeyDictionary()
        self._lock = threading.Lock()
        """Models are loaded in several threads at once."""

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """The tensors of a model that generates, or what `embedding` says."""
        folder = model_folder(config, files)
        if embeds(folder, config.parameters.get("task", "")):
            return complete_embedding(config, folder)
        if config.proto is None:
            return None
        message = type(config.proto)()
        if not config.inputs:
            for name, kind in _INPUTS:
                _describe(message.input.add(), name, kind, 1).optional = True
        if not config.outputs:
            _describe(message.output.add(), TEXT_OUTPUT, "TYPE_STRING", -1)
        message.model_transaction_policy.decoupled = True
        return message

    def usable_gpus(self, present: int) -> int:
        """Those that PyTorch sees."""
        return min(present, torch.cuda.device_count()) if torch.cuda.is_available() else 0

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> Model:
        """Read the settings and the tokenizer; weights are read when an instance opens."""
        folder = model_folder(config, files)
        if embeds(folder, config.parameters.get("task", "")):
            return EmbeddingModel.load(config, folder)
        _check(config)
        settings = read_settings(config, files)
        with self._lock:
            metrics = self._metrics.get(services.metrics)
            if metrics is None:
                metrics = self._metrics[services.metrics] = LlmMetrics(services.metrics)
            hands = self._hands.get(services.metrics)
            if hands is None and services.handing.role:
                hands = self._hands[services.metrics] = SharedHands(services.handing, services.metrics)
        return LlmModel(config, files.version, settings, services, metrics, hands)


class LlmModel:
    """See `contract.Model`."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        settings: LlmSettings,
        services: EngineServices,
        metrics: LlmMetrics,
        hands: SharedHands | None = None,
    ) -> None:
        self._name = config.name
        self._config = config
        self._version = version
        self._settings = settings
        self._services = services
        self._metrics = metrics
        if not settings.model_path.is_dir():
            raise FailedPrecondition(
                f"parameter model_path of model '{config.name}' names no folder: put the model there, or name another"
            )
        self._tokenizer = Tokenizer.load(
            settings.model_path, trust_remote_code=settings.trust_remote_code, chat_template=settings.chat_template
        )
        self._shared_hands = hands
        self._hands = hands.join().of(config.name, version) if hands is not None else None

    def open(self, placement: Placement) -> LlmInstance:
        """Read the weights and start an engine."""
        device = _device(self._name, placement)
        model = load_model(self._settings, device)
        vocabulary = model.config.get_text_config().vocab_size
        instance = LlmInstance(
            placement.name,
            self._tokenizer,
            Constraints(self._tokenizer, vocabulary),
            self._metrics.of(self._name, self._version),
            self._services.loop,
            _Opening(model, self._settings, device, self._tokenizer, self._config, hands=self._hands is not None),
            self._hands,
        )
        instance.start()
        return instance

    def close(self) -> None:
        """The instances share a tokenizer, which need not be freed, and with all models what is handed over."""
        if self._shared_hands is not None:
            self._shared_hands.leave()


class _Opening:
    """What an engine's thread does first. It lets go of the model: the runner has it then."""

    def __init__(
        self,
        model: Any,
        settings: LlmSettings,
        device: torch.device,
        tokenizer: Tokenizer,
        config: ModelConfig,
        *,
        hands: bool,
    ) -> None:
        self._model = model
        self._settings = settings
        self._device = device
        self._tokenizer = tokenizer
        self._config = config
        self._identity = weights_identity(model, settings.adapters) if hands else None

    def __call__(self) -> Opened:
        settings, device = self._settings, self._device
        model, self._model = self._model, None
        if settings.threads and device.type == "cpu":
            torch.set_num_threads(settings.threads)  # of this thread: see the backend `pytorch`
        adapters = read_adapters(model, settings.adapters) if settings.adapters else None
        runner = open_runner(model, settings, device)
        try:
            return self._opened(runner, adapters)
        except BaseException:
            runner.close()
            raise

    def _opened(self, runner: Runner, adapters: Adapters | None) -> Opened:
        settings, device = self._settings, self._device
        scheduler = open_scheduler(
            runner,
            max_running=settings.running_on(device.type),
            max_step_tokens=settings.step_tokens_on(device.type),
            prefix_cache=settings.prefix_cache,
        )
        opened = Opened(
            runner,
            scheduler,
            Sampler(runner.model.config.get_text_config().vocab_size, device),
            self._limits(runner, scheduler),
        )
        if self._identity is not None:
            opened.identity = pages_identity(self._identity, runner.cache)
        if adapters is not None:
            runner.before_forward = adapters.use
            opened.check_adapter = adapters.check
            opened.close = adapters.close
        opened.eyes = open_eyes(
            settings.model_path,
            runner.model.config,
            self._tokenizer,
            self._config.parameters,
            trust_remote_code=settings.trust_remote_code,
        )
        if opened.eyes is not None:
            opened.look = Looker(runner, adapters).look
        return opened

    def _limits(self, runner: Runner, scheduler: Scheduler) -> Limits:
        context = context_of(runner.model, self._settings)
        if scheduler.capacity < context:
            log.warning(
                "model '%s': the KV cache has room for %d tokens, so requests have at most that many and not %d; "
                "parameter kv_cache_bytes gives it more",
                self._config.name,
                scheduler.capacity,
                context,
            )
        longest = min(context, scheduler.capacity)
        return Limits(longest, self._settings.default_max_tokens, self._settings.max_queue + scheduler.max_running)


def _check(config: ModelConfig) -> None:
    if not config.decoupled or config.max_batch_size:
        raise InvalidArgument(
            f"model '{config.name}' generates: its configuration needs 'model_transaction_policy {{ decoupled: true }}' and "
            "max_batch_size: 0, or neither of them said"
        )
    names = {spec.name for spec in config.outputs}
    if names != {TEXT_OUTPUT}:
        raise InvalidArgument(
            f"model '{config.name}' generates one output, '{TEXT_OUTPUT}': leave out what is said of outputs"
        )


def _device(name: str, placement: Placement) -> torch.device:
    if placement.kind != "gpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if placement.device >= count:
        raise FailedPrecondition(
            f"model '{name}' asks for GPU {placement.device}, and PyTorch {torch.__version__} sees {count} here: "
            "install a PyTorch built for CUDA, check the driver, or say KIND_CPU in instance_group"
        )
    return torch.device("cuda", placement.device)


def _describe(message: Any, name: str, kind: str, size: int) -> Any:
    message.name = name
    message.data_type = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name[kind].number
    message.dims.append(size)
    return message
