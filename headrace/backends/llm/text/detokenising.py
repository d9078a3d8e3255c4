# SPDX-License-Identifier: Apache-2.0
"""Tokens into text as they come. Called by the engine for each choice, once a step.

All that was pushed and finished, joined, is what the tokenizer makes of all tokens at once, and no piece of it ends inside
a character. Knows nothing of stops.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.backends.llm.text.pieces import Fallback, Part, Pieces

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_utf8_decoder = codecs.getincrementaldecoder("utf-8")

_UNDECIDED_TOKENS = 16
"""A text that ends with the replacement character for longer than this has it because the model means it."""


class Decoding(Protocol):
    """What is needed of a tokenizer: `text.tokenizer.Tokenizer`."""

    @property
    def pieces(self) -> Pieces | None:
        """None where only the tokenizer knows what its tokens add."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """All at once."""


class Detokenizer:
    """One for each choice."""

    __slots__ = ("finish", "push")

    push: Callable[[Sequence[int]], str]
    """Tokens that are new to the text that can be shown because of them."""
    finish: Callable[[], str]
    """The rest: text that was not whole, with the replacement character where it never will be."""

    def __init__(self, tokenizer: Decoding, skip_special: bool = True) -> None:
        pieces = tokenizer.pieces
        reader: _Bytes | _Sentences | _Window
        if pieces is None:
            reader = _Window(tokenizer, skip_special)
        elif pieces.fallback is None:
            reader = _Bytes(pieces.shown if skip_special else pieces.parts)
        else:
            reader = _Sentences(pieces, pieces.fallback, skip_special)
        self.push = reader.push
        self.finish = reader.finish


class _Bytes:
    """Byte-level BPE. Most tokens are whole characters, and cost a look into a list."""

    __slots__ = ("_count", "_decoder", "_open", "_parts")

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._count = len(parts)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._open = False
        """Whether the decoder holds the beginning of a character."""

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            # A model may have more ids than its tokenizer, to fill its matrix up.
            part = self._parts[token] if token < self._count else ""
            if type(part) is str:
                if self._open and part:
                    text += self.finish()
                text += part
            else:
                text += self._bytes(part)  # type: ignore[arg-type]
        return text

    def _bytes(self, part: bytes) -> str:
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = _utf8_decoder("replace")
        text = decoder.decode(part)
        self._open = bool(decoder.getstate()[0])
        return text

    def finish(self) -> str:
        if not self._open or self._decoder is None:
            return ""
        self._open = False
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text


class _Sentences:
    """The sentencepiece kind. A run of bytes is judged as a whole, hence held back until other text follows it."""

    __slots__ = ("_count", "_fallback", "_first", "_parts", "_run", "_skipped", "_to_strip")

    def __init__(self, pieces: Pieces, fallback: Fallback, skip_special: bool) -> None:
        self._parts = pieces.parts
        self._count = len(pieces.parts)
        self._skipped = pieces.specials if skip_special else frozenset()
        self._fallback = fallback
        self._first = True
        self._run = b""
        self._to_strip = fallback.strip_count

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            if token >= self._count or token in self._skipped:
                continue
            part = self._parts[token]
            if type(part) is not str:
                self._run += part  # type: ignore[operator]
                continue
            if self._run:
                text += self._flushed()
            if self._first:
                name = self._fallback.tokens.get(token)
                if name is None:
                    continue
                self._first = False
                part = self._fallback.first(name)
            text += part
        return self._stripped(text) if self._to_strip and text else text

    def finish(self) -> str:
        text = self._flushed() if self._run else ""
        return self._stripped(text) if self._to_strip and text else text

    def _flushed(self) -> str:
        text = self._fallback.run(self._run, self._first)
        self._run = b""
        self._first = False
        return text

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._fallback.stripped:
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


class _Window:
    """Any tokenizer: decodes the last few tokens with and without what is new, and shows the difference."""

    __slots__ = ("_before", "_ids", "_known", "_skip_special", "_tokenizer")

    def __init__(self, tokenizer: Decoding, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        """The tokens last shown, as context, and those after them."""
        self._known = 0
        """How many of them are context."""
        self._before = ""
        """The text of the context."""

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        return self._shown(last=False)

    def finish(self) -> str:
        return self._shown(last=True)

    def _shown(self, *, last: bool) -> str:
        fresh = len(self._ids) - self._known
        if not fresh:
            return ""
        text = self._tokenizer.decode(self._ids, self._skip_special)
        undecided = text.endswith(_REPLACEMENT) and fresh < _UNDECIDED_TOKENS
        if not last and (undecided or len(text) <= len(self._before)):
            return ""
        shown = text[len(self._before) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._before = self._tokenizer.decode(self._ids, self._skip_special)
        return shown
