# SPDX-License-Identifier: Apache-2.0
"""The detokenizer: tokens to text as they arrive, and stop strings in that text. The engine calls it per choice and step.

The texts of all pushes and `finish`, joined, are what the tokenizer decodes from all tokens together, and none ends inside a
character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_utf8_decoder = codecs.getincrementaldecoder("utf-8")

_UNDECIDED_TOKENS = 16
"""A text that ends with the replacement character for more tokens than this contains it on purpose."""
Piece = str | bytes
"""What a token adds: text, or bytes that form a character only with those of other tokens."""
_Step = Callable[[str, bool], str]
"""Changes the text of a token; the second argument is whether it is the first."""


class TokenizerLike(Protocol):
    """The part of the tokenizer that the detokenizer needs."""

    @property
    def pieces(self) -> TokenPieces | None:
        """None if only the tokenizer can decode its tokens."""

    def pieces_keeping(self, kept: tuple[str, ...]) -> TokenPieces | None:
        """Return the pieces for a text in which these special tokens stay."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of all tokens."""


class Detokenizer:
    """Decodes the tokens of one choice as they arrive."""

    __slots__ = ("finish", "push")

    push: Callable[[Sequence[int]], str]
    """Takes new tokens; returns the text that is complete because of them."""
    finish: Callable[[], str]
    """Returns the rest, with the replacement character for incomplete characters."""

    def __init__(self, tokenizer: TokenizerLike, skip_special: bool = True, kept: tuple[str, ...] = ()) -> None:
        """`kept`: special tokens that are not skipped."""
        pieces = tokenizer.pieces_keeping(kept) if kept else tokenizer.pieces
        reader: _ByteLevelReader | _SentencePieceReader | _WindowReader
        if pieces is None:
            reader = _WindowReader(tokenizer, skip_special and not kept)
        elif pieces.fallback is None:
            reader = _ByteLevelReader(pieces.without_special if skip_special else pieces.all)
        else:
            reader = _SentencePieceReader(pieces, pieces.fallback, skip_special)
        self.push = reader.push
        self.finish = reader.finish


class _ByteLevelReader:
    """Decodes byte-level BPE. Most tokens are complete characters and cost one list lookup."""

    __slots__ = ("_count", "_decoder", "_open", "_parts")

    def __init__(self, parts: list[Piece]) -> None:
        self._parts = parts
        self._count = len(parts)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._open = False
        """Whether the decoder holds an incomplete character."""

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            # A model may have more ids than its tokenizer, as padding.
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


class _SentencePieceReader:
    """Decodes SentencePiece tokens. A run of byte tokens is decoded together, so it is held back until text follows."""

    __slots__ = ("_count", "_fallback", "_first", "_parts", "_run", "_skipped", "_to_strip")

    def __init__(self, pieces: TokenPieces, fallback: ByteFallback, skip_special: bool) -> None:
        self._parts = pieces.all
        self._count = len(pieces.all)
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


