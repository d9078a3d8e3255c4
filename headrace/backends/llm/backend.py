# SPDX-License-Identifier: Apache-2.0
"""The backend `llm`: Hugging Face folders of generating, embedding, ranking and speech models, run by PyTorch.

The server's engine calls it through `backends.contract`. A folder of an embedding model goes to `embedding`, one of a
cross-encoder to `cross_encoder`, one of Whisper to `speech`; all others are loaded as causal models here: tokenizer and
weights in the loader's thread, the rest in the thread of the engine core.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch

from headrace.backends.contract import EngineServices, Model, ModelFiles, Placement, SleepLevel
from headrace.backends.cuda_memory import PinnedMemory, StableMemory, open_driver
from headrace.backends.llm.adapter_fit import AdapterReader
from headrace.backends.llm.adapter_slots import AdapterSlots
from headrace.backends.llm.adapter_store import AdapterStore
from headrace.backends.llm.cross_encoder import CrossEncoderModel
from headrace.backends.llm.cross_encoder import complete_config as complete_ranking
from headrace.backends.llm.embedding.config import model_task
from headrace.backends.llm.embedding.model import EmbeddingModel
from headrace.backends.llm.embedding.model import complete_config as complete_embedding
from headrace.backends.llm.engine_core import EngineComponents, Recovery, RequestLimits, make_scheduler
from headrace.backends.llm.instance import LlmInstance
from headrace.backends.llm.kv_events import KVEventPublisher
from headrace.backends.llm.kv_offload.opening import open_offload
from headrace.backends.llm.kv_transfer.connector import SharedKVConnector
from headrace.backends.llm.kv_transfer.page_layout import pages_fingerprint, weights_fingerprint
from headrace.backends.llm.lora import LoraAdapters, load_adapters, open_slots
from headrace.backends.llm.metrics import AdapterMetrics, LlmMetrics
from headrace.backends.llm.model_runner.fused_projections import fuse_projections
from headrace.backends.llm.model_runner.model_loader import (
    check_folder,
    context_length,
    fuses_projections,
    load_model,
    open_runner,
)
from headrace.backends.llm.model_runner.runner import ModelRunner
from headrace.backends.llm.model_runner.spare_runners import RunnerShelf, SpareRunner, SpareRunners, shape_key
from headrace.backends.llm.model_runner.weight_reader import read_weights
from headrace.backends.llm.quantization.checkpoint import weight_scheme
from headrace.backends.llm.sampling.sampler import Sampler
from headrace.backends.llm.sampling.structured_output import ConstraintCompiler
from headrace.backends.llm.scheduler import Scheduler
from headrace.backends.llm.settings import WEIGHT_SCHEME, EngineSizes, LlmSettings, model_folder, read_settings
from headrace.backends.llm.speculation.draft_loader import LoadedDraft, check_draft_model, load_draft
from headrace.backends.llm.speculation.draft_model import DraftModel
from headrace.backends.llm.speculation.ngram import NgramDrafter
from headrace.backends.llm.speech.model import SpeechModel
from headrace.backends.llm.speech.model import complete_config as complete_speech
from headrace.backends.llm.tokenizer import Tokenizer, template_text
from headrace.backends.llm.vision.image_encoder import ImageEncoder
from headrace.backends.llm.vision.processors import has_vision, open_processor
from headrace.backends.sleeping_weights import FileStamps, add_bytes, free_unused, place_of
from headrace.backends.torch_import import device_of, gpu_count
from headrace.core.clock import SystemClock
from headrace.core.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unimplemented
from headrace.core.generation import TEXT_INPUT, TEXT_OUTPUT
from headrace.core.kept_memory import KeptMemory
from headrace.core.output_formats import REASONING_FORMAT, TOOL_FORMAT, formats_of_template
from headrace.core.telemetry.metrics import Registry
from headrace.models.adapters import AdapterPlaces, ModelAdapters
from headrace.models.config.types import ModelConfig

if TYPE_CHECKING:
    from headrace.backends.llm.tensor_parallel.group import RankGroup
    from headrace.backends.llm.tensor_parallel.node_pool import NodePool

log = logging.getLogger("headrace.backends.llm")

_INPUTS = ((TEXT_INPUT, "TYPE_STRING"), ("stream", "TYPE_BOOL"), ("sampling_parameters", "TYPE_STRING"))
"""Input tensors of v2 requests; all optional, because other protocols send none."""

_IDLE_PINNED_BYTES = 8 << 30
"""Pinned host memory of models that have slept, kept for the next ones."""
_ROW_COST_CPU, _ROW_COST_GPU = 0.05, 0.02
"""What a further row costs in a step of few rows, in steps of one row."""
_COMPLETE = {"embed": complete_embedding, "rank": complete_ranking, "transcribe": complete_speech}
_MODELS: dict[str, type[EmbeddingModel | CrossEncoderModel | SpeechModel]] = {
    "embed": EmbeddingModel,
    "rank": CrossEncoderModel,
    "transcribe": SpeechModel,
}
"""By the task of a folder. All others generate."""


class LlmBackend:
    """Implements `contract.Backend`."""

    def __init__(self) -> None:
        self._metrics: WeakKeyDictionary[Registry, LlmMetrics] = WeakKeyDictionary()
        self._connectors: WeakKeyDictionary[Registry, SharedKVConnector] = WeakKeyDictionary()
        self._memories: dict[torch.device, StableMemory | None] = {}
        self._spares: WeakKeyDictionary[KeptMemory, SpareRunners] = WeakKeyDictionary()
        self._lock = threading.Lock()
        """Models load in several threads at the same time."""

    def stable_memory(self, device: torch.device) -> StableMemory | None:
        """Return the memory of a device whose addresses stay while models sleep; None where there is none."""
        with self._lock:
            if device not in self._memories:
                driver = open_driver(device)
                pinned = PinnedMemory(_IDLE_PINNED_BYTES, pin=device.type == "cuda")
                self._memories[device] = None if driver is None else StableMemory(driver, pinned)
            return self._memories[device]

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Add the tensors of a generating or an embedding model to its configuration."""
        folder = model_folder(config, files)
        task = model_task(folder, config.parameters.get("task", ""))
        if task in _COMPLETE:
            return _COMPLETE[task](config, folder)
        if config.proto is None:
            return None
        message = type(config.proto)()
        if not config.inputs:
            for name, kind in _INPUTS:
                _set_tensor(message.input.add(), name, kind, 1).optional = True
        if not config.outputs:
            _set_tensor(message.output.add(), TEXT_OUTPUT, "TYPE_STRING", -1)
        message.model_transaction_policy.decoupled = True
        if config.parameters.get("tensor_parallel", "1") != "1" and not config.instance_groups:
            group = message.instance_group.add()
            group.kind = group.KIND_MODEL  # one instance, on all GPUs
        named = zip((TOOL_FORMAT, REASONING_FORMAT), formats_of_template(template_text(folder)), strict=True)
        for parameter, name in named:
            if name and parameter not in config.parameters:
                message.parameters[parameter].string_value = name
        scheme = weight_scheme(folder, config.parameters.get("quantization", ""))
        if scheme:
            message.parameters[WEIGHT_SCHEME].string_value = scheme
        return message

    def usable_gpus(self, present: int) -> int:
        """Return how many GPUs PyTorch sees."""
        return min(present, gpu_count())

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> Model:
        """Read the settings and the tokenizer. `LlmModel.open` loads the weights."""
        folder = model_folder(config, files)
        task = model_task(folder, config.parameters.get("task", ""))
        if task in _MODELS:
            return _MODELS[task].load(config, folder)
        _check_config(config)
        settings = read_settings(config, files)
        with self._lock:
            metrics = self._metrics.get(services.metrics)
            if metrics is None:
                metrics = self._metrics[services.metrics] = LlmMetrics(services.metrics)
            connector = self._connectors.get(services.metrics)
            spares = None
            if services.kept_memory is not None:
                spares = self._spares.setdefault(services.kept_memory, SpareRunners())
            if connector is None and services.kv_transfer.role:
                connector = SharedKVConnector(services.kv_transfer, services.metrics)
                self._connectors[services.metrics] = connector
        # Also for a model without adapters on demand: it may have had some before.
        places = AdapterPlaces(settings.adapters_folder, settings.adapters_hub) if settings.max_adapters else None
        adapters = services.adapters.open(config.name, places)
        return LlmModel(
            config,
            files.version,
            settings,
            services,
            metrics,
            connector,
            files.model_folder,
            adapters,
            stable_memory=self.stable_memory,
            spares=spares,
        )


