# SPDX-License-Identifier: Apache-2.0
"""What each token adds to a text, worked out once for a tokenizer from the decoder that it declares.

Made by `tokenizer`, read by `detokenising`. Two families are known, which nearly all models belong to: byte-level BPE,
where a token is bytes, and the sentencepiece kind, where it is text with a sign for the space and some tokens are one
byte each. Of any other decoder `pieces_of` answers None, and the tokenizer itself decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Part = str | bytes
"""Of a token: its text, or bytes that are a character only together with others."""

_Step = Callable[[str, bool], str]
"""Changes a token's text; told whether it is the first."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The parts of all tokens, by id; "" where there is no token of an id."""

    parts: list[Part]
    shown: list[Part]
    """The same without special tokens."""
    specials: frozenset[int]
    fallback: Fallback | None
    """None for byte-level BPE."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """How the sentencepiece kind puts parts together."""

    tokens: Mapping[int, str]
    before: tuple[_Step, ...]
    after: tuple[_Step, ...]
    """Steps on each token before and after bytes become characters."""
    stripped: str
    strip_count: int
    """This character is taken off the beginning of the whole, at most so often."""

    def first(self, token: str) -> str:
        """The text of a token that is the first."""
        return _through(self.after, _through(self.before, token, True), True)

    def run(self, run: bytes, first: bool) -> str:
        """The text of bytes between tokens that are text. Wrong bytes spoil the whole run: so does the library."""
        try:
            pieces = [run.decode()]
        except UnicodeDecodeError:
            pieces = ["\N{REPLACEMENT CHARACTER}"] * len(run)
        return "".join(_through(self.after, piece, first and not place) for place, piece in enumerate(pieces))


def pieces_of(decoder: Mapping[str, Any] | None, tokens: Mapping[int, str], specials: frozenset[int]) -> Pieces | None:
    """From `decoder` of a tokenizer.json, the token of each id, and which are special."""
    chain = _chain(decoder)
    if len(chain) == 1 and chain[0].get("type") == "ByteLevel":
        fallback, part = None, _byte_level_part(_byte_of_character())
    else:
        made = _fallback(chain, tokens)
        if made is None:
            return None
        fallback, part = made
    parts: list[Part] = [""] * (max(tokens, default=-1) + 1)
    for place, token in tokens.items():
        parts[place] = part(token)
    shown = [*parts]
    for place in specials:
        if place < len(shown):
            shown[place] = ""
    return Pieces(parts, shown, specials, fallback)


def _chain(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", ()) for step in _chain(inner)]


def _byte_level_part(byte_of: Mapping[str, int]) -> Callable[[str], Part]:
    def part(token: str) -> Part:
        try:
            raw = bytes([byte_of[character] for character in token])
        except KeyError:
            # A token that was added, with characters that stand for no byte: it is its text.
            return token
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    return part


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others are characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _fallback(
    chain: Sequence[Mapping[str, Any]], tokens: Mapping[int, str]
) -> tuple[Fallback, Callable[[str], Part]] | None:
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
    fallback = Fallback(tokens, tuple(before), tuple(after), stripped, strip_count)

    def part(token: str) -> Part:
        text = _through(fallback.before, token, False)
        byte = _byte_named(text) if bytes_joined else None
        return _through(fallback.after, text, False) if byte is None else byte

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


def _byte_named(token: str) -> bytes | None:
    """The byte of a token such as <0xE2>."""
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def _through(steps: Sequence[_Step], text: str, first: bool) -> str:
    for step in steps:
        text = step(text, first)
    return text
