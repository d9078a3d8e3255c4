# SPDX-License-Identifier: Apache-2.0
"""The engine core: the thread that schedules steps, runs them and publishes new text. One per model instance.

Requests come from any thread by `add`; replies go to the event loop with one call per step. With async scheduling (see
`ModelRunner.async_scheduling`) a step is launched before the tokens of the previous one are read, unless a row's next token
depends on its last one (penalties, structured output): a sequence that turns out to have ended then has computed one token
too many, which is dropped. An error in a step ends the requests of that step,
not the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic, monotonic_ns
from typing import Any, Protocol

import torch

from headrace.backends.contract import SleepLevel
from headrace.backends.llm.adapter_slots import AdapterSlots
from headrace.backends.llm.kv_events import KVEventPublisher
from headrace.backends.llm.kv_offload.offload import KVOffload
from headrace.backends.llm.metrics import VersionMetrics
from headrace.backends.llm.model_runner.runner import ModelRunner, PromptInputs, RunnerLost, Step
from headrace.backends.llm.page_pool import PagePool
from headrace.backends.llm.request_state import Choice, Reply, RequestState, merge_replies
from headrace.backends.llm.sampling.sampler import Sampler, TokenLogprobs
from headrace.backends.llm.sampling.state import SamplingState
from headrace.backends.llm.scheduler import Chunk, Scheduler, Sequence
from headrace.backends.llm.speculation.draft_model import DraftModel
from headrace.backends.llm.tokenizer import Tokenizer
from headrace.backends.llm.vision.inputs import MultimodalProcessor, MultimodalPrompt
from headrace.backends.restart_backoff import Backoff
from headrace.backends.sleeping_weights import HOST, add_bytes
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, Internal, NotFound, Unavailable

log = logging.getLogger("headrace.backends.llm")

_STOP_SECONDS = 60.0
_RESTORE_DELAYS = (0.5, 1.0)
_LONGEST_RESTORE_DELAY = 30.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits on requests to one instance."""

    max_model_len: int
    default_max_tokens: int | None
    max_open: int
    """Requests that run or wait."""
    uses_priority: bool = False
    """Whether requests are scheduled by priority."""


class Recovery(Protocol):
    """A runner that can lose other processes that it needs, and start them again."""

    def watch(self, on_lost: Callable[[RunnerLost], None]) -> None:
        """Call `on_lost`, from any thread, when they are lost."""

    @property
    def is_lost(self) -> bool:
        """Whether they are lost."""

    def restore(self) -> None:
        """Start them again. In the engine's thread; raises a `HeadraceError` if that fails."""

    def interrupt(self) -> None:
        """Make `restore` and steps that wait for them end soon. From any thread."""