class LlmModel:
    """Implements `contract.Model` for a generating model."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        settings: LlmSettings,
        services: EngineServices,
        metrics: LlmMetrics,
        connector: SharedKVConnector | None = None,
        model_folder: Path | None = None,
        adapters: ModelAdapters | None = None,
        *,
        stable_memory: Callable[[torch.device], StableMemory | None] = lambda _device: None,
        spares: SpareRunners | None = None,
    ) -> None:
        self._name = config.name
        self._stable_memory = stable_memory
        self._spares = spares
        self._model_folder = model_folder
        self._config = config
        self._version = version
        self._log_name = f"model '{config.name}' version {version}"
        self._settings = settings
        self._services = services
        self._metrics = metrics
        if not settings.model_path.is_dir():
            raise FailedPrecondition(
                f"parameter model_path of model '{config.name}' is not a folder: put the model there, or name another"
            )
        self._folder = check_folder(settings)
        if settings.tensor_parallel > 1:
            self._check_parallel()
        if settings.kv_host_bytes and services.kv_transfer.role:
            raise Unimplemented(
                f"model '{config.name}' has parameter kv_host_bytes, which does not work with --role yet: leave out one of "
                "them"
            )
        self._tokenizer = Tokenizer.load(
            settings.model_path, trust_remote_code=settings.trust_remote_code, chat_template=settings.chat_template
        )
        self._draft_folder = check_draft_model(settings, self._tokenizer)
        self._instances: list[tuple[LlmInstance, torch.device]] = []
        self._files = FileStamps(
            file
            for folder in (settings.model_path, settings.draft_model)
            if folder is not None
            for file in (folder / "config.json", *sorted(folder.glob("*.safetensors")))
        )
        self._shared_connector = connector
        self._connector = connector.acquire().for_model(config.name, version) if connector is not None else None
        self._adapters = adapters
        self._adapter_store: AdapterStore | None = None
        if adapters is not None:
            self._adapter_metrics = metrics.for_adapters(config.name, version)
            capacity = settings.max_host_adapters
            self._adapter_store = AdapterStore(adapters, capacity, self._adapter_metrics, SystemClock())

    def open(self, placement: Placement) -> LlmInstance:
        """Load the weights and start an instance."""
        if self._settings.tensor_parallel == 1:
            return self._open(placement, device_of(self._name, placement), None)
        from headrace.backends.llm.tensor_parallel.group import RankGroup, rank_devices

        nodes = self._services.nodes
        devices = rank_devices(self._settings, placement, nodes.count if nodes is not None else 1)
        if nodes is None:
            group = RankGroup(self._name, self._folder, self._settings, devices)
        else:
            group = self._group_over(cast("NodePool", nodes), devices)
        try:
            return self._open(placement, devices[0], group)
        except BaseException:
            group.close()
            raise

    def _group_over(self, nodes: NodePool, devices: Sequence[torch.device]) -> RankGroup:
        """Return the group of ranks on all nodes."""
        from headrace.backends.llm.tensor_parallel.group import RankGroup
        from headrace.backends.llm.tensor_parallel.node_pool import NodeRanks
        from headrace.backends.llm.tensor_parallel.rank import rank_threads
        from headrace.backends.llm.tensor_parallel.rank_processes import LocalRanks

        here, on_cpu = len(devices) // nodes.count, devices[0].type == "cpu"
        threads = rank_threads(self._settings, here) if on_cpu else 0
        local = LocalRanks(f"headrace rank of {self._name}", threads)
        request = {"model": self._name, "ranks": here, "on_cpu": on_cpu}
        source = NodeRanks(nodes, local, request, here, self._settings.rank_timeout_seconds)
        return RankGroup(
            self._name,
            self._folder,
            self._settings,
            devices,
            source=source,
            model_folder=self._model_folder,
            local_ranks=here,
        )

    def _open(self, placement: Placement, device: torch.device, group: RankGroup | None) -> LlmInstance:
        settings = self._settings
        memory = self._stable_memory(device) if self._keeps_addresses else None
        shelf = self._shelf(device, memory)
        spare = shelf.take() if shelf is not None else None
        if spare is not None and not self._refill(spare):
            spare = None
        if spare is not None:
            model = spare.runner.model
        else:
            model = group.load() if group is not None else load_model(self._folder, settings, device, self._log_name)
        draft = LoadedDraft(self._draft_folder, device, self._log_name) if self._draft_folder is not None else None
        vocabulary = model.config.get_text_config().vocab_size
        metrics = self._metrics.for_version(self._name, self._version)
        metrics.multimodal.set(has_vision(model.config))
        if self._adapter_store is not None:
            store = self._adapter_store
            store.read = AdapterReader(model, settings.max_lora_rank, lambda: store.is_closing)
        instance = LlmInstance(
            placement.name,
            self._tokenizer,
            ConstraintCompiler(self._tokenizer, vocabulary),
            metrics,
            self._services.loop,
            _EngineFactory(
                model,
                self._settings,
                device,
                self._tokenizer,
                self._config,
                self._log_name,
                kv_transfer=self._connector is not None,
                draft=draft,
                group=group,
                adapter_metrics=self._adapter_metrics if self._adapter_store is not None else None,
                memory=memory,
                spare=spare,
                shelf=shelf,
            ),
            self._connector,
            self._adapter_store,
            settings.adapters,
        )
        instance.start()
        if self._adapters is not None:
            self._adapters.loader = self._adapter_store
        self._instances.append((instance, device))
        return instance

    def _shelf(self, device: torch.device, memory: StableMemory | None) -> RunnerShelf | None:
        """Return where runners of models of this shape are kept; None if they are not."""
        kept = self._services.kept_memory
        if memory is None or self._spares is None or kept is None:
            return None
        key = shape_key(self._folder, self._settings, device)
        return None if key is None else RunnerShelf(self._spares, kept, key, self._settings.model_path, memory)

    def _refill(self, spare: SpareRunner) -> bool:
        """Read the weights into the runner of an unloaded model. False if there is no memory for them and its KV cache."""
        try:
            spare.read(self._settings.model_path)
        except torch.OutOfMemoryError:
            spare.close()
            return False
        except BaseException:
            spare.close()
            raise
        log.info("%s uses the compiled layers and CUDA graphs of an unloaded model of its shape.", self._log_name)
        return True

    @property
    def _keeps_addresses(self) -> bool:
        """Whether weights and KV cache keep their addresses while the model sleeps, if the device can do that.

        Not for models that cannot sleep, nor for those with adapters, which may be compared with the weights meanwhile, nor
        for those with a draft model: on an H200 the process was aborted when its graphs were freed.
        """
        settings = self._settings
        if settings.draft_model is not None or settings.takes_adapters:
            return False
        return settings.tensor_parallel == 1 and self._connector is None

    def sleep(self, level: SleepLevel) -> Mapping[str, int]:
        """Release the KV cache, and move the weights to host memory (level 1; those of a CPU are there) or drop them."""
        for reason, cannot in (
            ("its weights are in several processes (parameter tensor_parallel)", self._settings.tensor_parallel > 1),
            ("other servers read its KV cache (--role)", self._connector is not None),
        ):
            if cannot:
                raise FailedPrecondition(f"model '{self._name}' cannot sleep: {reason}; unload the model instead")
        freed: dict[str, int] = {}
        for instance, _ in self._instances:
            add_bytes(freed, instance.engine.run_idle(lambda components: components.sleep(level)))
        free_unused()
        return freed

    def wake(self) -> None:
        """Take the memory again; read the weights again if they were dropped."""
        for instance, device in self._instances:
            try:
                self._wake(instance, device)
            except torch.OutOfMemoryError as error:
                raise ResourceExhausted(
                    f"model '{self._name}' cannot wake: {place_of(device)} has not enough free memory for its weights "
                    "and its KV cache; put another model to sleep, or unload one"
                ) from error

    def _wake(self, instance: LlmInstance, device: torch.device) -> None:
        engine, model, draft = instance.engine, None, None
        if engine.needs_weights:
            self._files.check(f"model '{self._name}'")
            direct, memory = engine.runner.direct_weights, self._stable_memory(device)
            if direct is not None and memory is not None and self._draft_folder is None:
                read = partial(read_weights, self._settings.model_path, direct, memory)
                engine.run_idle(partial(_refill, read))
                return
            model = load_model(self._folder, self._settings, device, self._log_name)
            if fuses_projections(device, self._settings):
                fuse_projections(model)
            if self._draft_folder is not None:
                draft = load_draft(self._draft_folder, device, self._log_name)
        engine.run_idle(partial(_wake, model, draft))

    def _check_parallel(self) -> None:
        from headrace.backends.llm.tensor_parallel.loading import check_shardable

        if self._services.kv_transfer.role:
            raise Unimplemented(
                f"model '{self._name}' has tensor_parallel, and its KV pages are in several processes: start the server "
                "without --role, or leave the parameter out"
            )
        if any(group.kind == "gpu" for group in self._config.instance_groups):
            raise InvalidArgument(
                f"model '{self._name}' has tensor_parallel, which takes the GPUs from 0 on: leave out instance_group, or "
                "say KIND_MODEL there (KIND_CPU for the CPU); CUDA_VISIBLE_DEVICES chooses other GPUs"
            )
        check_shardable(self._folder, self._settings)

    def close(self) -> None:
        """Release the KV connector, which all models share, and the adapters in host memory."""
        self._instances.clear()
        if self._adapter_store is not None and self._adapters is not None:
            if self._adapters.loader is self._adapter_store:  # otherwise the model was loaded again
                self._adapters.loader = None
            self._adapter_store.close()
        if self._shared_connector is not None:
            self._shared_connector.release()


def _wake(model: Any | None, draft: Any | None, components: EngineComponents) -> dict[str, int]:
    components.wake(model, draft)
    return {}


def _refill(read: Callable[[], None], components: EngineComponents) -> dict[str, int]:
    components.refill(read)
    return {}


class _EngineFactory:
    """Creates the components of an engine core, in its thread. Called once: the runner owns the model then."""

    def __init__(
        self,
        model: Any,
        settings: LlmSettings,
        device: torch.device,
        tokenizer: Tokenizer,
        config: ModelConfig,
        log_name: str,
        *,
        kv_transfer: bool,
        draft: LoadedDraft | None,
        group: RankGroup | None = None,
        adapter_metrics: AdapterMetrics | None = None,
        memory: StableMemory | None = None,
        spare: SpareRunner | None = None,
        shelf: RunnerShelf | None = None,
    ) -> None:
        self._model = model
        self._memory = memory
        self._spare = spare
        self._shelf = shelf
        self._adapter_metrics = adapter_metrics
        self._draft = draft
        self._group = group
        self._settings = settings
        self._device = device
        self._tokenizer = tokenizer
        self._config = config
        self._log_name = log_name
        self._fingerprint = (
            weights_fingerprint(model, settings.adapters) if kv_transfer or settings.kv_disk_path is not None else None
        )
        """Of the weights and adapters, where pages leave this process."""

    def __call__(self) -> EngineComponents:
        settings, device = self._settings, self._device
        model, self._model = self._model, None
        draft, self._draft = self._draft, None
        spare, self._spare = self._spare, None
        threads = settings.threads
        if self._group is not None:
            threads = self._group.threads
        if threads and device.type == "cpu":
            torch.set_num_threads(threads)  # for this thread: see the backend `pytorch`
        adapters: LoraAdapters | None = None
        if settings.max_adapters:
            adapters = open_slots(model, settings.adapters, settings.max_adapters, settings.max_lora_rank)
        elif settings.adapters:
            adapters = load_adapters(model, settings.adapters)
        runner: ModelRunner
        recovery: Recovery | None = None
        draft_page_bytes, draft_model = 0, None
        with ExitStack() as undo:
            if draft is not None:
                undo.callback(draft.close)
                draft_page_bytes = draft.page_bytes
            if self._group is not None:
                from headrace.backends.llm.tensor_parallel.runner import open_parallel_runner

                runner, sizes = open_parallel_runner(model, settings, self._group, device, self._log_name)
                recovery = runner
            elif spare is not None:
                runner, sizes = spare.runner, spare.sizes
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # for this thread, which launches all steps
            else:
                runner, sizes = open_runner(
                    model, settings, device, self._log_name, draft_page_bytes=draft_page_bytes, memory=self._memory
                )
            undo.callback(runner.close)
            if draft is not None:
                draft_model = draft.open(sizes, model, self._memory)
                undo.callback(draft_model.close)
            components = self._create(runner, sizes, adapters, draft_model, undo)
            components.recovery = recovery
            if self._shelf is not None:
                components.retire_runner = self._shelf.opened(runner, sizes, spare)
            undo.pop_all()
        return components

    def _create(
        self,
        runner: ModelRunner,
        sizes: EngineSizes,
        adapters: LoraAdapters | None,
        draft_model: DraftModel | None,
        undo: ExitStack,
    ) -> EngineComponents:
        settings, device = self._settings, self._device
        scheduler = make_scheduler(
            runner,
            max_running=sizes.max_running,
            max_step_tokens=sizes.max_step_tokens,
            prefix_cache=settings.prefix_cache,
        )
        scheduler.drafter, scheduler.max_draft_rows = draft_model or _ngram_drafter(settings, device), sizes.draft_rows
        components = EngineComponents(
            runner,
            scheduler,
            Sampler(
                runner.model.config.get_text_config().vocab_size,
                device,
                runner.dtype,
                separate_rows=settings.deterministic,
            ),
            self._limits(runner, scheduler),
        )
        if settings.kv_host_bytes:
            offload = open_offload(settings, runner.cache, scheduler, self._fingerprint, self._log_name)
            undo.callback(offload.close)
            components.offload = scheduler.loader = scheduler.pool.saver = offload
        if settings.kv_events:
            events = KVEventPublisher(settings.kv_events, settings.kv_events_replay, settings.kv_events_topic)
            components.kv_events = scheduler.events = scheduler.pool.events = events
        if self._fingerprint is not None:
            components.kv_fingerprint = pages_fingerprint(self._fingerprint, runner.cache)
        closing = ExitStack()
        components.close = closing.close
        if components.offload is not None:
            if components.kv_events is not None:
                components.offload.report_to(components.kv_events)
            closing.callback(components.offload.close)
        components.draft_model = draft_model
        if adapters is not None:
            runner.before_forward = adapters.select_rows
            components.check_adapter = adapters.check
            closing.callback(adapters.close)
            if self._adapter_metrics is not None:
                components.adapter_slots = AdapterSlots(adapters, self._adapter_metrics)
                closing.callback(components.adapter_slots.close)
        if draft_model is not None:
            closing.callback(draft_model.close)
        components.multimodal_processor = open_processor(
            settings.model_path,
            runner.model.config,
            self._tokenizer,
            self._config.parameters,
            trust_remote_code=settings.trust_remote_code,
        )
        if components.multimodal_processor is not None:
            components.encode_images = ImageEncoder(runner, adapters).encode
        return components

    def _limits(self, runner: ModelRunner, scheduler: Scheduler) -> RequestLimits:
        context = context_length(runner.model, self._settings)
        if scheduler.capacity < context:
            log.warning(
                "Model '%s': the KV cache holds %d tokens, so this is the longest request, not %d; set parameter "
                "kv_cache_bytes for a larger cache.",
                self._config.name,
                scheduler.capacity,
                context,
            )
        longest = min(context, scheduler.capacity)
        return RequestLimits(
            longest,
            self._settings.default_max_tokens,
            self._settings.max_queue + scheduler.max_running,
            uses_priority=self._settings.scheduling_policy == "priority",
        )


def _ngram_drafter(settings: LlmSettings, device: torch.device) -> NgramDrafter | None:
    if settings.speculation != "ngram":
        return None
    return NgramDrafter(
        settings.speculation_tokens,
        shortest=settings.prompt_lookup_min,
        longest=settings.prompt_lookup_max,
        token_cost=_ROW_COST_CPU if device.type == "cpu" else _ROW_COST_GPU,
    )


def _check_config(config: ModelConfig) -> None:
    if not config.decoupled or config.max_batch_size:
        raise InvalidArgument(
            f"model '{config.name}' generates: its configuration needs 'model_transaction_policy {{ decoupled: true }}' and "
            "max_batch_size: 0, or neither of them"
        )
    names = {spec.name for spec in config.outputs}
    if names != {TEXT_OUTPUT}:
        raise InvalidArgument(f"model '{config.name}' generates one output, '{TEXT_OUTPUT}': leave out its outputs")


def _set_tensor(message: Any, name: str, kind: str, size: int) -> Any:
    message.name = name
    message.data_type = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name[kind].number
    message.dims.append(size)
    return message
