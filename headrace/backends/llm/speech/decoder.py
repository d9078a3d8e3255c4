# SPDX-License-Identifier: Apache-2.0
"""Decode windows of 30 seconds with a Whisper model: language, tokens with timestamps, and segments.

The rules are those of OpenAI's Whisper: timestamps come in pairs, the likeliest token is taken at temperature 0, and the
next window begins at the last pair of timestamps, so that no word is cut in two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SECONDS_PER_TIMESTAMP = 0.02
_LEAST_ADVANCE = 1.0
"""Seconds. A model that writes nonsense could otherwise take forever."""


@dataclass(frozen=True, slots=True)
class WhisperTokens:
    """The special tokens of a model."""

    start: int
    end: int
    """Tokens below it are text."""
    transcribe: int
    translate: int
    previous: int
    no_speech: int
    no_timestamps: int
    languages: Mapping[str, int]
    """By code. Empty for a model that knows only English, which has no tokens of tasks either."""

    @property
    def first_timestamp(self) -> int:
        """The token of 0.00 seconds; later times follow it."""
        return self.no_timestamps + 1


def read_tokens(vocabulary: Mapping[str, int], languages: Sequence[str], *, multilingual: bool) -> WhisperTokens | None:
    """Find the special tokens in a vocabulary; None if it is not Whisper's."""

    def find(*names: str) -> int:
        return next((vocabulary[f"<|{name}|>"] for name in names if f"<|{name}|>" in vocabulary), -1)

    found = {code: vocabulary[f"<|{code}|>"] for code in languages if f"<|{code}|>" in vocabulary}
    tokens = WhisperTokens(
        start=find("startoftranscript"),
        end=find("endoftext"),
        transcribe=find("transcribe"),
        translate=find("translate"),
        previous=find("startofprev"),
        no_speech=find("nospeech", "nocaptions"),
        no_timestamps=find("notimestamps"),
        languages=found if multilingual else {},
    )
    needed = (tokens.start, tokens.end, tokens.previous, tokens.no_timestamps)
    return None if min(needed) < 0 or (multilingual and min(tokens.transcribe, tokens.translate) < 0) else tokens


