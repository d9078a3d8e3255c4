# SPDX-License-Identifier: Apache-2.0
"""A speech recognition model (Whisper) on PyTorch: its weights, and instances that transcribe batches of windows.

The `llm` backend uses it for folders of `WhisperForConditionalGeneration`. `core.transcription` describes its tensors. A
request is a window of at most 30 seconds, so that long files take turns with others; protocols split them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from headrace.backends.contract import Array, Placement, SleepLevel
from headrace.backends.llm.encoder import (
    DeviceWeights,
    TransformerFolder,
    complete_transformer,
    computing,
    from_pretrained,
    set_threads,
)
from headrace.backends.llm.speech.decoder import (
    DecodedWindow,
    WhisperDecoder,
    WhisperTokens,
    read_tokens,
    split_segments,
)
from headrace.backends.signature import Port, Signature, decode_text
from headrace.backends.torch_import import device_of
from headrace.core.dtypes import BYTES, FP32
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.transcription import (
    AUDIO,
    OPTIONS,
    SAMPLE_RATE,
    TEXT,
    TRANSCRIPT,
    WINDOW_SAMPLES,
    WINDOW_SECONDS,
)
from headrace.models.config.types import ModelConfig

MAX_BATCH_SIZE = 8
_OPTIONS_CHARACTERS = 65_536
_SIGNATURE = Signature(
    {AUDIO: Port(AUDIO, "samples", FP32, (-1, -1)), OPTIONS: Port(OPTIONS, "text", BYTES, (-1, 1))},
    {TEXT: Port(TEXT, "text", BYTES, (-1, 1)), TRANSCRIPT: Port(TRANSCRIPT, "text", BYTES, (-1, 1))},
    {},
)


def complete_config(config: ModelConfig, folder: Path) -> Any:
    """Add the tensors and the batch size to a configuration that leaves them out. For `contract.Backend.complete`."""
    return complete_transformer(config, folder, _SIGNATURE, MAX_BATCH_SIZE)


class SpeechModel:
    """One version of a speech recognition model. Instances on one device share the weights."""

    def __init__(self, files: TransformerFolder) -> None:
        from transformers import AutoFeatureExtractor
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        self._files = files
        self._extractor = from_pretrained(
            files.path, "preprocessor_config.json", AutoFeatureExtractor.from_pretrained, files.settings
        )
        self._names: Mapping[str, str] = LANGUAGES
        vocabulary = files.tokenizer.get_vocab()
        tokens = read_tokens(vocabulary, list(LANGUAGES), multilingual="<|transcribe|>" in vocabulary)
        if tokens is None:
            raise FailedPrecondition(
                f"the tokenizer in '{files.path.name}' lacks Whisper's special tokens: copy the whole model folder"
            )
        self._tokens = tokens
        self._weights = DeviceWeights(
            files.name, [files.path], self._load_weights, lambda weights: [*weights[1].model.parameters()]
        )

    @classmethod
    def load(cls, config: ModelConfig, folder: Path) -> SpeechModel:
        """Read the folder's configuration and tokenizer. The first instance on a device loads the weights."""
        return cls(TransformerFolder.read(config, folder, _SIGNATURE, "transcribes batches of windows", MAX_BATCH_SIZE))

    def open(self, placement: Placement) -> SpeechInstance:
        """Return an instance; load the weights if it is the first on its device."""
        files = self._files
        device, settings = device_of(files.name, placement), files.settings
        encoder, decoder = self._weights.on(device)
        loaded = LoadedSpeechModel(
            tokenizer=files.tokenizer,
            extractor=self._extractor,
            encoder=encoder,
            decoder=decoder,
            tokens=self._tokens,
            language_names=self._names,
            threads=settings.threads if device.type == "cpu" else 0,
            device=device,
        )
        return SpeechInstance(files.name, loaded, self._weights)

    def sleep(self, level: SleepLevel) -> Mapping[str, int]:
        """See `contract.SleepableModel`."""
        return self._weights.sleep(level)

    def wake(self) -> None:
        """See `contract.SleepableModel`."""
        self._weights.wake()

    def close(self) -> None:
        """Free the weights."""
        self._weights.clear()

    def _load_weights(self, device: torch.device) -> tuple[Any, WhisperDecoder]:
        from transformers import AutoModelForSpeechSeq2Seq

        model = self._files.load_weights(AutoModelForSpeechSeq2Seq, device)
        return model.get_encoder(), WhisperDecoder(model, self._multilingual(model))

    def _multilingual(self, model: Any) -> WhisperTokens:
        """Return the special tokens. The vocabulary of models for English has other languages too."""
        if getattr(model.generation_config, "is_multilingual", True) is False:
            self._tokens = replace(self._tokens, languages={})
        return self._tokens


