# SPDX-License-Identifier: Apache-2.0
"""Words that must not be generated (`bad_words`), as vLLM defines them.

A word is forbidden in the spelling of its tokens, at the beginning of a text and after a space. Its last token is excluded
where the tokens before it have just been generated; tokens of the prompt do not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

TokenSequence = tuple[int, ...]


def tokenize_bad_words(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> tuple[TokenSequence, ...]:
    """Return the token sequences that spell these words; `encode` adds no special tokens."""
    sequences: dict[TokenSequence, None] = {}
    for word in words:
        bare = word.lstrip()
        plain, spaced = tuple(encode(bare)), tuple(encode(f" {bare}"))
        sequences[plain] = None
        if spaced[1:] != plain:  # else the space is a token of its own
            sequences[spaced] = None
    sequences.pop((), None)
    return tuple(sequences)


class BadWords:
    """The bad words of one choice, and the tokens that they forbid next."""

    __slots__ = ("_always", "_beginnings", "_recent", "forbidden")

    def __init__(self, sequences: Sequence[TokenSequence]) -> None:
        self._always = frozenset(sequence[0] for sequence in sequences if len(sequence) == 1)
        self._beginnings = [(sequence[:-1], sequence[-1]) for sequence in sequences if len(sequence) > 1]
        longest = max((len(beginning) for beginning, _ in self._beginnings), default=0)
        self._recent: deque[int] = deque(maxlen=longest)
        """The last generated tokens."""
        self.forbidden = self._always
        """Tokens that must not come next."""

    @property
    def depends_on_history(self) -> bool:
        """Whether what is forbidden depends on the tokens before."""
        return bool(self._beginnings)

    def advance(self, token: int) -> None:
        """Record a generated token."""
        if not self._beginnings:
            return
        self._recent.append(token)
        recent = tuple(self._recent)
        endings = [last for beginning, last in self._beginnings if recent[-len(beginning) :] == beginning]
        self.forbidden = self._always.union(endings) if endings else self._always
