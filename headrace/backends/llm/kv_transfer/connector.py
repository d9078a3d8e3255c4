# SPDX-License-Identifier: Apache-2.0
"""The KV connector: saves the KV pages of prompts for decode servers, and loads those that prefill servers saved.

    KVConnector           one per server process with a role: the key, the page store and the page sender
    SharedKVConnector     creates it with the first model and closes it with the last
    ModelKVConnector      what the instances of one model version use: `save` and `load`
    InstanceKVConnector   saves and loads for the requests of one instance, in threads

Whatever goes wrong with a transfer, the decode server computes the prompt itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.backends.llm.engine_core import EngineCore
from headrace.backends.llm.kv_transfer.page_layout import ReceivedPages, bytes_per_page, iter_chunks, pack_pages
from headrace.backends.llm.kv_transfer.page_store import PageStore, StoreFull
from headrace.backends.llm.kv_transfer.receiver import TransferError, discard_pages, fetch_pages
from headrace.backends.llm.kv_transfer.sender import PageSender
from headrace.backends.llm.model_runner.kv_cache import KVCache
from headrace.backends.llm.page_pool import extend_page_hashes
from headrace.backends.llm.request_state import Reply, RequestState, text_tensor
from headrace.backends.llm.scheduler import Sequence
from headrace.core.errors import INTERNAL_TEXT, Internal, Unavailable
from headrace.core.fleet_key import machine_key, user_folder
from headrace.core.kv_transfer import InvalidTransferToken, KvTransferSettings, TransferToken
from headrace.core.telemetry.metrics import Registry

log = logging.getLogger("headrace.backends.llm")

_SAVE_THREADS = 2
_LOAD_THREADS = 8
"""Each may wait for a network."""
_LABELS = ("model", "version", "side")
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PREFILL, DECODE = "prefill", "decode"


class InstanceKVConnector:
    """Saves and loads KV pages for the requests of one instance.

    Pages that the instance's own prefix cache has are not loaded.
    """

    def __init__(
        self,
        name: str,
        connector: ModelKVConnector,
        engine: EngineCore,
        publish: Callable[[list[Reply]], None],
    ) -> None:
        self._name = name
        self._connector = connector
        self._engine = engine
        self._publish = publish
        self._save_threads = ThreadPoolExecutor(_SAVE_THREADS, thread_name_prefix=f"llm {name} kv save")
        self._load_threads = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix=f"llm {name} kv load")

    def load_then_add(self, request: RequestState) -> None:
        """Load the pages that the request's transfer token names, then pass it to the engine. From any thread."""
        try:
            self._load_threads.submit(self._load_then_add, request)
        except RuntimeError:  # closed
            error = Unavailable(f"model instance '{self._name}' is being unloaded")
            self._publish([(request.work, error, True, {})])

    def save(self, request: RequestState, sequence: Sequence) -> None:
        """Save the pages of a computed prompt, and reply with a transfer token. In the engine's thread.

        The pages are copied here; a thread writes them to the store and replies.
        """
        cache = self._engine.runner.cache
        count = (sequence.prompt_length - 1) // cache.page_size
        if not count:
            self._connector.record_short_prompt()
            self._publish([_prefill_reply(request, "", sequence.prompt_length)])
            return
        page_hashes = extend_page_hashes(
            sequence.page_hashes, sequence.tokens, cache.page_size, sequence.cache_salt, count
        )
        with torch.inference_mode():
            block = pack_pages(cache, sequence.pages[:count])
        ready: torch.cuda.Event | None = None
        if block.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._save_threads.submit(self._save, request, page_hashes[count - 1], block, ready, sequence.prompt_length)

    def stop_loading(self) -> None:
        """Finish the loads in progress and refuse new ones. Call before the engine is closed."""
        self._load_threads.shutdown()

    def close(self) -> None:
        """Finish the saves in progress. Call after the engine is closed."""
        self._save_threads.shutdown()

    def _save(
        self,
        request: RequestState,
        page_hash: bytes,
        block: torch.Tensor,
        ready: torch.cuda.Event | None,
        prompt_tokens: int,
    ) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            token = ""
            if not request.work.cancelled:
                engine = self._engine
                token = self._connector.save(engine.kv_fingerprint, page_hash, block, engine.runner.page_size)
        except Exception:
            log.exception("The KV pages of a prompt of model instance '%s' could not be saved.", self._name)
            self._publish([(request.work, Internal(INTERNAL_TEXT), True, {})])
        else:
            self._publish([_prefill_reply(request, token, prompt_tokens)])

    def _load_then_add(self, request: RequestState) -> None:
        try:
            if not request.work.cancelled:
                self._load(request)
        except Exception:
            log.exception("KV pages for model instance '%s' could not be loaded.", self._name)
        self._engine.add(request)

    def _load(self, request: RequestState) -> None:
        engine, cache, pool = self._engine, self._engine.runner.cache, self._engine.scheduler.pool
        size, tokens = cache.page_size, request.parsed.tokens
        page_hashes = list(extend_page_hashes([], tokens, size, request.cache_salt, (len(tokens) - 1) // size))
        # The engine's thread may change the prefix cache meanwhile: then fewer of the loaded pages are used, or none.
        cached = next(
            (index for index, page_hash in enumerate(page_hashes) if pool.find(page_hash) is None), len(page_hashes)
        )
        token = request.parsed.generation.transfer_token
        loaded = self._connector.load(token, engine.kv_fingerprint, page_hashes, cache, cached)
        if loaded is not None:
            request.received_pages = ReceivedPages(cache, *loaded)


def _prefill_reply(request: RequestState, token: str, prompt_tokens: int) -> Reply:
    return request.work, (text_tensor(""),), True, {"ticket": token, "prompt_tokens": prompt_tokens}


class ModelKVConnector:
    """Saves and loads KV pages for one model version. Both methods block: call them from a thread."""

    def __init__(self, connector: KVConnector, model: str, version: str) -> None:
        self._connector = connector
        self._prefill_metrics = connector.metrics.for_role(model, version, PREFILL)
        self._decode_metrics = connector.metrics.for_role(model, version, DECODE)

    def save(self, fingerprint: str, page_hash: bytes, block: torch.Tensor, page_size: int) -> str:
        """Store the pages of a prompt; return their transfer token, or "" if they cannot be stored."""
        connector, began = self._connector, time.monotonic()
        if connector.store is None or connector.sender is None:
            return ""
        try:
            stored = connector.store.put(iter_chunks(block), block.numel(), len(block), connector.clock())
        except StoreFull as error:
            log.info("The KV pages of a prompt are not stored: %s", error)
            self._prefill_metrics.record_fallback("no_room")
            return ""
        token = TransferToken(
            stored.id,
            fingerprint,
            page_hash.hex(),
            len(block),
            block.shape[1],
            connector.store.token_path(stored.id),
            connector.settings.host,
            connector.sender.port,
            stored.expires,
        )
        self._prefill_metrics.record_transfer("kept", stored.bytes, stored.pages * page_size, time.monotonic() - began)
        return token.signed(connector.key)

    def load(
        self, signed_token: str, fingerprint: str, page_hashes: list[bytes], cache: KVCache, cached: int
    ) -> tuple[int, torch.Tensor] | None:
        """Fetch the pages of a prompt with these hashes, of which the first `cached` are here.

        Returns the index of the first fetched page and the bytes; None if the rest of the prompt must be computed here.
        """
        connector, began, page_bytes = self._connector, time.monotonic(), bytes_per_page(cache)
        try:
            token = TransferToken.parse(signed_token, connector.key, connector.clock())
            if token.model != fingerprint or token.page_bytes != page_bytes:
                raise TransferError("other_model", "they belong to other weights or another page layout")
            if not page_hashes or token.pages != len(page_hashes) or token.digest != page_hashes[-1].hex():
                raise TransferError("other_prompt", "they belong to another prompt")
            if cached >= token.pages:
                discard_pages(token, connector.folder)
                self._decode_metrics.record_transfer("not_needed", 0, 0, time.monotonic() - began)
                return None
            # From pinned memory the engine's thread can copy to the GPU without waiting.
            pinned = cache.device.type == "cuda"
            block = torch.empty(token.pages - cached, page_bytes, dtype=torch.uint8, pin_memory=pinned)
            transport = fetch_pages(
                token,
                cached,
                memoryview(block.numpy()).cast("B"),
                connector.folder,
                connector.key,
                connector.settings.take_seconds,
            )
        except InvalidTransferToken as error:
            self._load_failed("bad_ticket", error)
            return None
        except TransferError as error:
            self._load_failed(error.reason, error)
            return None
        self._decode_metrics.record_transfer(
            transport, block.numel(), len(block) * cache.page_size, time.monotonic() - began
        )
        return cached, block

    def record_short_prompt(self) -> None:
        """Count a prompt that does not fill one page."""
        self._prefill_metrics.record_fallback("short")

    def _load_failed(self, reason: str, error: Exception) -> None:
        log.info("Computing a prompt here, because its KV pages could not be loaded: %s", error)
        self._decode_metrics.record_fallback(reason)


class KVConnector:
    """The KV transfer parts of one server process."""

    def __init__(
        self, settings: KvTransferSettings, metrics: KVTransferMetrics, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.folder = user_folder()
        self.key = settings.key or machine_key(self.folder)
        self.metrics = metrics
        self.store: PageStore | None = None
        self.sender: PageSender | None = None
        if settings.role == "prefill":
            self.store = PageStore(self.folder, max_bytes=settings.keep_bytes, seconds=settings.keep_seconds)
            try:
                self.sender = PageSender(self.store, self.key, settings.host, settings.port, clock=clock)
            except BaseException:
                self.store.close()
                raise
            log.info("Serving KV pages at %s:%d.", settings.host, self.sender.port)

    def for_model(self, model: str, version: int) -> ModelKVConnector:
        """Return the connector of one model version."""
        return ModelKVConnector(self, model, str(version))

    def close(self) -> None:
        """Stop serving and remove all stored pages."""
        if self.sender is not None:
            self.sender.close()
        if self.store is not None:
            self.store.close()


class SharedKVConnector:
    """One `KVConnector` for all models of a server: created with the first, closed with the last. Thread-safe."""

    def __init__(self, settings: KvTransferSettings, registry: Registry) -> None:
        self._settings = settings
        self._metrics = KVTransferMetrics(registry)
        self._lock = threading.Lock()
        self._users = 0
        self._connector: KVConnector | None = None

    def acquire(self) -> KVConnector:
        """Return the connector for one more model. Raises FailedPrecondition if it cannot be created."""
        with self._lock:
            if self._connector is None:
                self._connector = KVConnector(self._settings, self._metrics)
            self._users += 1
            return self._connector

    def release(self) -> None:
        """Close the connector if this was the last model."""
        with self._lock:
            self._users -= 1
            if not self._users and self._connector is not None:
                self._connector.close()
                self._connector = None


class KVTransferMetrics:
    """The metric families of KV transfer. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self.transfers = registry.counter(
            "headrace_llm_handings_total",
            "Prompts whose KV pages were transferred: saved by a prefill server or loaded by a decode server.",
            (*_LABELS, "way"),
        )
        self.bytes = registry.counter("headrace_llm_handing_bytes_total", "Bytes of transferred KV pages.", _LABELS)
        self.tokens = registry.counter("headrace_llm_handing_tokens_total", "Tokens of transferred KV pages.", _LABELS)
        self.seconds = registry.histogram(
            "headrace_llm_handing_seconds",
            "Time to save or load the KV pages of a prompt.",
            _LABELS,
            buckets=_SECONDS,
        )
        self.fallbacks = registry.counter(
            "headrace_llm_handing_fallbacks_total",
            "Prompts whose KV pages were not saved (prefill), or were computed despite a transfer token (decode).",
            (*_LABELS, "reason"),
        )

    def for_role(self, model: str, version: str, role: str) -> RoleMetrics:
        """Return the series of a model version in one role."""
        return RoleMetrics(self, {"model": model, "version": version, "side": role})


class RoleMetrics:
    """The series of one model version in one role."""

    def __init__(self, families: KVTransferMetrics, labels: dict[str, str]) -> None:
        self._families = families
        self._labels = labels

    def record_transfer(self, way: str, bytes: int, tokens: int, seconds: float) -> None:
        """Count a prompt whose pages were saved or loaded."""
        families, labels = self._families, self._labels
        families.transfers.labels(**labels, way=way).add()
        families.bytes.labels(**labels).add(bytes)
        families.tokens.labels(**labels).add(tokens)
        families.seconds.labels(**labels).observe(seconds)

    def record_fallback(self, reason: str) -> None:
        """Count a prompt whose pages were not saved or not loaded."""
        self._families.fallbacks.labels(**self._labels, reason=reason).add()
