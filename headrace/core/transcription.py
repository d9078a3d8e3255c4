# SPDX-License-Identifier: Apache-2.0
"""Speech recognition models, independent of any protocol: the names of their tensors and the shape of their answers.

A request has up to 30 seconds of audio, `AUDIO`: mono samples from -1 to 1 at `SAMPLE_RATE`; and `OPTIONS`, a JSON object:

    language       ISO 639-1 code or English name; "" or missing: detected
    task           transcribe (default), or translate: into English
    prompt         text that comes before, in the style of which the model goes on
    temperature    0 (default): the likeliest tokens

The answer has `TEXT`, and `TRANSCRIPT`, a JSON object:

    language, language_name    of the audio: en, english
    segments       [{start, end (seconds), text, tokens}]
    advance        seconds until where the next request should begin, if the audio goes on: words may be cut off behind it
    avg_logprob, no_speech_prob, compression_ratio
                   as OpenAI's `verbose_json` has them
"""

from __future__ import annotations

AUDIO, OPTIONS, TEXT, TRANSCRIPT = "audio", "options", "text", "transcript"
SAMPLE_RATE = 16_000
WINDOW_SECONDS = 30
WINDOW_SAMPLES = SAMPLE_RATE * WINDOW_SECONDS
