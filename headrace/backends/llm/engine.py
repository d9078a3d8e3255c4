# SPDX-License-Identifier: Apache-2.0
"""The thread that generates: takes jobs, plans steps, has them computed, and tells the loop what is new.

One for each instance. Jobs come from any thread by `add`; answers go to the loop's thread with one call a step. Where the
runner can, a step is launched before the tokens of the last one are read: a sequence that turns out to have ended then got
a token too many, which is dropped. What goes wrong in a step is the end of that step's requests, not of the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic_ns

import torch

from headrace.backends.llm.choices import Answer, Choice, Job
from headrace.backends.llm.metrics import VersionMetrics
from headrace.backends.llm.running.runner import Extras, Runner, Step
from headrace.backends.llm.sampling.rows import Row
from headrace.backends.llm.sampling.sampler import Sampler, TokenLogprobs
from headrace.backends.llm.scheduling.pages import PagePool
from headrace.backends.llm.scheduling.scheduler import Scheduler
from headrace.backends.llm.scheduling.sequences import Piece, Sequence
from headrace.backends.llm.seeing.prepared import Eyes, Prepared
from headrace.backends.llm.text.tokenizer import Tokenizer
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, Internal, NotFound, Unavailable

log = logging.getLogger("headrace.backends.llm")

_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    max_model_len: int
    default_max_tokens: int | None
    max_open: int
    """Requests that are generated or wait for it."""


@dataclass(slots=True)
class Opened:
    """What an engine runs, made in its thread."""

    runner: Runner
    scheduler: Scheduler
    sampler: Sampler
    limits: Limits
    eyes: Eyes | None = None
    """None for a model that reads text only."""
    look: Callable[[Prepared, str], Extras] | None = None
    """With `eyes`: what a sequence brings, of what was seen and for which adapter. In the engine's thread."""
    check_adapter: Callable[[str], None] | None = None
    """Raises for a name that is not an adapter's; None for a model without."""
    identity: str = ""
    """What another must have in common with this to use its pages; "" where nothing is handed over."""
    close: Callable[[], None] = lambda: None
    """Called last, in the engine's thread."""


@dataclass(slots=True)
class _Flight:
    """A step that has been launched and not read."""

    plan: list[Piece]
    step: Step
    rows: list[Row]
    greedy: bool


