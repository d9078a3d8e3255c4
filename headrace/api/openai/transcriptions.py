# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the speech of an audio file as text.

The file is a part of a form. It is decoded in a thread, and transcribed in windows of 30 seconds, each a request of its own,
so that the engine batches windows of several files and a long file does not hold up others. A window begins where the model
says that the one before it ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import orjson

from headrace.api.openai.errors import BadRequest, fail
from headrace.api.openai.fields import Fields
from headrace.api.openai.models import Models, Target
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.transcript_formats import RESPONSE_FORMATS, Transcript, write_transcript
from headrace.core.dtypes import BYTES, FP32
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.core.transcription import AUDIO, OPTIONS, SAMPLE_RATE, TRANSCRIPT, WINDOW_SAMPLES
from headrace.engine.dataplane import DataPlane
from headrace.models.media.audio import AudioLimits, Samples, read_audio
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, ResponseHead
from headrace.net.http.multipart import read_form

Task = Literal["transcribe", "translate"]

_PROMPT_CHARACTERS = 8192
_FIELD_BYTES = 65_536
_LIST_SUFFIX = "[]"
_RETRY_SECONDS = 5.0
_NO_SPEECH_PROB, _NO_SPEECH_LOGPROB = 0.6, -1.0
"""A window has no speech if the model says so and is not certain of what it wrote: the values of OpenAI's Whisper."""
_UNSUPPORTED = {
    "stream": "transcripts are not streamed: leave it out",
    "include": "log-probabilities of a transcript are not supported: use 'response_format': 'verbose_json'",
    "known_speaker_names": "speakers are not identified",
}


@dataclass(frozen=True, slots=True)
class _Form:
    """A parsed request."""

    audio: bytes
    options: Mapping[str, Any]
    """For the model: see `core.transcription`."""
    response_format: str


