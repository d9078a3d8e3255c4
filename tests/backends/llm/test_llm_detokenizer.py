# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_tokenizers import TABLED, tokenizer

from headrace.backends.llm.detokenizer import Detokenizer, pieces_of
from support.properties import examples

TEXTS = [
    "the quick brown fox",
    " a space first,  two  inside\nand a line",
    "Grüße, naïve 日本語 🙂🚀👩‍👩‍👧 done",
    "🙂",
    "ends with 🙂",
]


def _streamed(kind: str, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer(kind), skip_special)
    return [*(stream.push([token]) for token in ids), stream.finish()]


@pytest.mark.parametrize("kind", TABLED)
def test_tables_are_used_for_known_families(kind: str) -> None:
    assert tokenizer(kind).pieces is not None


@pytest.mark.parametrize("kind", [*TABLED[:4], *(pytest.param(kind, marks=pytest.mark.slow) for kind in TABLED[4:])])
@given(data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_random_tokens_in_steps_become_what_the_library_makes_of_all_together(kind: str, data: st.DataObject) -> None:
    words = tokenizer(kind)
    token = st.integers(0, words.vocabulary + 5)
    if kind != "bytes":
        # Runs of bytes, right and wrong ones, would be rare otherwise.
        names = words.hugging_face.get_vocab()
        token |= st.sampled_from(
            [names[f"<0x{byte:02X}>"] for byte in [0xE2, 0x82, 0xAC, 0x96, 0x81, 0x41, 0x20, 0xFF]]
        )
    ids = data.draw(st.lists(token, max_size=30))
    skip = data.draw(st.booleans())
    known = [place for place in ids if place < words.vocabulary]
    expected = words.hugging_face.decode(known, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert "".join(_streamed(kind, ids, skip)) == expected
    cut = data.draw(st.integers(0, len(ids)))
    stream = Detokenizer(words, skip)
    assert stream.push(ids[:cut]) + stream.push(ids[cut:]) + stream.finish() == expected


@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma", "wordpiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_of_a_real_text_has_a_broken_character(kind: str, text: str) -> None:
    words = tokenizer(kind)
    pieces = _streamed(kind, words.encode(text, add_special=False))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) == words.decode(words.encode(text, add_special=False))


@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma"])
def test_special_tokens_that_are_markers_stay(kind: str) -> None:
    words = tokenizer(kind)
    assert words.pieces is not None
    kept, dropped = sorted(words.pieces.specials)[:2]
    ids = [dropped, *words.encode("fox", add_special=False), kept, dropped]
    stream = Detokenizer(words, kept=(words.token_text(kept), "<not a token>"))
    assert stream.push(ids) + stream.finish() == words.decode(ids) + words.token_text(kept)
    without = Detokenizer(words, kept=("<not a token>",))
    assert without.push(ids) + without.finish() == words.decode(ids)


def test_a_character_is_shown_as_soon_as_it_is_whole() -> None:
    words = tokenizer("bytes")
    ids = words.encode("🚧x", add_special=False)
    assert [len(piece) for piece in _streamed("bytes", ids)][-3:] == [1, 1, 0]
    assert _streamed("bytes", ids)[:-3] == [""] * (len(ids) - 2)


def test_what_never_becomes_whole_ends_as_one_replacement_character() -> None:
    words = tokenizer("bytes")
    ids = words.encode("🚧", add_special=False)[:-1]
    assert _streamed("bytes", ids) == [""] * len(ids) + ["\N{REPLACEMENT CHARACTER}"]


def test_an_unknown_decoder_is_left_to_the_library() -> None:
    words = tokenizer("wordpiece")
    assert words.pieces is None
    ids = words.encode("the quick brown fox", add_special=False)
    pieces = _streamed("wordpiece", ids)
    assert "".join(pieces) == words.decode(ids)
    assert all(pieces[:-1])


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        {"type": "Replace", "pattern": {"Regex": "x+"}, "content": ""},
    ],
)
def test_steps_that_tables_cannot_tell_are_not_guessed(decoder: dict[str, object] | None) -> None:
    assert pieces_of(decoder, {0: "a"}, frozenset()) is None