@dataclass(frozen=True, slots=True)
class LoadedSpeechModel:
    """A model with its weights, and what it needs beside them."""

    tokenizer: Any
    extractor: Any
    encoder: Any
    decoder: WhisperDecoder
    tokens: WhisperTokens
    language_names: Mapping[str, str]
    """By code."""
    threads: int
    device: Any


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of one window."""

    language: str
    """A code; "" to detect it."""
    translates: bool
    prompt: list[int]
    temperature: float


class SpeechInstance:
    """Transcribes batches of windows. Implements `contract.ComputeInstance`."""

    def __init__(self, name: str, loaded: LoadedSpeechModel, weights: DeviceWeights[Any]) -> None:
        self._name = name
        self._weights = weights
        self._loaded: LoadedSpeechModel | None = loaded

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Transcribe windows of one length, [rows, samples]."""
        loaded = self._loaded
        if loaded is None:
            raise FailedPrecondition(f"an instance of model '{self._name}' is closed")
        set_threads(loaded.threads)
        audio = inputs[AUDIO]
        if not 0 < audio.shape[1] <= WINDOW_SAMPLES:
            raise InvalidArgument(
                f"input '{AUDIO}' has {audio.shape[1]} samples: send 1 to {WINDOW_SAMPLES}, which are {WINDOW_SECONDS} "
                f"seconds at {SAMPLE_RATE} Hz"
            )
        if not np.isfinite(audio).all():
            raise InvalidArgument(f"input '{AUDIO}' has numbers that are not finite: send samples from -1 to 1")
        options = [_read_options(loaded, text) for text in decode_text(OPTIONS, inputs[OPTIONS])]
        with computing(self._name, self._weights):
            documents = self._transcribe(loaded, audio, options)
        texts = ["".join(segment["text"] for segment in document["segments"]) for document in documents]
        return {
            TEXT: _column([text.strip().encode() for text in texts]),
            TRANSCRIPT: _column([orjson.dumps(document) for document in documents]),
        }

    def close(self) -> None:
        """Release the model."""
        self._loaded = None

    def _transcribe(self, loaded: LoadedSpeechModel, audio: Array, options: list[_Options]) -> list[dict[str, Any]]:
        features = loaded.extractor(list(audio), sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        hidden = loaded.encoder(features.to(loaded.device, loaded.encoder.dtype)).last_hidden_state
        languages = self._languages(loaded, hidden, options)
        prefixes = [_prefix(loaded, *pair) for pair in zip(options, languages, strict=True)]
        groups: dict[int, list[int]] = {}
        for row, prefix in enumerate(prefixes):
            groups.setdefault(len(prefix), []).append(row)
        windows: dict[int, DecodedWindow] = {}
        for rows in groups.values():
            decoded = loaded.decoder.decode(
                hidden[rows], [prefixes[row] for row in rows], [options[row].temperature for row in rows]
            )
            windows.update(zip(rows, decoded, strict=True))
        seconds = audio.shape[1] / SAMPLE_RATE
        return [_document(loaded, windows[row], languages[row], seconds) for row in range(len(options))]

    def _languages(self, loaded: LoadedSpeechModel, hidden: torch.Tensor, options: list[_Options]) -> list[str]:
        if not loaded.tokens.languages:
            return ["en"] * len(options)
        languages = [option.language for option in options]
        unknown = [row for row, language in enumerate(languages) if not language]
        if unknown:
            for row, language in zip(unknown, loaded.decoder.detect_languages(hidden[unknown]), strict=True):
                languages[row] = language
        return languages


def _column(values: list[bytes]) -> Array:
    array = np.empty((len(values), 1), object)
    array[:, 0] = values
    return array


def _prefix(loaded: LoadedSpeechModel, options: _Options, language: str) -> list[int]:
    """Return the tokens that the decoder begins with."""
    tokens = loaded.tokens
    prefix = [tokens.previous, *options.prompt] if options.prompt else []
    prefix.append(tokens.start)
    if tokens.languages:
        prefix += [tokens.languages[language], tokens.translate if options.translates else tokens.transcribe]
    return prefix


def _document(loaded: LoadedSpeechModel, window: DecodedWindow, language: str, seconds: float) -> dict[str, Any]:
    """Return the output `TRANSCRIPT` of a window."""
    parts, advance = split_segments(window.tokens, loaded.tokens, seconds)
    segments = []
    for part in parts:
        text = loaded.tokenizer.decode(part.tokens, skip_special_tokens=True)
        if text.strip():
            segments.append({"start": part.start, "end": part.end, "text": text, "tokens": part.tokens})
    raw = "".join(segment["text"] for segment in segments).encode(errors="replace")
    return {
        "language": language,
        "language_name": loaded.language_names.get(language, language),
        "segments": segments,
        "advance": advance,
        "avg_logprob": window.avg_logprob,
        "no_speech_prob": window.no_speech_prob,
        "compression_ratio": len(raw) / len(zlib.compress(raw)) if raw else 0.0,
    }


def _read_options(loaded: LoadedSpeechModel, text: str) -> _Options:
    if len(text) > _OPTIONS_CHARACTERS:
        raise InvalidArgument(
            f"input '{OPTIONS}' has {len(text)} characters; at most {_OPTIONS_CHARACTERS} are allowed"
        )
    try:
        values = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        raise InvalidArgument(f"input '{OPTIONS}' must be a JSON object")
    unknown = values.keys() - {"language", "task", "prompt", "temperature"}
    if unknown:
        raise InvalidArgument(
            f"input '{OPTIONS}' has {min(unknown)[:64]!a}, which is not known: use language, task, prompt and temperature"
        )
    task, prompt, temperature = values.get("task", "transcribe"), values.get("prompt", ""), values.get("temperature", 0)
    if task not in ("transcribe", "translate"):
        raise InvalidArgument("task must be transcribe or translate")
    if task == "translate" and not loaded.tokens.languages:
        raise InvalidArgument("task translate needs a model that knows several languages: this one knows English")
    if not isinstance(prompt, str):
        raise InvalidArgument("prompt must be a string")
    if type(temperature) not in (int, float) or not math.isfinite(temperature) or not 0 <= temperature <= 1:
        raise InvalidArgument("temperature must be a number from 0 to 1")
    return _Options(
        _language(loaded, values.get("language")),
        task == "translate",
        _prompt_tokens(loaded, prompt),
        float(temperature),
    )


def _language(loaded: LoadedSpeechModel, value: object) -> str:
    """Return the code of a language given by code or English name."""
    if value is None or value == "":
        return ""
    codes = {name: code for code, name in loaded.language_names.items()}
    given = value.lower() if isinstance(value, str) else ""
    code = codes.get(given, given)
    if code not in (loaded.tokens.languages or ("en",)):
        raise InvalidArgument("language is not one that the model knows: use its ISO 639-1 code, such as en")
    return code


def _prompt_tokens(loaded: LoadedSpeechModel, prompt: str) -> list[int]:
    if not prompt.strip():
        return []
    tokens = loaded.tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False)
    # One token of the context is for the marker before them.
    return [token for token in tokens if token < loaded.tokens.end][1 - loaded.decoder.most_tokens :]
