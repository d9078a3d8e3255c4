# SPDX-License-Identifier: Apache-2.0
"""One instance of a generating model: takes requests from the server's engine and returns their replies.

Called in the event loop's thread. Slow work before a request can run (chat template, tokenizer, image processor, grammar)
is done in a thread pool; `engine_core` does the rest.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from time import monotonic_ns

from headrace.backends.contract import Work
from headrace.backends.llm.adapter_fit import LoadedAdapter
from headrace.backends.llm.adapter_store import AdapterStore
from headrace.backends.llm.engine_core import EngineComponents, EngineCore
from headrace.backends.llm.kv_transfer.connector import InstanceKVConnector, ModelKVConnector
from headrace.backends.llm.metrics import VersionMetrics
from headrace.backends.llm.request_state import Reply, RequestState, merge_replies, text_tensor
from headrace.backends.llm.requests import (
    ParsedRequest,
    parse_request,
    prompt_tokens,
    with_prompt,
    with_prompt_parameters,
)
from headrace.backends.llm.sampling.params import check_token_id
from headrace.backends.llm.sampling.structured_output import ConstraintCompiler
from headrace.backends.llm.tokenizer import Tokenizer
from headrace.core.errors import (
    INTERNAL_TEXT,
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    Unavailable,
)
from headrace.core.generation import Generation, GenerationRequest
from headrace.core.requests import NO_PARAMETERS, Parameters

log = logging.getLogger("headrace.backends.llm")

_PREPARE_THREADS = 2
_RETRY_SECONDS = 1.0


class LlmInstance:
    """Implements `contract.RequestInstance`."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        constraints: ConstraintCompiler,
        metrics: VersionMetrics,
        loop: asyncio.AbstractEventLoop,
        make_components: Callable[[], EngineComponents],
        connector: ModelKVConnector | None = None,
        adapters: AdapterStore | None = None,
        always_loaded: Iterable[str] = (),
    ) -> None:
        """`adapters`: of a model that loads adapters on demand, beside those that are `always_loaded`."""
        self._name = name
        self._tokenizer = tokenizer
        self._constraints = constraints
        self._loop = loop
        self._adapters = adapters
        self._always_loaded = frozenset(("", *always_loaded))
        self._open_requests = 0
        """Requests without their final reply."""
        self._undelivered: list[list[Reply]] = []
        """Replies that the event loop has not taken yet, step by step; guarded by the lock."""
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(_PREPARE_THREADS, thread_name_prefix=f"llm {name} prompts")
        self.engine = EngineCore(name, make_components, tokenizer, metrics, self._publish)
        self._connector = (
            InstanceKVConnector(name, connector, self.engine, self._publish) if connector is not None else None
        )

    def start(self) -> None:
        """Start the engine core and wait until it is ready. From a loader thread."""
        try:
            self.engine.start()
        except BaseException:
            self._threads.shutdown()
            raise

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        """Start requests; refuse those beyond the limit."""
        now = monotonic_ns()
        for work in batch:
            if self._open_requests >= self.engine.limits.max_open:
                work.reply(
                    Unavailable(
                        f"model instance '{self._name}' has {self._open_requests} requests already: retry later",
                        retry_after_seconds=_RETRY_SECONDS,
                    )
                )
                continue
            self._open_requests += 1
            try:
                self._threads.submit(self._prepare, work, now)
            except RuntimeError:  # closed
                self._deliver([(work, Unavailable(f"model instance '{self._name}' is being unloaded"), True, {})])
        # Not called directly: the server's engine may pass more work, and would recurse.
        self._loop.call_soon(finished)

    def close(self) -> None:
        """Fail open requests and free the model."""
        self._threads.shutdown(cancel_futures=False)
        if self._adapters is not None:
            self._adapters.detach(self, Unavailable(f"model instance '{self._name}' is being unloaded"))
        if self._connector is not None:
            self._connector.stop_loading()
        self.engine.close()
        if self._connector is not None:
            self._connector.close()

    def _prepare(self, work: Work, arrived_ns: int) -> None:
        """Parse a request and compile its grammar. In a thread of the pool."""
        if work.cancelled:
            self._publish([(work, None, True, {})])
            return
        request = work.request
        if isinstance(request, GenerationRequest) and request.generation.task != "generate":
            self._reply_tokens(work, request.generation)
            return
        try:
            limits = self.engine.limits
            parsed, multimodal_prompt = parse_request(work.request, self._tokenizer, limits), None
            if parsed.media:
                processor = self.engine.multimodal_processor
                if processor is None:
                    raise InvalidArgument("messages: the model accepts text only: leave out images and videos")
                multimodal_prompt = processor.prepare(parsed.generation, limits.max_model_len)
                parsed = with_prompt(parsed, multimodal_prompt.tokens, limits)
            parsed = with_prompt_parameters(self._with_priority(work, parsed), self._tokenizer)
            constraint = None if parsed.format is None else self._constraints.compile(parsed.format)
        except HeadraceError as error:
            self._publish([(work, error.with_traceback(None), True, {})])
        except Exception:
            log.exception("A request to model instance '%s' could not be read.", self._name)
            self._publish([(work, Internal(INTERNAL_TEXT), True, {})])
        else:
            request_state = RequestState(work, parsed, constraint, arrived_ns, multimodal_prompt)
            if self._adapters is not None and parsed.adapter not in self._always_loaded:
                self._adapters.get(parsed.adapter, self, partial(self._start_with_adapter, request_state))
            else:
                self._start(request_state)

    def _with_priority(self, work: Work, parsed: ParsedRequest) -> ParsedRequest:
        """Refuse a priority that the model does not use; in v2 requests it is ignored, as in Triton."""
        sampling = parsed.sampling
        if not sampling.priority or self.engine.limits.uses_priority:
            return parsed
        if not isinstance(work.request, GenerationRequest):
            return replace(parsed, sampling=replace(sampling, priority=0))
        raise InvalidArgument(
            "priority is not used by this model: leave it out, or set the model's parameter scheduling_policy to 'priority'"
        )

    def _reply_tokens(self, work: Work, generation: Generation) -> None:
        """Answer a request that only tokenizes or detokenizes. In a thread of the pool."""
        tokenizer, limits = self._tokenizer, self.engine.limits
        try:
            if generation.media:
                raise InvalidArgument("messages: images and videos cannot be tokenized: leave them out")
            tokens = prompt_tokens(generation, tokenizer, limits)
            text = ""
            parameters: Parameters = NO_PARAMETERS
            if generation.task == "detokenize":
                for token in tokens:
                    check_token_id("prompt", token, tokenizer.vocabulary)
                text = tokenizer.decode(tokens, skip_special=False)
            else:
                texts = [tokenizer.token_text(token) for token in tokens]
                parameters = {
                    "tokens": json.dumps(tokens),
                    "token_texts": json.dumps(texts),
                    "max_model_len": limits.max_model_len,
                }
            self._publish([(work, [text_tensor(text)], True, parameters)])
        except HeadraceError as error:
            self._publish([(work, error.with_traceback(None), True, {})])
        except Exception:
            log.exception("A request to model instance '%s' could not be tokenized.", self._name)
            self._publish([(work, Internal(INTERNAL_TEXT), True, {})])

    def _start_with_adapter(self, request: RequestState, adapter: LoadedAdapter | HeadraceError) -> None:
        """Start a request whose adapter is in host memory, or could not be loaded. From any thread."""
        if isinstance(adapter, HeadraceError):
            self._publish([(request.work, adapter, True, {})])
        elif request.work.cancelled:
            self._publish([(request.work, None, True, {})])
        else:
            request.adapter = adapter
            self._start(request)

    def _start(self, request: RequestState) -> None:
        generation, connector = request.parsed.generation, self._connector
        if generation.prefill_only:
            if connector is None:
                error = FailedPrecondition("this server does not save KV pages: start it with --role prefill")
                self._publish([(request.work, error, True, {})])
                return
            request.on_prefilled = connector.save
            self.engine.add(request)
        elif generation.transfer_token and connector is not None and request.prompt_logprobs is None:
            connector.load_then_add(request)
        else:
            self.engine.add(request)

    def _publish(self, replies: list[Reply]) -> None:
        """Pass replies to the event loop. From any thread."""
        with self._lock:
            self._undelivered.append(replies)
            if len(self._undelivered) > 1:
                return  # the loop has not come to those before
        try:
            self._loop.call_soon_threadsafe(self._deliver_all)
        except RuntimeError:  # the loop is closed: no client waits
            log.debug("Dropping replies of model instance '%s': the event loop is closed.", self._name)

    def _deliver_all(self) -> None:
        with self._lock:
            steps, self._undelivered = self._undelivered, []
        self._deliver(steps[0] if len(steps) == 1 else merge_replies(steps))

    def _deliver(self, replies: list[Reply]) -> None:
        for work, outputs, final, parameters in replies:
            if final:
                self._open_requests -= 1
            try:
                given = (text_tensor(outputs),) if isinstance(outputs, str) else outputs
                work.reply(given, final=final, parameters=parameters)
            except Exception:
                log.exception("A reply of model instance '%s' could not be delivered.", self._name)