class Engine:
    """Generates for one instance."""

    def __init__(
        self,
        name: str,
        open: Callable[[], Opened],
        tokenizer: Tokenizer,
        metrics: VersionMetrics,
        tell: Callable[[list[Answer]], None],
    ) -> None:
        self._name = name
        self._open = open
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._tell = tell
        """Gets the answers of a step, in the engine's thread."""
        self._new: SimpleQueue[Job | None] = SimpleQueue()
        self._jobs: dict[Job, None] = {}
        self._flights: deque[_Flight] = deque()
        self._answers: list[Answer] = []
        self._counted = (0, 0, 0)
        self._opened: Opened
        self._thread = threading.Thread(target=self._main, name=f"llm {name}", daemon=True)
        self._ready: Future[None] = Future()

    def start(self) -> None:
        """Open the model in the engine's thread; returns when it is, or raises what kept it from that."""
        self._thread.start()
        self._ready.result()

    def add(self, job: Job) -> None:
        """Generate this. From any thread."""
        self._new.put(job)

    def close(self) -> None:
        """End the thread and free everything; what still runs is told so. Not from the engine's thread."""
        self._new.put(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            log.error("the engine of model instance '%s' does not end", self._name)

    @property
    def limits(self) -> Limits:
        """Once it has started."""
        return self._opened.limits

    @property
    def eyes(self) -> Eyes | None:
        """The same."""
        return self._opened.eyes

    @property
    def identity(self) -> str:
        """The same."""
        return self._opened.identity

    @property
    def scheduler(self) -> Scheduler:
        """To look at."""
        return self._opened.scheduler

    @property
    def runner(self) -> Runner:
        """To look at."""
        return self._opened.runner

    # In the engine's thread

    def _main(self) -> None:
        try:
            self._opened = self._open()
        except BaseException as error:
            self._metrics.close()
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while self._take_new():
                self._turn()
        except BaseException:
            log.exception("the engine of model instance '%s' ended", self._name)
            self._give_up(Internal(INTERNAL_TEXT))
            while (job := self._new.get()) is not None:
                job.end(self._answers, Internal(INTERNAL_TEXT))
                self._tell_answers()
        finally:
            self._give_up(Unavailable(f"model instance '{self._name}' is being unloaded"))
            self._flights.clear()
            self._opened.look = self._opened.eyes = None  # they know the model, whose memory is to be free
            self._opened.close()
            self._opened.runner.close()
            self._metrics.close()

    def _take_new(self) -> bool:
        """Let new jobs in; waits for one where there is nothing else to do. False: it is over."""
        try:
            wait = not self._jobs and not self._flights
            while True:
                job = self._new.get() if wait else self._new.get_nowait()
                if job is None:
                    return False
                wait = False
                self._let_in(job)
        except Empty:
            return True

    def _let_in(self, job: Job) -> None:
        ask, extras = job.ask, None
        scheduler = self._opened.scheduler
        try:
            if ask.adapter:
                if self._opened.check_adapter is None:
                    raise NotFound(f"adapter '{ask.adapter[:64]}' is not there: this model has none")
                self._opened.check_adapter(ask.adapter)
            if job.seen is not None and self._opened.look is not None:
                extras = self._opened.look(job.seen, ask.adapter)
            first, *others = job.open(self._tokenizer, extras=extras)
        except HeadraceError as error:
            job.end(self._answers, error)
        except Exception:
            log.exception("a request to model instance '%s' could not be started", self._name)
            job.end(self._answers, Internal(INTERNAL_TEXT))
        else:
            self._jobs[job] = None
            scheduler.add(first, others)
            self._metrics.prompt_tokens.add(first.prompt_length)

    def _turn(self) -> None:
        """Launch one step, and read the one before it, or this one."""
        self._drop_cancelled()
        scheduler, runner = self._opened.scheduler, self._opened.runner
        ahead = runner.ahead and all(sequence.owner.row.plain for sequence in scheduler.running)
        if not ahead:
            self._read_all()
        plan = scheduler.plan()
        if plan:
            self._launch(plan)
        if self._flights and (len(self._flights) > ahead or not plan):
            self._read(self._flights.popleft())
        self._measure()
        self._tell_answers()

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._jobs if job.work.cancelled]:
            job.end(self._answers, None)
            self._leave(job)

    def _leave(self, job: Job) -> None:
        self._opened.scheduler.finish(job.sequences)
        self._jobs.pop(job, None)

    def _launch(self, plan: list[Piece]) -> None:
        rows = [piece.sequence.owner.row for piece in plan if piece.samples]
        greedy = Sampler.is_plain(rows)
        try:
            step = self._opened.runner.launch(plan, greedy=greedy)
        except Exception as error:
            self._read_all()
            self._failed(plan, error)
        else:
            self._metrics.steps.add()
            self._flights.append(_Flight(plan, step, rows, greedy))

    def _read_all(self) -> None:
        while self._flights:
            self._read(self._flights.popleft())

    def _read(self, flight: _Flight) -> None:
        logprobs: list[TokenLogprobs | None] | None = None
        try:
            if flight.greedy:
                tokens = flight.step.tokens()
            else:
                sampled = self._opened.sampler.sample(flight.step.logits, flight.rows)
                tokens, logprobs = sampled.tokens, sampled.logprobs
        except Exception as error:
            later, self._flights = self._flights, deque()
            for flight_ in later:  # they go on from tokens that nobody will ever know
                self._fail(flight_.plan, Internal(INTERNAL_TEXT))
            self._failed(flight.plan, error, may_retreat=not later)
            return
        scheduler, metrics, answers = self._opened.scheduler, self._metrics, self._answers
        now = monotonic_ns()
        grown = scheduler.commit(flight.plan, tokens)
        metrics.tokens.add(len(grown))
        for number, sequence in grown:
            choice: Choice = sequence.owner
            job = choice.job
            if job.over:
                continue  # another choice of it has failed in this step
            if job.give is not None:
                self._give(job, job.give, sequence)
                continue
            if choice.last_ns:
                metrics.next_token.observe((now - choice.last_ns) / 1e9)
            elif not choice.index:
                metrics.first_token.observe((now - job.arrived_ns) / 1e9)
            choice.last_ns = now
            choice.take(tokens[number], None if logprobs is None else logprobs[number], answers)
            if choice.job.over:
                self._leave(job)
            elif choice.finished:
                scheduler.finish((sequence,))

    def _give(self, job: Job, give: Callable[[Job, Sequence], None], sequence: Sequence) -> None:
        """The prompt is computed, and it is another who goes on from there."""
        job.over = True
        try:
            give(job, sequence)
        except Exception:
            log.exception("the pages of a prompt of model instance '%s' could not be given", self._name)
            self._answers.append((job.work, Internal(INTERNAL_TEXT), True, {}))
        self._leave(job)

    def _failed(self, plan: list[Piece], error: Exception, *, may_retreat: bool = True) -> None:
        """A step was not computed. Where it was memory that it lacked, smaller ones may be."""
        if not _out_of_memory(error):
            log.error("a step of model instance '%s' failed", self._name, exc_info=error)
            self._fail(plan, Internal(INTERNAL_TEXT))
            return
        log.warning("a step of model instance '%s' needs more memory than there is", self._name)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not may_retreat or not self._opened.scheduler.retreat(plan):
            self._fail(plan, Unavailable("there is not enough memory for this request: retry later, or send less"))

    def _fail(self, plan: list[Piece], told: HeadraceError) -> None:
        for sequence in self._opened.scheduler.abort(plan):
            job = sequence.owner.job
            job.end(self._answers, told)
            self._leave(job)

    def _measure(self) -> None:
        scheduler, metrics = self._opened.scheduler, self._metrics
        metrics.running.set(len(scheduler.running))
        metrics.waiting.set(len(scheduler.waiting))
        metrics.cache_use.set(scheduler.pool.used / scheduler.pool.pages)
        counted = (scheduler.prefix_hits, scheduler.prefix_looked, scheduler.preemptions)
        if counted != self._counted:
            hits, looked, preemptions = self._counted
            metrics.prefix_hits.add(counted[0] - hits)
            metrics.prefix_looked.add(counted[1] - looked)
            metrics.preemptions.add(counted[2] - preemptions)
            self._counted = counted

    def _tell_answers(self) -> None:
        if self._answers:
            answers, self._answers = self._answers, []
            self._tell(answers)

    def _give_up(self, error: HeadraceError) -> None:
        for job in tuple(self._jobs):
            job.end(self._answers, error)
            self._leave(job)
        try:
            while (job_ := self._new.get_nowait()) is not None:
                job_.end(self._answers, error)
            self._new.put(None)  # whoever waits for the end still has to see it
        except Empty:
            pass
        self._tell_answers()


def open_scheduler(runner: Runner, *, max_running: int, max_step_tokens: int, prefix_cache: bool) -> Scheduler:
    """Over the pages that the runner has."""
    pool = PagePool(runner.cache.pages, runner.page_size, prefix_cache=prefix_cache)
    return Scheduler(pool, max_running=max_running, max_step_tokens=max_step_tokens)


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # PyTorch's words on a CPU