@dataclass(slots=True)
class EngineComponents:
    """The parts that an engine core runs; created in its thread."""

    runner: ModelRunner
    scheduler: Scheduler
    sampler: Sampler
    limits: RequestLimits
    multimodal_processor: MultimodalProcessor | None = None
    """None for a text-only model."""
    encode_images: Callable[[MultimodalPrompt, str], PromptInputs] | None = None
    """With `multimodal_processor`: run the image encoder for a prompt and an adapter. In the engine's thread."""
    check_adapter: Callable[[str], None] | None = None
    """Raises for an unknown adapter; None for a model without adapters."""
    adapter_slots: AdapterSlots[RequestState] | None = None
    """For a model that loads adapters on demand."""
    kv_fingerprint: str = ""
    """What a server must have in common with this one to use its KV pages; "" without KV transfer."""
    kv_events: KVEventPublisher | None = None
    """Publishes what the prefix cache holds."""
    offload: KVOffload | None = None
    """Keeps pages that are evicted; None: they are computed again."""
    recovery: Recovery | None = None
    """None for a runner that needs no other processes."""
    draft_model: DraftModel | None = None
    """Drafts for the scheduler, if another model does that."""
    close: Callable[[], None] = lambda: None
    """Called last, in the engine's thread."""
    retire_runner: Callable[[], bool] = lambda: False
    """Called after `close`, unless the engine failed: True if the runner is kept for another model, else it is closed."""

    def sleep(self, level: SleepLevel) -> dict[str, int]:
        """Give back the memory of KV caches and weights; return the bytes by place. While no request runs.

        Evicted pages stay in host memory at level 1, and on disk at both levels: the weights will be the same.
        """
        if self.offload is not None:
            self.offload.drain()
        self.scheduler.pool.reset_prefix_cache()
        freed = self.runner.sleep(level)
        if self.offload is not None and level == 2:
            add_bytes(freed, {HOST: self.offload.release()})
        if self.draft_model is not None:
            self.draft_model.forget()
            try:
                add_bytes(freed, self.draft_model.runner.sleep(level))
            except Exception:
                self.runner.wake(None)
                raise
        return freed

    def refill(self, read: Callable[[], None]) -> None:
        """Take the memory again after level 2; `read` writes the weights into their place. Without a draft model."""
        self.runner.refill(read)
        if self.offload is not None:
            self.offload.restore()

    def wake(self, model: Any | None, draft: Any | None) -> None:
        """Take the memory again, with the weights of models that were loaded again if `ModelRunner.needs_weights`."""
        self.runner.wake(model)
        if self.draft_model is not None:
            self.draft_model.runner.wake(draft)
        if self.offload is not None:
            self.offload.restore()


@dataclass(eq=False, slots=True)
class _IdleWork:
    """Work for the engine's thread, to do when no request runs."""

    function: Callable[[EngineComponents], dict[str, int]]
    result: Future[dict[str, int]]


@dataclass(slots=True)
class _PendingStep:
    """A step that was launched and whose tokens were not read."""

    chunks: list[Chunk]
    step: Step
    rows: list[SamplingState]
    sampled: bool
    """Whether the device chooses the tokens; otherwise they are sampled when the step is read."""


