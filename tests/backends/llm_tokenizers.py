# SPDX-License-Identifier: Apache-2.0
"""Tiny tokenizers of the families that models use, trained in a moment: for the tests of text, sampling and requests."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from headrace.backends.llm.chat_template import ChatTemplate
from headrace.backends.llm.tokenizer import Tokenizer

_TEXTS = [
    "the quick brown fox jumps over the lazy dog; the river runs to the sea, and back again",
    'json looks like {"name": "value", "list": [1, 2, 3], "true": false, "null": null}',
    "Grüße aus Köln, naïve café, 日本語のテキスト, emoji 🙂🚀 and numbers 0123456789",
]
ADDED = ["<|tool|>", " spaced ", "▁under", "Ġodd", "ünï", "<0xFFFF>"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    """One of KINDS."""
    return Tokenizer(fast_tokenizer(kind), frozenset({2}), None)


def with_template(kind: str, template: str) -> Tokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(fast_tokenizer(kind), frozenset({2}), ChatTemplate(template, special_tokens=special))


@cache
def fast_tokenizer(kind: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    steps = {
        "bytes": decoders.ByteLevel(),
        "llama": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        "metaspace": decoders.Metaspace(),
        "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
        "fallback-metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        "metaspace-fallback": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]),
        "wordpiece": decoders.WordPiece(cleanup=False),
    }
    special = ["<unk>", "<s>", "</s>"]
    byte_level = kind == "bytes"
    tokenizer = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False) if byte_level else pre_tokenizers.Metaspace("▁")
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    if not byte_level:
        tokenizer = Tokenizer.from_str(_with_bytes(tokenizer.to_str()))
    tokenizer.decoder = steps[kind]
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED])
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _with_bytes(text: str) -> str:
    document = json.loads(text)
    names = document["model"]["vocab"]
    for byte in range(256):
        names[f"<0x{byte:02X}>"] = len(names)
    document["model"]["byte_fallback"] = True
    return json.dumps(document)


TABLED = ["bytes", "llama", "gemma", "metaspace", "metaspace-never", "fallback-metaspace", "metaspace-fallback"]
"""Those whose tokens we know by heart; "wordpiece" stands for all others."""