@dataclass(frozen=True, slots=True)
class DecodedWindow:
    """The tokens of a window."""

    tokens: list[int]
    """Text and timestamps, without the end."""
    avg_logprob: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a window between two timestamps, in seconds from its beginning."""

    start: float
    end: float
    tokens: list[int]
    """Text only."""


class WhisperDecoder:
    """Decodes windows with one model."""

    def __init__(self, model: Any, tokens: WhisperTokens) -> None:
        from transformers import (
            SuppressTokensAtBeginLogitsProcessor,
            SuppressTokensLogitsProcessor,
            WhisperTimeStampLogitsProcessor,
        )

        self.model = model
        self._tokens = tokens
        self._device = model.device
        config = model.generation_config
        config.no_timestamps_token_id = tokens.no_timestamps
        config.eos_token_id = tokens.end
        suppressed = [token for token in config.suppress_tokens or () if token >= 0]
        at_begin = [token for token in config.begin_suppress_tokens or () if token >= 0]
        self._suppress = SuppressTokensLogitsProcessor(suppressed, device=self._device) if suppressed else None
        self._suppress_at_begin = (
            SuppressTokensAtBeginLogitsProcessor(at_begin, 0, device=self._device) if at_begin else None
        )
        self._timestamps = WhisperTimeStampLogitsProcessor(config, 0)
        self.most_tokens = model.config.max_target_positions // 2
        """Of a window, and of a prompt."""

    def detect_languages(self, hidden: torch.Tensor) -> list[str]:
        """Return the code of the likeliest language of each window."""
        codes = list(self._tokens.languages)
        start = torch.full((len(hidden), 1), self._tokens.start, device=self._device)
        logits = self.model(encoder_outputs=(hidden,), decoder_input_ids=start, use_cache=False).logits[:, -1]
        ids = torch.tensor([self._tokens.languages[code] for code in codes], device=self._device)
        return [codes[index] for index in logits.index_select(1, ids).argmax(1).tolist()]

    def decode(
        self, hidden: torch.Tensor, prefixes: Sequence[Sequence[int]], temperatures: Sequence[float]
    ) -> list[DecodedWindow]:
        """Decode windows whose prefixes have the same length. `hidden`: the output of the encoder."""
        ids = torch.tensor([list(prefix) for prefix in prefixes], device=self._device)
        heat = torch.tensor(temperatures, device=self._device).unsqueeze(-1)
        generated = ids[:, :0]
        sums = torch.zeros(len(ids), device=self._device)
        counts = torch.zeros(len(ids), device=self._device)
        ended = torch.zeros(len(ids), dtype=torch.bool, device=self._device)
        start_at = list(prefixes[0]).index(self._tokens.start)
        no_speech: list[float] = []
        past: Any = None
        step = ids
        for _ in range(min(self.most_tokens, self.model.config.max_target_positions - ids.shape[1])):
            output = self.model(encoder_outputs=(hidden,), decoder_input_ids=step, past_key_values=past, use_cache=True)
            past = output.past_key_values
            if not no_speech:
                no_speech = self._no_speech(output.logits[:, start_at])
            logits = self._process(generated, output.logits[:, -1].float())
            chosen = self._choose(logits, heat)
            chosen = torch.where(ended, torch.full_like(chosen, self._tokens.end), chosen)
            logprobs = logits.log_softmax(-1).gather(1, chosen.unsqueeze(-1)).squeeze(-1)
            sums += torch.where(ended, torch.zeros_like(logprobs), logprobs)
            counts += ~ended
            ended = ended | (chosen == self._tokens.end)
            if bool(ended.all()):
                break
            step = chosen.unsqueeze(-1)
            generated = torch.cat([generated, step], 1)
        means = (sums / counts.clamp(min=1)).tolist()
        rows = [[token for token in row if token != self._tokens.end] for row in generated.tolist()]
        return [DecodedWindow(*window) for window in zip(rows, means, no_speech, strict=True)]

    def _process(self, generated: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # The processors see generated tokens only, so that they begin at index 0.
        if self._suppress is not None:
            logits = self._suppress(generated, logits)
        if self._suppress_at_begin is not None:
            logits = self._suppress_at_begin(generated, logits)
        processed: torch.Tensor = self._timestamps(generated, logits)
        return processed

    def _choose(self, logits: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
        likeliest = logits.argmax(-1)
        if not bool((heat > 0).any()):
            return likeliest
        drawn = torch.multinomial((logits / heat.clamp(min=1e-3)).softmax(-1), 1).squeeze(-1)
        return torch.where(heat.squeeze(-1) > 0, drawn, likeliest)

    def _no_speech(self, logits: torch.Tensor) -> list[float]:
        if self._tokens.no_speech < 0:
            return [0.0] * len(logits)
        values: list[float] = logits.float().softmax(-1)[:, self._tokens.no_speech].tolist()
        return values


def split_segments(tokens: Sequence[int], special: WhisperTokens, seconds: float) -> tuple[list[Segment], float]:
    """Split the tokens of a window of so many seconds at their timestamps; the second result is where the next begins."""
    first = special.first_timestamp

    def time_of(token: int) -> float:
        return min((token - first) * _SECONDS_PER_TIMESTAMP, seconds)

    def segment(part: Sequence[int], start: float, end: float) -> Segment:
        return Segment(round(start, 2), round(end, 2), [token for token in part if token < special.end])

    pairs = [index for index in range(1, len(tokens)) if tokens[index] >= first and tokens[index - 1] >= first]
    ends_alone = len(tokens) >= 2 and tokens[-1] >= first > tokens[-2]
    if not pairs:
        times = [token for token in tokens if token >= first]
        end = time_of(times[-1]) if times and times[-1] != first else seconds
        return [segment(tokens, 0.0, end)], seconds
    cuts = [*pairs, len(tokens)] if ends_alone else pairs
    segments = []
    begin = 0
    for cut in cuts:
        part = tokens[begin:cut]
        segments.append(segment(part, time_of(part[0]), time_of(part[-1])))
        begin = cut
    advance = seconds if ends_alone else time_of(tokens[cuts[-1] - 1])
    return segments, advance if advance >= _LEAST_ADVANCE else seconds
