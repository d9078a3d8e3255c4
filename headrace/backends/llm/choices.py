# SPDX-License-Identifier: Apache-2.0
"""A request that is being generated, its choices, and what they have to tell.

Made by `instance`, fed by the engine's thread token by token. Knows no step and no device; the answers it makes are given
to the loop's thread by the engine, all of a step at once.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.backends.contract import Work
from headrace.backends.llm.requests import Ask
from headrace.backends.llm.sampling.constraints import Constraint
from headrace.backends.llm.sampling.logprobs import logprobs_json
from headrace.backends.llm.sampling.rows import Row
from headrace.backends.llm.sampling.sampler import TokenLogprobs
from headrace.backends.llm.scheduling.sequences import Sequence
from headrace.backends.llm.seeing.prepared import Prepared
from headrace.backends.llm.text.detokenising import Detokenizer
from headrace.backends.llm.text.stops import StopTexts
from headrace.core.dtypes import BYTES
from headrace.core.errors import HeadraceError
from headrace.core.generation import TEXT_OUTPUT
from headrace.core.messages import NO_PARAMETERS, Parameters
from headrace.core.tensors import Tensor

if TYPE_CHECKING:
    from headrace.backends.llm.text.tokenizer import Tokenizer

Answer = tuple[Work, Several[Tensor] | HeadraceError | None, bool, Parameters]
"""Arguments of a reply: what, whether it is the last, and its parameters."""


class Job:
    """One request."""

    __slots__ = ("arrived_ns", "ask", "brought", "choices", "constraint", "give", "left", "over", "seen", "work")

    def __init__(
        self, work: Work, ask: Ask, constraint: Constraint | None, arrived_ns: int, seen: Prepared | None = None
    ) -> None:
        self.work = work
        self.ask = ask
        self.constraint = constraint
        self.arrived_ns = arrived_ns
        self.seen = seen
        """Its media, where it has some."""
        self.choices: list[Choice] = []
        self.left = 0
        """Choices that are not finished."""
        self.over = False
        """Whether it has had its last answer."""
        self.give: Callable[[Job, Sequence], None] | None = None
        """For a prompt that another is to go on from: called when it is computed, and answers."""
        self.brought: Any = None
        """Pages of its prompt that came from another: see `Sequence.brought`."""

    @property
    def salt(self) -> bytes:
        """Of its sequences."""
        salt = self.ask.adapter.encode()
        return salt if self.seen is None else salt + b"\0" + self.seen.digest

    def open(self, tokenizer: Tokenizer, *, extras: Any = None) -> list[Sequence]:
        """Make its choices; returns their sequences."""
        ask, sampling, tokens, salt = self.ask, self.ask.sampling, self.ask.tokens, self.salt
        limit = len(tokens) + (sampling.max_tokens or 1)
        for index in range(sampling.n):
            constraint = self.constraint.fresh() if self.constraint is not None and index else self.constraint
            row = Row(sampling, tokens, constraint, tokenizer.eos_ids, index)
            choice = Choice(self, index, row, tokenizer)
            choice.sequence = Sequence(tokens, limit, salt=salt, adapter=ask.adapter, extras=extras, owner=choice)
            self.choices.append(choice)
        self.left = len(self.choices)
        self.choices[0].sequence.brought, self.brought = self.brought, None
        return [choice.sequence for choice in self.choices]

    @property
    def sequences(self) -> list[Sequence]:
        """Of all choices."""
        return [choice.sequence for choice in self.choices]

    def end(self, answers: list[Answer], error: HeadraceError | None) -> None:
        """Nothing more comes of it."""
        if not self.over:
            self.over = True
            answers.append((self.work, error, True, NO_PARAMETERS))


class Choice:
    """One of the texts that a request gets."""

    __slots__ = (
        "_detokenizer",
        "_tokenizer",
        "_told",
        "finished",
        "index",
        "job",
        "last_ns",
        "parameters",
        "row",
        "sequence",
        "stops",
        "texts",
    )

    sequence: Sequence

    def __init__(self, job: Job, index: int, row: Row, tokenizer: Tokenizer) -> None:
        self.job = job
        self.index = index
        self.row = row
        self.stops = StopTexts(job.ask.sampling.stop)
        self._detokenizer = Detokenizer(tokenizer)
        self._tokenizer = tokenizer
        self.parameters: Parameters = {"index": index}
        """Of an answer that says nothing but its text."""
        self.texts: list[str] = []
        """What was not told yet."""
        self._told: list[tuple[int, TokenLogprobs]] = []
        """Tokens whose log-probabilities were not told yet."""
        self.last_ns = 0
        """When its last token came; 0 before the first."""
        self.finished = False

    def take(self, token: int, logprobs: TokenLogprobs | None, answers: list[Answer]) -> None:
        """One more token."""
        row, job = self.row, self.job
        row.advance(token)
        if row.error is not None:
            job.end(answers, row.error)
            return
        if row.ends(token):
            self._finish("stop", self._rest(), answers)
            return
        if logprobs is not None:
            self._told.append((token, logprobs))
        text, stopped = self.stops.push(self._detokenizer.push((token,)))
        if stopped:
            self._finish("stop", text, answers)
        elif row.finished:
            self._finish("stop", text + self._rest(), answers)
        elif len(self.sequence.tokens) >= self.sequence.limit:
            self._finish("length", text + self._rest(), answers)
        elif not job.ask.stream:
            self.texts.append(text)
        elif text:
            parameters = self.parameters
            if self._told:
                parameters = {**parameters, "logprobs": self._logprobs()}
            answers.append((job.work, (text_tensor(text),), False, parameters))

    def _rest(self) -> str:
        """What was held back, now that nothing follows it."""
        text, stopped = self.stops.push(self._detokenizer.finish())
        return text if stopped else text + self.stops.finish()

    def _logprobs(self) -> str:
        told, self._told = self._told, []
        return logprobs_json(self._tokenizer, [token for token, _ in told], [logprobs for _, logprobs in told])

    def _finish(self, reason: str, text: str, answers: list[Answer]) -> None:
        job, sequence = self.job, self.sequence
        self.finished = True
        job.left -= 1
        self.texts.append(text)
        parameters: dict[str, bool | int | float | str] = {
            "index": self.index,
            "finish_reason": reason,
            "prompt_tokens": sequence.prompt_length,
            "cached_tokens": sequence.cached,
            "completion_tokens": len(sequence.tokens) - sequence.prompt_length,
        }
        if job.ask.sampling.logprobs is not None:
            parameters["logprobs"] = self._logprobs()
        self.parameters = parameters
        if not job.ask.one_answer:
            job.over = not job.left
            answers.append((job.work, (text_tensor("".join(self.texts)),), job.over, parameters))
        elif not job.left:
            job.over = True
            answers.append((job.work, (text_tensor(*map(_text, job.choices)),), True, _of_all(job.choices)))


def _text(choice: Choice) -> str:
    return "".join(choice.texts)


def _of_all(choices: Several[Choice]) -> Parameters:
    """One answer for all: the first's, with the tokens of all."""
    first = dict(choices[0].parameters)
    del first["index"]
    first["completion_tokens"] = sum(int(choice.parameters["completion_tokens"]) for choice in choices)
    return first


def text_tensor(*texts: str) -> Tensor:
    """What an answer says."""
    array = np.empty(len(texts), dtype=object)
    array[:] = [text.encode("utf-8", "replace") for text in texts]
    return Tensor(TEXT_OUTPUT, BYTES, array)