class Transcriptions:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models
        self._tasks: set[asyncio.Task[None]] = set()

    def transcribe(self, exchange: Exchange) -> None:
        """Handle one `POST /v1/audio/transcriptions`."""
        self._begin(exchange, "transcribe")

    def translate(self, exchange: Exchange) -> None:
        """Handle one `POST /v1/audio/translations`."""
        self._begin(exchange, "translate")

    def _begin(self, exchange: Exchange, task: Task) -> None:
        fields, files = _read_fields(exchange)
        target = self._models.speech_model(fields)
        form = _parse_form(fields, files, task)
        if len(self._tasks) >= self._settings.audio_files_at_once:
            raise Unavailable(
                f"the server transcribes {len(self._tasks)} files already: retry later",
                retry_after_seconds=_RETRY_SECONDS,
            )
        cancelled = threading.Event()
        running = asyncio.get_running_loop().create_task(self._run(exchange, target, form, cancelled))
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)
        exchange.on_disconnect = partial(_cancel, running, cancelled)

    async def _run(self, exchange: Exchange, target: Target, form: _Form, cancelled: threading.Event) -> None:
        try:
            limits = AudioLimits(self._settings.audio_seconds)
            try:
                samples = await asyncio.to_thread(read_audio, form.audio, limits, cancelled.is_set)
            except InvalidArgument as error:
                raise BadRequest("file", error.message) from None
            transcript = await self._transcribe(target, samples, form.options)
            kind, body = write_transcript(transcript, form.response_format)
            if not exchange.closed:
                exchange.respond(ResponseHead(200, [(CONTENT_TYPE, kind)]), body)
        except Exception as error:
            if not exchange.closed:
                fail(exchange, error)

    async def _transcribe(self, target: Target, samples: Samples, options: Mapping[str, Any]) -> Transcript:
        transcript = Transcript(str(options["task"]), len(samples) / SAMPLE_RATE)
        sent = dict(options)
        start = 0
        while start < len(samples):
            audio = samples[start : start + WINDOW_SAMPLES].astype(np.float32) / np.float32(32768)
            window = await self._transcribe_window(target, audio, sent)
            # The language of the beginning is that of the whole file.
            sent["language"] = window["language"]
            if window["no_speech_prob"] <= _NO_SPEECH_PROB or window["avg_logprob"] >= _NO_SPEECH_LOGPROB:
                transcript.add(window, start / SAMPLE_RATE, options["temperature"])
            is_last = start + WINDOW_SAMPLES >= len(samples)
            start += len(audio) if is_last else max(1, round(window["advance"] * SAMPLE_RATE))
        return transcript

    async def _transcribe_window(
        self, target: Target, audio: np.ndarray[Any, np.dtype[np.float32]], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        inputs = [
            Tensor(AUDIO, FP32, audio.reshape(1, -1)),
            tensor_from_values(OPTIONS, BYTES, [1, 1], [orjson.dumps(options).decode()]),
        ]
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        pending = self._plane.infer(InferRequest(target.config.name, inputs), partial(_complete, future))
        try:
            response = await future
        except asyncio.CancelledError:
            pending.cancel()
            raise
        except InvalidArgument as error:
            raise _option_error(error) from None
        output = next(tensor for tensor in response.outputs if tensor.name == TRANSCRIPT)
        window: dict[str, Any] = orjson.loads(output.array.ravel()[0])
        return window


def _complete(future: asyncio.Future[InferResponse], result: InferResponse | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _cancel(task: asyncio.Task[None], cancelled: threading.Event) -> None:
    cancelled.set()
    task.cancel()


def _option_error(error: InvalidArgument) -> InvalidArgument:
    """Name the field that a model refuses: its message begins with it."""
    name = error.message.partition(" ")[0]
    if name not in ("language", "prompt", "temperature"):
        return error
    return BadRequest(name, error.message.removeprefix(f"{name} "))


def _read_fields(exchange: Exchange) -> tuple[Fields, dict[str, bytes]]:
    """Read the form: its fields as texts, or lists of texts (`name[]`), and its files. Releases the body's memory."""
    values: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for part in read_form(exchange.head.get(b"content-type") or b"", exchange.body):
        name = part.head.name
        if part.head.filename is not None:
            files[name] = part.content
            continue
        if len(part.content) > _FIELD_BYTES:
            raise BadRequest(name[:64], f"must be a text of at most {_FIELD_BYTES} bytes")
        try:
            text = part.content.decode()
        except UnicodeDecodeError:
            raise BadRequest(name[:64], "must be text in UTF-8") from None
        if name.endswith(_LIST_SUFFIX):
            values.setdefault(name.removesuffix(_LIST_SUFFIX), []).append(text)
        else:
            values[name] = text
    exchange.body = b""
    return Fields(values), files


def _parse_form(fields: Fields, files: Mapping[str, bytes], task: Task) -> _Form:
    if fields.get("stream") not in (None, "false", "False"):
        fields.reject(_UNSUPPORTED)
    fields.reject({name: reason for name, reason in _UNSUPPORTED.items() if name != "stream"})
    audio = files.get("file")
    if not audio:
        raise fields.error("file", "is missing: send the audio as a file of the form")
    response_format = fields.text("response_format", 64) or "json"
    if response_format not in RESPONSE_FORMATS:
        raise fields.error("response_format", f"must be one of {', '.join(RESPONSE_FORMATS)}")
    options = {
        "language": fields.text("language", 64) or "",
        "task": task,
        "prompt": fields.text("prompt", _PROMPT_CHARACTERS) or "",
        "temperature": _temperature(fields),
    }
    _check_granularities(fields, response_format)
    return _Form(audio, options, response_format)


def _temperature(fields: Fields) -> float:
    text = fields.text("temperature", 32)
    try:
        value = float(text) if text else 0.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise fields.error("temperature", "must be a number from 0 to 1")
    return value


def _check_granularities(fields: Fields, response_format: str) -> None:
    value = fields.get("timestamp_granularities")
    if value is None:
        return
    granularities = [value] if isinstance(value, str) else value
    if response_format != "verbose_json":
        raise fields.error("timestamp_granularities", "needs 'response_format': 'verbose_json'")
    if "word" in granularities:
        raise fields.error("timestamp_granularities", "times of words are not supported: use 'segment'")
    if any(granularity != "segment" for granularity in granularities):
        raise fields.error("timestamp_granularities", "must be 'segment'")
