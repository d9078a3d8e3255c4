# SPDX-License-Identifier: Apache-2.0
"""What is handed over for the jobs of one instance. Made by `instance` where the server has a role.

    give    for a prompt that another is to go on from: the engine's thread calls it when the prompt is computed; the pages
            are copied there and then, and kept by a thread of its own, which answers
    begin   for a request that comes with a ticket: a thread takes the pages, and then the engine gets the job

Pages that the instance's own cache has already are not taken. What could not be taken is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from headrace.backends.llm.choices import Answer, Job, text_tensor
from headrace.backends.llm.handing.layout import Brought, packed
from headrace.backends.llm.scheduling.pages import extend_digests
from headrace.core.errors import INTERNAL_TEXT, Internal, Unavailable

if TYPE_CHECKING:
    from headrace.backends.llm.engine import Engine
    from headrace.backends.llm.handing.hands import ModelHands
    from headrace.backends.llm.scheduling.sequences import Sequence

log = logging.getLogger("headrace.backends.llm")

_KEEPING_THREADS = 2
_TAKING_THREADS = 8
"""Each may wait for a network."""


class JobHands:
    """See the module."""

    def __init__(self, name: str, hands: ModelHands, engine: Engine, tell: Callable[[list[Answer]], None]) -> None:
        self._name = name
        self._hands = hands
        self._engine = engine
        self._tell = tell
        self._keepers = ThreadPoolExecutor(_KEEPING_THREADS, thread_name_prefix=f"llm {name} keeping")
        self._takers = ThreadPoolExecutor(_TAKING_THREADS, thread_name_prefix=f"llm {name} taking")

    def begin(self, job: Job) -> None:
        """Take the pages that the job's ticket is for, then have it computed. From any thread."""
        try:
            self._takers.submit(self._take, job)
        except RuntimeError:  # closed
            self._tell([(job.work, Unavailable(f"model instance '{self._name}' is being unloaded"), True, {})])

    def give(self, job: Job, sequence: Sequence) -> None:
        """The job's prompt is computed: keep its pages, and answer with a ticket. In the engine's thread."""
        cache = self._engine.runner.cache
        count = (sequence.prompt_length - 1) // cache.page_size
        if not count:
            self._hands.short()
            self._tell([_answer(job, "", sequence.prompt_length)])
            return
        digests = extend_digests(sequence.digests, sequence.tokens, cache.page_size, sequence.salt, count)
        with torch.inference_mode():
            block = packed(cache, sequence.pages[:count])
        ready: torch.cuda.Event | None = None
        if block.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._keepers.submit(self._keep, job, digests[count - 1], block, ready, sequence.prompt_length)

    def stop_taking(self) -> None:
        """What is being taken still goes to the engine; nothing else does. Before the engine is closed."""
        self._takers.shutdown()

    def close(self) -> None:
        """After the engine is closed."""
        self._keepers.shutdown()

    def _keep(
        self, job: Job, digest: bytes, block: torch.Tensor, ready: torch.cuda.Event | None, prompt_tokens: int
    ) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            ticket = ""
            if not job.work.cancelled:
                ticket = self._hands.give(self._engine.identity, digest, block, self._engine.runner.page_size)
        except Exception:
            log.exception("the pages of a prompt of model instance '%s' could not be kept", self._name)
            self._tell([(job.work, Internal(INTERNAL_TEXT), True, {})])
        else:
            self._tell([_answer(job, ticket, prompt_tokens)])

    def _take(self, job: Job) -> None:
        try:
            if not job.work.cancelled:
                self._bring(job)
        except Exception:
            log.exception("pages for model instance '%s' could not be taken", self._name)
        self._engine.add(job)

    def _bring(self, job: Job) -> None:
        cache, pool = self._engine.runner.cache, self._engine.scheduler.pool
        size, tokens = cache.page_size, job.ask.tokens
        digests = extend_digests([], tokens, size, job.salt, (len(tokens) - 1) // size)
        # What the engine's thread does meanwhile may make this wrong: then less is used of what came, or nothing.
        have = next((number for number, each in enumerate(digests) if pool.find(each) is None), len(digests))
        taken = self._hands.take(job.ask.generation.ticket, self._engine.identity, digests, cache, have)
        if taken is not None:
            job.brought = Brought(cache, *taken)


def _answer(job: Job, ticket: str, prompt_tokens: int) -> Answer:
    return job.work, (text_tensor(""),), True, {"ticket": ticket, "prompt_tokens": prompt_tokens}
