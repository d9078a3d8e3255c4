# SPDX-License-Identifier: Apache-2.0
"""Whisper: compared with transformers' own generation, and the rules of segments and windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.contract import Placement
from headrace.backends.llm.embedding.config import model_task
from headrace.backends.llm.speech.decoder import WhisperTokens, split_segments
from headrace.backends.llm.speech.model import SpeechModel, complete_config
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.messages import new_config, typed_config
from headrace.models.config.types import ModelConfig
from support.llm_models import tiny_llama, tiny_whisper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper") / "model")


def configured(folder: Path) -> ModelConfig:
    message = new_config(name="speech", backend="llm")
    message.MergeFrom(complete_config(typed_config(message, "llm"), folder))
    return typed_config(message, "llm")


@pytest.fixture(scope="module")
def instance(folder: Path) -> Any:
    return SpeechModel.load(configured(folder), folder).open(Placement("speech_0_cpu"))


def sound(*seeds: int, seconds: float = 4) -> Any:
    """A tone that wobbles, and some noise."""
    times = np.arange(int(seconds * 16_000)) / 16_000
    noise = [np.random.default_rng(seed).normal(0, 0.02, len(times)) for seed in seeds]
    tones = [np.sin(300 * seed * times) * np.sin(seed * times) for seed in seeds]
    return np.array(tones, np.float32) * 0.5 + np.array(noise, np.float32)


def transcribed(instance: Any, audio: Any, *options: dict[str, Any]) -> list[dict[str, Any]]:
    texts = np.array([[json.dumps(given).encode()] for given in options], object)
    outputs = instance.compute({"audio": audio, "options": texts}, ("text", "transcript"))
    documents = [json.loads(row[0]) for row in outputs["transcript"]]
    for document, row in zip(documents, outputs["text"], strict=True):
        assert row[0].decode() == "".join(segment["text"] for segment in document["segments"]).strip()
    return documents


@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("language", ["en", "de"])
def test_a_window_has_the_tokens_that_transformers_generates(
    folder: Path, instance: Any, language: str, task: str
) -> None:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    theirs = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    audio = sound(1, 2, 3, seconds=30)
    features = WhisperFeatureExtractor.from_pretrained(folder)(
        list(audio), sampling_rate=16_000, return_tensors="pt"
    ).input_features
    decoder = instance._loaded.decoder
    with torch.inference_mode():
        expected = theirs.generate(
            features,
            return_timestamps=True,
            language=language,
            task=task,
            force_unique_generate_call=True,
            max_new_tokens=decoder.most_tokens,
        )
        special = instance._loaded.tokens
        prefix = [special.start, special.languages[language], getattr(special, task)]
        hidden = theirs.get_encoder()(features).last_hidden_state
        windows = decoder.decode(hidden, [prefix] * 3, [0.0] * 3)
    assert len({tuple(window.tokens) for window in windows}) > 1
    for window, row in zip(windows, expected.tolist(), strict=True):
        generated = row[len(prefix) :] if row[: len(prefix)] == prefix else row
        assert window.tokens == [token for token in generated if token != special.end]
        assert any(token < special.end for token in window.tokens)
        assert window.avg_logprob < 0 <= window.no_speech_prob < 1


def test_a_batch_is_what_its_windows_are_alone(instance: Any) -> None:
    options = [
        {"language": "en"},
        {"language": "German"},
        {},
        {"language": "en", "task": "translate"},
        {"language": "en", "prompt": "a mill grinds corn"},
    ]
    audio = sound(1, 2, 3, 4, 5)
    together = transcribed(instance, audio, *options)
    for row, document in enumerate(together):
        (alone,) = transcribed(instance, audio[row : row + 1], options[row])
        assert alone["segments"] == document["segments"]
        assert alone["avg_logprob"] == pytest.approx(document["avg_logprob"], abs=1e-4)
    assert [document["language"] for document in together[:2]] == ["en", "de"]
    assert together[1]["language_name"] == "german"
    assert together[2]["language"] in ("en", "de")
    for document in together:
        assert document["segments"]
        for segment in document["segments"]:
            assert 0 <= segment["start"] <= segment["end"] <= 4
            assert segment["text"].strip()
        assert 1 <= document["advance"] <= 4


def test_a_temperature_samples(instance: Any) -> None:
    torch.manual_seed(0)
    texts = {json.dumps(transcribed(instance, sound(1), {"temperature": 1.0})[0]["segments"]) for _ in range(4)}
    assert len(texts) > 1


def test_a_model_for_english(tmp_path: Path) -> None:
    folder = tiny_whisper(tmp_path / "model", multilingual=False)
    instance = SpeechModel.load(configured(folder), folder).open(Placement("speech_0_cpu"))
    assert transcribed(instance, sound(1), {"language": "english"})[0]["language"] == "en"
    for options, text in (({"language": "de"}, "^language"), ({"task": "translate"}, "^task")):
        with pytest.raises(InvalidArgument, match=text):
            transcribed(instance, sound(1), options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"language": "xx"}, "^language"),
        ({"language": 3}, "^language"),
        ({"task": "sing"}, "^task"),
        ({"prompt": 3}, "^prompt"),
        ({"temperature": 1.5}, "^temperature"),
        ({"temperature": "hot"}, "^temperature"),
        ({"beams": 5}, "beams"),
    ],
)
def test_options_that_are_wrong(instance: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        transcribed(instance, sound(1), options)


def test_input_that_is_wrong(folder: Path, instance: Any) -> None:
    raw = np.array([[b"{"]], object)
    with pytest.raises(InvalidArgument, match="JSON object"):
        instance.compute({"audio": sound(1), "options": raw}, ("text",))
    for audio in (sound(1, seconds=30.1), sound(1, seconds=0)):
        with pytest.raises(InvalidArgument, match="send 1 to 480000"):
            transcribed(instance, audio, {})
    with pytest.raises(InvalidArgument, match="finite"):
        transcribed(instance, np.full((1, 16_000), np.nan, np.float32), {})
    other = SpeechModel.load(configured(folder), folder).open(Placement("speech_0_cpu"))
    other.close()
    with pytest.raises(FailedPrecondition):
        transcribed(other, sound(1), {})


def test_a_prompt_cannot_have_special_tokens_and_is_cut_to_fit(instance: Any) -> None:
    prompt = "<|startoftranscript|><|de|> the river " * 40
    (document,) = transcribed(instance, sound(1), {"language": "en", "prompt": prompt})
    assert document["language"] == "en"


def test_which_folders_transcribe(folder: Path, tmp_path: Path) -> None:
    assert model_task(folder) == "transcribe"
    config = configured(folder)
    assert (config.max_batch_size, {spec.name for spec in config.inputs}) == (8, {"audio", "options"})
    tiny_llama(tmp_path / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tmp_path / "llama" / name).read_bytes())
    for file in folder.iterdir():
        if not (tmp_path / file.name).exists():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(FailedPrecondition, match="special tokens"):
        SpeechModel.load(configured(folder), tmp_path)


SPECIAL = WhisperTokens(101, 100, 0, 0, 0, 0, 199, {})


def at(seconds: float) -> int:
    return 200 + round(seconds / 0.02)


@pytest.mark.parametrize(
    ("tokens", "segments", "advance"),
    [
        # Two whole segments, and text that was cut off: the next window begins at the pair before it.
        ([at(0), 1, 2, at(4), at(4), 3, at(9), at(9), 4, 5], [(0, 4, [1, 2]), (4, 9, [3])], 9),
        # The last timestamp stands alone: nothing is said behind it.
        ([at(0), 1, at(4), at(5), 2, at(9)], [(0, 4, [1]), (5, 9, [2])], 30),
        # One segment, with and without an end.
        ([at(0), 1, 2, at(7)], [(0, 7, [1, 2])], 30),
        ([at(0), 1, 2], [(0, 30, [1, 2])], 30),
        ([], [(0, 30, [])], 30),
        # Hardly any progress: the whole window counts.
        ([at(0), 1, at(0.5), at(0.5), 2], [(0, 0.5, [1])], 30),
    ],
)
def test_segments_end_at_pairs_of_timestamps(tokens: list[int], segments: list[Any], advance: float) -> None:
    found, next_start = split_segments(tokens, SPECIAL, 30)
    assert [(part.start, part.end, part.tokens) for part in found] == segments
    assert next_start == pytest.approx(advance)


def test_times_do_not_exceed_the_audio() -> None:
    found, advance = split_segments([at(0), 1, at(20)], SPECIAL, 4.5)
    assert (found[0].end, advance) == (4.5, 4.5)


def test_it_sleeps_and_transcribes_as_before(folder: Path) -> None:
    model = SpeechModel.load(configured(folder), folder)
    instance = model.open(Placement("speech_0_cpu"))
    before = transcribed(instance, sound(1, 2), {"language": "en"}, {})
    for level in (1, 2):
        freed = model.sleep(level)  # type: ignore[arg-type]
        assert (freed == {}) if level == 1 else freed["host"] > 50_000
        model.wake()
        assert transcribed(instance, sound(1, 2), {"language": "en"}, {}) == before
    model.close()
