# SPDX-License-Identifier: Apache-2.0
"""A sequence of tokens that grows, and the piece of it that one step computes.

Made by the engine, moved by the scheduler, read by the runner. What the engine and the runner keep with a sequence is
theirs (`owner`, `extras`): nothing here looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Brought(Protocol):
    """Pages of a prompt that were computed elsewhere."""

    first: int
    """The first of them, by its place in the prompt, ..."""
    end: int
    """... and the first page that is not among them."""

    def put(self, start: int, pages: list[int]) -> bool:
        """Fill these pages, which are the prompt's from place `start` on; False if that could not be done."""


class Sequence:
    """One choice of one request."""

    __slots__ = (
        "adapter",
        "arrived",
        "brought",
        "cached",
        "computed",
        "digests",
        "extras",
        "followers",
        "leader",
        "limit",
        "owner",
        "pages",
        "pending",
        "preemptions",
        "prompt_length",
        "salt",
        "seat",
        "state",
        "tokens",
    )

    NEW, HELD, WAITING, RUNNING, FINISHED = range(5)

    def __init__(
        self,
        tokens: list[int],
        limit: int,
        *,
        salt: bytes = b"",
        adapter: str = "",
        extras: Any = None,
        owner: Any = None,
        leader: Sequence | None = None,
    ) -> None:
        self.tokens = tokens
        """The prompt and what has been generated. Those that were sampled but not read yet are counted in `pending`.

        Before it first runs the list is the caller's, so that many choices that wait have one prompt."""
        self.prompt_length = len(tokens)
        self.limit = limit
        """It ends when it has so many tokens, the prompt's included."""
        self.salt = salt
        """Sequences share pages only where their salts are equal: an adapter's name, a digest of pictures."""
        self.adapter = adapter
        self.extras = extras
        self.owner = owner
        self.leader = leader
        """Another choice of the same request, whose prompt's pages this one shares."""
        self.followers: list[Sequence] = []
        """The other choices, held until this one's prompt is computed."""
        self.state = self.NEW
        self.arrived = 0
        """Its place among all, given by the scheduler: lower came earlier."""
        self.seat = -1
        """While it runs: a number below `max_running` that no other running one has."""
        self.pages: list[int] = []
        self.computed = 0
        """How many of its tokens have keys and values in its pages, or will have after the steps under way."""
        self.pending = 0
        self.cached = 0
        """How many tokens of the prompt were found in pages when it first ran."""
        self.digests: list[bytes] = []
        """Of its first pages, as far as they were needed."""
        self.preemptions = 0
        self.brought: Brought | None = None
        """Pages of its prompt that were computed elsewhere, until it first runs."""

    @property
    def length(self) -> int:
        """Of all tokens, those that are not read yet too."""
        return len(self.tokens) + self.pending

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the newest are computed."""
        return self.computed == self.length - 1 and self.computed >= self.prompt_length


@dataclass(slots=True)
class Piece:
    """Tokens `start` to `start + count` of a sequence, to be computed in a step.

    The last token of a decoding piece may still be on its way: then it is the one that the step before sampled for it,
    and `known` is False.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """Whether a token is sampled after its last row: not in the middle of a prompt."""
    known: bool = True

    @property
    def end(self) -> int:
        """The number of tokens that are computed after it."""
        return self.start + self.count