class EngineCore:
    """Generates for one instance."""

    def __init__(
        self,
        name: str,
        make_components: Callable[[], EngineComponents],
        tokenizer: Tokenizer,
        metrics: VersionMetrics,
        publish: Callable[[list[Reply]], None],
    ) -> None:
        self._name = name
        self._make_components = make_components
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._publish = publish
        """Called with the replies of a step, in the engine's thread."""
        self._inbox: SimpleQueue[RequestState | RunnerLost | _IdleWork | None] = SimpleQueue()
        """New requests; None stops the thread."""
        self._idle_work: deque[_IdleWork] = deque()
        self._closing = threading.Event()
        self._requests: dict[RequestState, None] = {}
        self._pending_steps: deque[_PendingStep] = deque()
        self._replies: list[Reply] = []
        self._reported = (0, 0, 0)
        self._reported_drafts: tuple[int, int, list[int]] = (0, 0, [])
        self._components: EngineComponents
        # With the context of the load, whose stages are timed.
        self._thread = threading.Thread(target=copy_context().run, args=(self._main,), name=f"llm {name}", daemon=True)
        self._ready: Future[None] = Future()

    def start(self) -> None:
        """Start the thread and wait until it has created its components; raises the error if that failed."""
        self._thread.start()
        self._ready.result()

    def add(self, request: RequestState) -> None:
        """Queue a request. From any thread."""
        self._inbox.put(request)

    def run_idle(self, function: Callable[[EngineComponents], dict[str, int]]) -> dict[str, int]:
        """Call a function in the engine's thread when no request runs, and return its result. Not from that thread."""
        work = _IdleWork(function, Future())
        self._inbox.put(work)
        return work.result.result()

    def close(self) -> None:
        """Fail open requests, stop the thread and free everything. Not from the engine's thread."""
        self._closing.set()
        if self._components.recovery is not None:
            self._components.recovery.interrupt()
        self._inbox.put(None)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            log.error("The engine of model instance '%s' does not stop.", self._name)

    @property
    def limits(self) -> RequestLimits:
        """Limits on requests. After `start`."""
        return self._components.limits

    @property
    def multimodal_processor(self) -> MultimodalProcessor | None:
        """None for a text-only model. After `start`."""
        return self._components.multimodal_processor

    @property
    def kv_fingerprint(self) -> str:
        """See `EngineComponents.kv_fingerprint`. After `start`."""
        return self._components.kv_fingerprint

    @property
    def needs_weights(self) -> bool:
        """Whether the model sleeps and its weights were dropped."""
        components = self._components
        draft = components.draft_model
        return components.runner.needs_weights or (draft is not None and draft.runner.needs_weights)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for reading only."""
        return self._components.scheduler

    @property
    def runner(self) -> ModelRunner:
        """The model runner, for reading only."""
        return self._components.runner

    # In the engine's thread

    def _main(self) -> None:
        try:
            self._components = self._make_components()
        except BaseException as error:
            self._metrics.close()
            self._ready.set_exception(error)
            return
        if self._components.recovery is not None:
            self._components.recovery.watch(self._inbox.put)
        self._ready.set_result(None)
        failed = False
        try:
            while self._accept_new():
                self._run_step()
        except BaseException:
            failed = True
            log.exception("The engine of model instance '%s' failed.", self._name)
            self._fail_all(Internal(INTERNAL_TEXT))
            while (request := self._inbox.get()) is not None:
                if isinstance(request, RequestState):
                    request.finish(self._replies, Internal(INTERNAL_TEXT))
                    self._publish_replies()
                elif isinstance(request, _IdleWork):
                    request.result.set_exception(Internal(INTERNAL_TEXT))
        finally:
            self._fail_all(Unavailable(f"model instance '{self._name}' is being unloaded"))
            self._pending_steps.clear()
            # Both refer to the model, whose memory must be freed.
            self._components.encode_images = self._components.multimodal_processor = None
            self._components.close()
            if self._components.kv_events is not None:
                self._components.kv_events.close()
            if failed or not self._components.retire_runner():
                self._components.runner.close()
            self._metrics.close()

    def _accept_new(self) -> bool:
        """Admit new requests; wait for one if there is nothing else to do. False: the engine is to stop."""
        try:
            while self._idle_work and not self._requests and not self._pending_steps:
                self._do(self._idle_work.popleft())
            wait = not self._requests and not self._pending_steps and not self._offload_is_busy()
            while True:
                request = self._inbox.get() if wait else self._inbox.get_nowait()
                if request is None:
                    return False
                wait = False
                if isinstance(request, RunnerLost):
                    self._restore(request)
                elif isinstance(request, _IdleWork):
                    self._idle_work.append(request)
                    return True
                else:
                    self._admit(request)
        except Empty:
            return True

    def _offload_is_busy(self) -> bool:
        offload = self._components.offload
        return offload is not None and offload.busy

    def _do(self, work: _IdleWork) -> None:
        """Do work that had to wait for an idle engine."""
        try:
            work.result.set_result(work.function(self._components))
        except Exception as error:
            work.result.set_exception(error)
        if self._components.kv_events is not None:
            self._components.kv_events.flush()

    def _admit(self, request: RequestState) -> None:
        if request.work.cancelled:  # the model may be asleep
            request.finish(self._replies, None)
            self._release_adapter(request)
            return
        adapter, prompt_inputs = request.parsed.adapter, None
        components = self._components
        try:
            if request.adapter is not None and components.adapter_slots is not None:
                if not components.adapter_slots.acquire(request):
                    return  # it waits for a slot
            elif adapter:
                if components.check_adapter is None:
                    raise NotFound(f"unknown adapter '{adapter[:64]}': this model has no adapters")
                components.check_adapter(adapter)
            if request.multimodal_prompt is not None and components.encode_images is not None:
                prompt_inputs = components.encode_images(request.multimodal_prompt, adapter)
            sequences = request.create_sequences(self._tokenizer, prompt_inputs=prompt_inputs)
            self._metrics.prompt_tokens.add(sequences[0].prompt_length)
            if request.parsed.generation.continued:
                sequences = request.replay(self._replies)
        except HeadraceError as error:
            request.finish(self._replies, error)
        except Exception:
            log.exception("A request to model instance '%s' could not be started.", self._name)
            request.finish(self._replies, Internal(INTERNAL_TEXT))
        else:
            if sequences:
                self._requests[request] = None
                components.scheduler.add(sequences[0], sequences[1:])
                return
        self._release_adapter(request)

    def _run_step(self) -> None:
        """Launch one step, and read the previous one (async scheduling) or this one."""
        self._drop_cancelled()
        self._admit_ready()
        scheduler, runner = self._components.scheduler, self._components.runner
        ahead = (
            runner.async_scheduling
            and all(sequence.owner.sampling_state.can_run_ahead for sequence in scheduler.running)
            and all(pending.sampled for pending in self._pending_steps)
            and not scheduler.must_read_first()
        )
        if not ahead:
            self._read_all()
        offload = self._components.offload
        if offload is not None:
            offload.poll()
        chunks = scheduler.schedule()
        if offload is not None:
            offload.before_step()
        if chunks:
            self._launch(chunks)
        elif offload is not None and not self._pending_steps:
            offload.wait()
        if self._pending_steps and (len(self._pending_steps) > ahead or not chunks):
            self._read(self._pending_steps.popleft())
        self._admit_ready()  # now, because the engine waits for new requests if none is admitted
        self._update_metrics()
        self._publish_replies()
        if self._components.kv_events is not None:
            self._components.kv_events.flush()

    def _drop_cancelled(self) -> None:
        for request in [request for request in self._requests if request.work.cancelled]:
            request.finish(self._replies, None)
            self._remove(request)
        for request in [request for request in self._waiting_for_slot() if request.work.cancelled]:
            request.finish(self._replies, None)
            self._release_adapter(request)

    def _remove(self, request: RequestState) -> None:
        self._components.scheduler.finish(request.sequences)
        self._requests.pop(request, None)
        self._release_adapter(request)

    def _admit_ready(self) -> None:
        """Admit the requests whose adapter has a slot now."""
        slots = self._components.adapter_slots
        while slots is not None and (ready := slots.take_ready()):
            for request in ready:
                self._admit(request)

    def _waiting_for_slot(self) -> list[RequestState]:
        slots = self._components.adapter_slots
        return [] if slots is None else slots.queued()

    def _release_adapter(self, request: RequestState) -> None:
        if request.adapter is not None and self._components.adapter_slots is not None:
            self._components.adapter_slots.release(request)

    def _launch(self, chunks: list[Chunk]) -> None:
        rows = _sampling_states([chunk for chunk in chunks if chunk.samples])
        runner, greedy = self._components.runner, Sampler.all_argmax_only(rows)
        sampled = not greedy and runner.async_scheduling and all(row.can_run_ahead for row in rows)
        try:
            step = runner.launch(chunks, greedy=greedy, sample=self._sample if sampled else None)
        except Exception as error:
            self._read_all()
            self._step_failed(chunks, error)
        else:
            self._metrics.steps.add()
            self._pending_steps.append(_PendingStep(chunks, step, rows, greedy or sampled))
            for row in rows:
                row.in_flight += greedy or sampled

    def _sample(self, chunks: Sequences[Chunk], logits: torch.Tensor) -> torch.Tensor:
        """Sample the next tokens of chunks, without waiting."""
        return self._components.sampler.start(logits, _sampling_states(chunks)).tokens

    def _read_all(self) -> None:
        while self._pending_steps:
            self._read(self._pending_steps.popleft())

    def _read(self, pending: _PendingStep) -> None:
        logprobs: list[TokenLogprobs | None] | None = None
        for row in pending.rows:
            row.in_flight -= pending.sampled
        try:
            if pending.sampled:
                tokens = pending.step.tokens()
            else:
                sampled = self._components.sampler.sample(pending.step.logits, pending.rows)
                tokens, logprobs = sampled.tokens, sampled.logprobs
        except Exception as error:
            later, self._pending_steps = self._pending_steps, deque()
            for step in later:  # they continue from tokens that are lost
                self._fail_chunks(step.chunks, Internal(INTERNAL_TEXT))
            self._step_failed(pending.chunks, error, may_roll_back=not later)
            return
        scheduler, metrics, replies = self._components.scheduler, self._metrics, self._replies
        now = monotonic_ns()
        grown = scheduler.commit(pending.chunks, tokens)
        dropped = 0
        for number, sequence in grown:
            choice: Choice = sequence.owner
            request = choice.request
            if sequence.state == Sequence.FINISHED:
                dropped += 1
                continue  # it ended at an earlier token of this step, or another choice of its request failed
            if request.on_prefilled is not None:
                self._finish_prefill(request, request.on_prefilled, sequence)
                continue
            if choice.last_token_ns:
                metrics.next_token.observe((now - choice.last_token_ns) / 1e9)
            elif not choice.index:
                metrics.first_token.observe((now - request.arrived_ns) / 1e9)
            choice.last_token_ns = now
            choice.append(tokens[number], None if logprobs is None else logprobs[number], replies)
            if choice.request.done:
                self._remove(request)
            elif choice.finished:
                scheduler.finish((sequence,))
        metrics.tokens.add(len(grown) - dropped)

    def _finish_prefill(
        self, request: RequestState, on_prefilled: Callable[[RequestState, Sequence], None], sequence: Sequence
    ) -> None:
        """Finish a prefill-only request: its prompt is computed, and another server decodes."""
        request.done = True
        try:
            on_prefilled(request, sequence)
        except Exception:
            log.exception("The KV pages of a prompt of model instance '%s' could not be saved.", self._name)
            self._replies.append((request.work, Internal(INTERNAL_TEXT), True, {}))
        self._remove(request)

    def _step_failed(self, chunks: list[Chunk], error: Exception, *, may_roll_back: bool = True) -> None:
        """Handle a failed step: make steps smaller if memory was short, else fail its requests."""
        if isinstance(error, RunnerLost):
            self._fail_chunks(chunks, Unavailable(str(error)))
            self._restore(error)
            return
        if not _out_of_memory(error):
            log.error("A step of model instance '%s' failed.", self._name, exc_info=error)
            self._fail_chunks(chunks, Internal(INTERNAL_TEXT))
            return
        log.warning("A step of model instance '%s' ran out of memory.", self._name)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not may_roll_back or not self._components.scheduler.roll_back(chunks):
            self._fail_chunks(
                chunks, Unavailable("there is not enough memory for this request: retry later, or send less")
            )

    def _fail_chunks(self, chunks: list[Chunk], error: HeadraceError) -> None:
        for sequence in self._components.scheduler.abort(chunks):
            request = sequence.owner.request
            request.finish(self._replies, error)
            self._remove(request)

    def _restore(self, lost: RunnerLost) -> None:
        """Fail the requests that run, and restore the runner. Waiting requests wait on, if it is not long."""
        recovery, scheduler = self._components.recovery, self._components.scheduler
        if recovery is None:
            raise lost
        if not recovery.is_lost:
            return  # it was noticed twice
        pending, self._pending_steps = self._pending_steps, deque()
        for step in pending:
            self._fail_chunks(step.chunks, Unavailable(str(lost)))
        for sequence in tuple(scheduler.running):
            sequence.owner.request.finish(self._replies, Unavailable(str(lost)))
            self._remove(sequence.owner.request)
        scheduler.pool.reset_prefix_cache()
        self._publish_replies()
        delay = Backoff(_RESTORE_DELAYS, longest=_LONGEST_RESTORE_DELAY, lived=0.0)
        while not self._closing.is_set():
            try:
                recovery.restore()
            except HeadraceError as error:
                log.error("Model instance '%s' cannot be restored: %s.", self._name, error.message)
                self._fail_all(error)
                self._closing.wait(delay.next_delay(monotonic()))
            else:
                return

    def _update_metrics(self) -> None:
        scheduler, metrics = self._components.scheduler, self._metrics
        metrics.running.set(len(scheduler.running))
        metrics.waiting.set(len(scheduler.waiting))
        metrics.cache_use.set(scheduler.pool.used / scheduler.pool.pages)
        totals = (scheduler.prefix_hits, scheduler.prefix_queries, scheduler.preemptions)
        if totals != self._reported:
            hits, queries, preemptions = self._reported
            metrics.prefix_hits.add(totals[0] - hits)
            metrics.prefix_queries.add(totals[1] - queries)
            metrics.preemptions.add(totals[2] - preemptions)
            self._reported = totals
        if self._components.offload is not None:
            metrics.report_levels(self._components.offload.counts, self._components.offload.held_bytes)
        if scheduler.drafts != self._reported_drafts[0]:
            drafts, draft_tokens, accepted = self._reported_drafts
            metrics.add_accepted_tokens(0, 0)  # a share of nothing is 0, too, and not unknown
            metrics.drafts.add(scheduler.drafts - drafts)
            metrics.draft_tokens.add(scheduler.draft_tokens - draft_tokens)
            for position, count in enumerate(scheduler.accepted_tokens):
                metrics.add_accepted_tokens(position, count - (accepted[position] if position < len(accepted) else 0))
            self._reported_drafts = (scheduler.drafts, scheduler.draft_tokens, scheduler.accepted_tokens.copy())

    def _publish_replies(self) -> None:
        if self._replies:
            replies, self._replies = self._replies, []
            if self._components.scheduler.drafter is not None:
                replies = merge_replies([replies])  # a step may have added several tokens to a stream
            self._publish(replies)

    def _fail_all(self, error: HeadraceError) -> None:
        for request in (*self._requests, *self._waiting_for_slot()):
            request.finish(self._replies, error)
            self._remove(request)
        try:
            while (queued := self._inbox.get_nowait()) is not None:
                if isinstance(queued, RequestState):
                    queued.finish(self._replies, error)
                elif isinstance(queued, _IdleWork):
                    self._idle_work.append(queued)
            self._inbox.put(None)  # the main loop still has to read it
        except Empty:
            pass
        while self._idle_work:
            self._idle_work.popleft().result.set_exception(error)
        self._publish_replies()


def _sampling_states(chunks: Sequences[Chunk]) -> list[SamplingState]:
    """Return the sampling state of each chunk's next token."""
    states: list[SamplingState] = []
    for chunk in chunks:
        state: SamplingState = chunk.sequence.owner.sampling_state
        ahead = 0 if chunk.draft is None else chunk.end - len(chunk.sequence.tokens)
        states.append(state.ahead(ahead) if ahead else state)
    return states


def make_scheduler(runner: ModelRunner, *, max_running: int, max_step_tokens: int, prefix_cache: bool) -> Scheduler:
    """Return a scheduler over the pages of a runner's KV cache."""
    pool = PagePool(runner.cache.pages, runner.page_size, prefix_cache=prefix_cache)
    scheduler = Scheduler(pool, max_running=max_running, max_step_tokens=max_step_tokens)
    scheduler.shares_all_prompts = not runner.fixed_rows
    return scheduler


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # PyTorch's message on a CPU
