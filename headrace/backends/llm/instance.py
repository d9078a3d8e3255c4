# SPDX-License-Identifier: Apache-2.0
"""One instance of a model that generates: takes requests from the engine of the server, gives their answers back.

Called in the loop's thread. What takes time before a request can be generated (its template, its tokens, its grammar) is
done in threads of its own; the rest is for `engine`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic_ns

from headrace.backends.contract import Work
from headrace.backends.llm.choices import Answer, Job
from headrace.backends.llm.engine import Engine, Opened
from headrace.backends.llm.handing.hands import ModelHands
from headrace.backends.llm.handing.jobs import JobHands
from headrace.backends.llm.metrics import VersionMetrics
from headrace.backends.llm.requests import read_request, with_prompt
from headrace.backends.llm.sampling.constraints import Constraints
from headrace.backends.llm.text.tokenizer import Tokenizer
from headrace.core.errors import (
    INTERNAL_TEXT,
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    Unavailable,
)

log = logging.getLogger("headrace.backends.llm")

_PREPARING_THREADS = 2
_RETRY_SECONDS = 1.0


class LlmInstance:
    """See `contract.RequestInstance`."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        constraints: Constraints,
        metrics: VersionMetrics,
        loop: asyncio.AbstractEventLoop,
        open: Callable[[], Opened],
        hands: ModelHands | None = None,
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._constraints = constraints
        self._loop = loop
        self._open = 0
        """Requests that have not had their last answer."""
        self._threads = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix=f"llm {name} prompts")
        self.engine = Engine(name, open, tokenizer, metrics, self._tell)
        self._hands = JobHands(name, hands, self.engine, self._tell) if hands is not None else None

    def start(self) -> None:
        """Open the model. Blocks: from a loader thread."""
        try:
            self.engine.start()
        except BaseException:
            self._threads.shutdown()
            raise

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        """See `contract.RequestInstance.execute`."""
        now = monotonic_ns()
        for work in batch:
            if self._open >= self.engine.limits.max_open:
                work.reply(
                    Unavailable(
                        f"model instance '{self._name}' has {self._open} requests already: retry later",
                        retry_after_seconds=_RETRY_SECONDS,
                    )
                )
                continue
            self._open += 1
            try:
                self._threads.submit(self._prepare, work, now)
            except RuntimeError:  # closed
                self._deliver([(work, Unavailable(f"model instance '{self._name}' is being unloaded"), True, {})])
        # Not at once: the server's engine may have more, and would be deeper inside itself with each.
        self._loop.call_soon(finished)

    def close(self) -> None:
        """See `contract.RequestInstance.close`."""
        self._threads.shutdown(cancel_futures=False)
        if self._hands is not None:
            self._hands.stop_taking()
        self.engine.close()
        if self._hands is not None:
            self._hands.close()

    def _prepare(self, work: Work, arrived_ns: int) -> None:
        """In a thread: what the request says, and its grammar."""
        if work.cancelled:
            self._tell([(work, None, True, {})])
            return
        try:
            limits = self.engine.limits
            ask, seen = read_request(work.request, self._tokenizer, limits), None
            if ask.media:
                if self.engine.eyes is None:
                    raise InvalidArgument(
                        "messages: the model reads text only, no pictures and no video: leave them out"
                    )
                seen = self.engine.eyes.prepare(ask.generation, limits.max_model_len)
                ask = with_prompt(ask, seen.tokens, limits)
            constraint = None if ask.format is None else self._constraints.compile(ask.format)
        except HeadraceError as error:
            self._tell([(work, error.with_traceback(None), True, {})])
        except Exception:
            log.exception("a request to model instance '%s' could not be read", self._name)
            self._tell([(work, Internal(INTERNAL_TEXT), True, {})])
        else:
            self._begin(Job(work, ask, constraint, arrived_ns, seen))

    def _begin(self, job: Job) -> None:
        generation, hands = job.ask.generation, self._hands
        if generation.hands:
            if hands is None:
                error = FailedPrecondition("this server keeps no pages for others: start it with --role prefill")
                self._tell([(job.work, error, True, {})])
                return
            job.give = hands.give
            self.engine.add(job)
        elif generation.ticket and hands is not None:
            hands.begin(job)
        else:
            self.engine.add(job)

    def _tell(self, answers: list[Answer]) -> None:
        """From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, answers)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("answers of model instance '%s' came after the end", self._name)

    def _deliver(self, answers: list[Answer]) -> None:
        for work, outputs, final, parameters in answers:
            if final:
                self._open -= 1
            try:
                work.reply(outputs, final=final, parameters=parameters)
            except Exception:
                log.exception("an answer of model instance '%s' could not be given", self._name)