class _WindowReader:
    """Works with any tokenizer: decodes the last few tokens with and without the new ones, and returns the difference."""

    __slots__ = ("_before", "_ids", "_known", "_skip_special", "_tokenizer")

    def __init__(self, tokenizer: TokenizerLike, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        """The tokens that were returned last, as context, and the tokens after them."""
        self._known = 0
        """Number of context tokens."""
        self._before = ""
        """The text of the context."""

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        return self._new_text(last=False)

    def finish(self) -> str:
        return self._new_text(last=True)

    def _new_text(self, *, last: bool) -> str:
        fresh = len(self._ids) - self._known
        if not fresh:
            return ""
        text = self._tokenizer.decode(self._ids, self._skip_special)
        undecided = text.endswith(_REPLACEMENT) and fresh < _UNDECIDED_TOKENS
        if not last and (undecided or len(text) <= len(self._before)):
            return ""
        new_text = text[len(self._before) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._before = self._tokenizer.decode(self._ids, self._skip_special)
        return new_text


class StopStrings:
    """Finds the stop strings of one choice, across the borders of the text that arrives.

    The result does not depend on how the text was cut: the stop that is complete first wins, and of those that end at the
    same place the longest. Only text that could be the beginning of a stop is held back.
    """

    __slots__ = ("_held", "_included", "_searches", "matched")

    def __init__(self, stops: tuple[str, ...] = (), *, included: bool = False) -> None:
        """`included`: whether the stop is part of the text."""
        self._included = included
        self._searches = [_StopSearch(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self.matched = ""
        """The stop string that was found; "" before."""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be sent, and whether a stop was found: it was the last text then."""
        searches = self._searches
        if not searches:
            return text, False
        if self.matched:
            return "", True
        ends = [(end, -search.length, search.stop) for search in searches if (end := search.find(text))]
        if ends:
            end, length, self.matched = min(ends)
            joined = self._held + text[:end]
            self._held = ""
            return joined if self._included else joined[: len(joined) + length], True
        joined = self._held + text
        matched = max(search.matched for search in searches)
        if not matched:
            self._held = ""
            return joined, False
        self._held = joined[-matched:]
        return joined[:-matched], False

    def finish(self) -> str:
        """Return the text that was held back, at the end of a choice without a stop."""
        held, self._held = self._held, ""
        return held


class _StopSearch:
    """Searches for one stop with the Knuth-Morris-Pratt algorithm, so that no text is read twice."""

    __slots__ = ("_back", "_first", "length", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._first = stop[0]
        self._back: list[int] = []
        """For each matched length, the next shorter one that also matches. Computed when first needed."""
        self.length = len(stop)
        self.matched = 0

    def find(self, text: str) -> int:
        """Return where in `text` the stop first ends, or 0."""
        matched = self.matched
        # Most text does not even contain the first character, and `in` is fast.
        if not matched and self._first not in text:
            return 0
        stop, back = self.stop, self._back or self._build_table()
        for position, character in enumerate(text):
            while matched and stop[matched] != character:
                matched = back[matched]
            if stop[matched] == character:
                matched += 1
                if matched == self.length:
                    self.matched = 0
                    return position + 1
        self.matched = matched
        return 0

    def _build_table(self) -> list[int]:
        stop, back, matched = self.stop, [0, 0], 0
        for character in stop[1:]:
            while matched and stop[matched] != character:
                matched = back[matched]
            matched += stop[matched] == character
            back.append(matched)
        self._back = back
        return back


@dataclass(frozen=True, slots=True)
class TokenPieces:
    """What each token adds to a text, computed once per tokenizer from its declared decoder; "" for unused ids.

    Two families cover nearly all models: byte-level BPE, where a token is bytes, and SentencePiece, where it is text with a
    sign for the space and some tokens are one byte each.
    """

    all: list[Piece]
    without_special: list[Piece]
    """The same with "" for special tokens."""
    specials: frozenset[int]
    fallback: ByteFallback | None
    """None for byte-level BPE."""

    def keeping(self, kept: frozenset[int]) -> TokenPieces:
        """Return the pieces for a text in which these special tokens stay."""
        without_special = [*self.without_special]
        for token_id in kept:
            without_special[token_id] = self.all[token_id]
        return replace(self, without_special=without_special, specials=self.specials - kept)


@dataclass(frozen=True, slots=True)
class ByteFallback:
    """How SentencePiece joins the pieces of tokens."""

    tokens: Mapping[int, str]
    before: tuple[_Step, ...]
    after: tuple[_Step, ...]
    """Steps on each token before and after byte tokens become characters."""
    stripped: str
    strip_count: int
    """This character is stripped from the beginning of the text, at most `strip_count` times."""

    def first(self, token: str) -> str:
        """Return the text of a first token."""
        return _apply(self.after, _apply(self.before, token, True), True)

    def run(self, run: bytes, first: bool) -> str:
        """Return the text of a run of byte tokens. As in the library, one invalid byte invalidates the whole run."""
        try:
            pieces = [run.decode()]
        except UnicodeDecodeError:
            pieces = ["\N{REPLACEMENT CHARACTER}"] * len(run)
        return "".join(_apply(self.after, piece, first and not index) for index, piece in enumerate(pieces))


def pieces_of(
    decoder: Mapping[str, Any] | None, tokens: Mapping[int, str], specials: frozenset[int]
) -> TokenPieces | None:
    """Return the pieces for the `decoder` of a tokenizer.json, the token of each id, and the special ids.

    None for an unknown decoder: the tokenizer itself decodes then.
    """
    chain = _chain(decoder)
    if len(chain) == 1 and chain[0].get("type") == "ByteLevel":
        fallback, part = None, _byte_level_part(_byte_of_character())
    else:
        byte_fallback = _byte_fallback(chain, tokens)
        if byte_fallback is None:
            return None
        fallback, part = byte_fallback
    parts: list[Piece] = [""] * (max(tokens, default=-1) + 1)
    for token_id, token in tokens.items():
        parts[token_id] = part(token)
    without_special = [*parts]
    for token_id in specials:
        if token_id < len(without_special):
            without_special[token_id] = ""
    return TokenPieces(parts, without_special, specials, fallback)


def _chain(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", ()) for step in _chain(inner)]


def _byte_level_part(byte_of: Mapping[str, int]) -> Callable[[str], Piece]:
    def part(token: str) -> Piece:
        try:
            raw = bytes([byte_of[character] for character in token])
        except KeyError:
            # An added token with characters that stand for no byte: it is plain text.
            return token
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    return part


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes are themselves, the others are characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_fallback(
    chain: Sequence[Mapping[str, Any]], tokens: Mapping[int, str]
) -> tuple[ByteFallback, Callable[[str], Piece]] | None:
    before: list[_Step] = []
    after: list[_Step] = []
    bytes_joined = fused = False
    stripped, strip_count = "", 0
    if not chain:
        return None
    for step in chain:
        kind = step.get("type")
        if kind == "ByteFallback" and not bytes_joined and not fused:
            bytes_joined = True
        elif kind == "Fuse" and not fused:
            fused = True
        elif kind == "Strip" and fused and not strip_count and not step.get("stop"):
            stripped, strip_count = step["content"], step["start"]
        elif not fused and (change := _change(step)) is not None:
            (after if bytes_joined else before).append(change)
        else:
            return None
    fallback = ByteFallback(tokens, tuple(before), tuple(after), stripped, strip_count)

    def part(token: str) -> Piece:
        text = _apply(fallback.before, token, False)
        byte = _byte_token(text) if bytes_joined else None
        return _apply(fallback.after, text, False) if byte is None else byte

    return fallback, part


def _change(step: Mapping[str, Any]) -> _Step | None:
    if step.get("type") == "Metaspace":
        sign: str = step["replacement"]
        drops = step.get("prepend_scheme", "always") != "never"
        return lambda text, first: text.replace(sign, "" if first and drops else " ")
    if step.get("type") == "Replace" and (old := step.get("pattern", {}).get("String")):
        new: str = step["content"]
        return lambda text, _first: text.replace(old, new)
    return None


def _byte_token(token: str) -> bytes | None:
    """Return the byte of a token such as <0xE2>."""
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def _apply(steps: Sequence[_Step], text: str, first: bool) -> str:
    for step in steps:
        text = step(text, first)
    return text
