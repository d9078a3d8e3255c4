# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llm_tokenizers import TABLED, tokenizer

from headrace.backends.llm.tokenizer import Tokenizer
from headrace.core.errors import FailedPrecondition, InvalidArgument
from support.llm_models import CHAT_TEMPLATE, tiny_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def test_a_folder_is_read_and_text_round_trips(folder: Path) -> None:
    words = Tokenizer.load(folder)
    ids = words.encode("Grüße, the quick 🙂 fox", add_special=False)
    assert words.decode(ids) == "Grüße, the quick 🙂 fox"
    assert b"".join(map(words.token_bytes, ids)).decode() == "Grüße, the quick 🙂 fox"
    assert words.vocabulary == 512
    assert words.token_bytes(512) == b""


def test_tokens_are_those_of_transformers_and_never_cut(folder: Path) -> None:
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    words = Tokenizer.load(folder)
    text = "the quick brown fox <|end|> jumps over Grüße 🙂 "
    for add_special in (True, False):
        ids = words.encode(text, add_special)
        assert ids == words.hugging_face.encode(text, add_special_tokens=add_special)
        assert len(ids) > 10


def test_a_long_text_lets_other_threads_run() -> None:
    import threading
    import time

    words, text, ticks = tokenizer("bytes"), "the quick brown fox " * 50_000, []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.monotonic()
    words.encode(text)
    ended = time.monotonic()
    done.set()
    thread.join()
    assert len([moment for moment in ticks if started < moment < ended]) > 5


@pytest.mark.parametrize("kind", [kind for kind in TABLED if kind in {"bytes", "llama", "gemma"}])
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    words = tokenizer(kind)
    ids = words.encode("the sea 🚧 ok", add_special=False)
    assert b"".join(map(words.token_bytes, ids)).decode().strip() == "the sea 🚧 ok"
    assert words.token_bytes(words.eos_ids.__iter__().__next__()) == b"</s>"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 5]}, {"eos_token_id": 3}, {1, 3, 5, 7}),
        ({}, {"text_config": {"eos_token_id": 9}}, {1, 9}),
        ({"eos_token_id": [True, -1, "x", 4]}, {"eos_token_id": None}, {1, 4}),
    ],
)
def test_end_tokens_are_read_from_all_three_files(
    folder: Path, generation: dict[str, Any], config: dict[str, Any], expected: set[int]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    assert Tokenizer.load(folder).eos_ids == expected


def test_the_models_own_template_makes_what_transformers_makes(folder: Path) -> None:
    words = Tokenizer.load(folder)
    messages = [
        {"role": "system", "content": "Be <brief> & 'kind'."},
        {"role": "user", "content": [{"type": "text", "text": "Grüße"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    expected = words.hugging_face.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert words.apply_chat_template(messages, tools) == expected
    assert "<|assistant|>" not in words.apply_chat_template(messages[:1], (), {"add_generation_prompt": False})


def test_a_template_of_the_users_own_takes_its_place(folder: Path) -> None:
    words = Tokenizer.load(folder, chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert words.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|bos|>hi"
    with pytest.raises(InvalidArgument, match="chat_template is not a Jinja template: line 1"):
        Tokenizer.load(folder, chat_template="{% if %}")


def test_a_model_without_a_template_says_what_to_do(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(FailedPrecondition, match="/v1/completions.*'chat_template'"):
        Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_broken_template_of_the_model_leaves_completions(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}" + CHAT_TEMPLATE)
    words = Tokenizer.load(folder)
    assert words.encode("the", add_special=False)
    with pytest.raises(FailedPrecondition):
        words.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("damage", ["missing", "not json", "binary"])
def test_a_damaged_folder_is_refused_without_its_path(folder: Path, damage: str) -> None:
    for file in folder.iterdir():
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(b"{" if damage == "not json" else b"\x80\x04\x95\xff")
    with pytest.raises(InvalidArgument, match="tokenizer.json") as error:
        Tokenizer.load(folder)
    assert str(folder.parent) not in error.value.message


def test_a_damaged_configuration_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_bytes(b"[[[[" * 10_000)
    with pytest.raises(InvalidArgument, match=r"generation_config\.json is not JSON"):
        Tokenizer.load(folder)
