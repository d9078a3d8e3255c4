# SPDX-License-Identifier: Apache-2.0
"""Transcriptions and translations with OpenAI's own client and a real, if tiny, Whisper of random weights."""

from __future__ import annotations

import io
import json
import re
import threading
import wave
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI
from tiny_model_server import served

from headrace.api.openai import transcriptions
from headrace.api.openai.settings import OpenAiSettings
from headrace.models.media.audio import AudioLimits, Samples, read_audio
from support.llm_models import tiny_llama, tiny_whisper
from support.serving import Serving
from support.waiting import eventually

CONFIG = 'backend: "llm"\ninstance_group [ { kind: KIND_CPU } ]\n'


def samples(seconds: float, rate: int = 16_000) -> Any:
    times = np.arange(int(seconds * rate)) / rate
    return (np.sin(900 * times) * np.sin(3 * times) * 12_000).astype(np.int16)


def wav(seconds: float, rate: int = 16_000, width: int = 2) -> bytes:
    """With a `width` of 1, silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setnchannels(1)
        output.setsampwidth(width)
        output.setframerate(rate)
        output.writeframes(samples(seconds, rate).tobytes() if width == 2 else b"\x80" * int(seconds * rate))
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    tiny_whisper(made / "whisper" / "1")
    tiny_llama(made / "writer" / "1")
    for name in ("whisper", "writer"):
        (made / name / "config.pbtxt").write_text(CONFIG)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with served(folder, OpenAiSettings(audio_seconds=200)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def transcribe(client: OpenAI, data: bytes | None = None, name: str = "speech.wav", **more: Any) -> Any:
    return client.audio.transcriptions.create(
        model="whisper", file=(name, wav(4) if data is None else data), **{"language": "en", **more}
    )


def test_the_text_of_a_file(client: OpenAI) -> None:
    answer = transcribe(client)
    assert len(answer.text) > 3
    assert answer.text == answer.text.strip()
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 4)
    assert transcribe(client, response_format="text") == answer.text + "\n"
    assert transcribe(client, wav(4, 48_000)).usage.seconds == 4


def test_verbose_json_has_segments(client: OpenAI) -> None:
    answer = transcribe(client, response_format="verbose_json", timestamp_granularities=["segment"])
    assert (answer.task, answer.language, answer.duration) == ("transcribe", "english", 4.0)
    assert "".join(segment.text for segment in answer.segments).strip() == answer.text
    assert [segment.id for segment in answer.segments] == list(range(len(answer.segments)))
    for segment in answer.segments:
        assert 0 <= segment.start <= segment.end <= 4
        assert segment.tokens
        assert segment.avg_logprob < 0 <= segment.no_speech_prob <= 1
        assert (segment.seek, segment.temperature, segment.compression_ratio > 0) == (0, 0, True)


def test_subtitles(client: OpenAI) -> None:
    segments = transcribe(client, response_format="verbose_json").segments
    for kind, mark in (("srt", ","), ("vtt", ".")):
        text = transcribe(client, response_format=kind)
        times = re.findall(rf"^(\d\d:\d\d:\d\d\{mark}\d\d\d) --> (\d\d:\d\d:\d\d\{mark}\d\d\d)$", text, re.MULTILINE)
        assert len(times) == len(segments)
        assert times[0][1] == f"00:00:0{segments[0].end:.3f}".replace(".", mark)
        assert text.startswith("WEBVTT\n\n" if kind == "vtt" else "1\n")


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # by OpenAI's client
def test_a_translation(client: OpenAI) -> None:
    answer: Any = client.audio.translations.create(
        model="whisper", file=("speech.wav", wav(4)), response_format="verbose_json", extra_body={"language": "de"}
    )
    assert (answer.task, answer.language) == ("translate", "german")
    assert answer.text
    assert client.audio.translations.create(model="whisper", file=("speech.wav", wav(4))).text


def test_a_language_is_detected_and_a_prompt_and_a_temperature_are_taken(client: OpenAI) -> None:
    found = transcribe(client, language=openai.omit, response_format="verbose_json")
    assert found.language in ("english", "german")
    plain = transcribe(client).text
    assert transcribe(client, prompt="a mill grinds corn").text != plain
    assert len({transcribe(client, temperature=1.0).text for _ in range(4)}) > 1


def test_a_long_file_is_read_in_windows(client: OpenAI, server: Serving) -> None:
    def windows() -> int:
        with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
            connection.request("GET", "/v2/models/whisper/stats")
            return int(json.loads(connection.getresponse().read())["model_stats"][0]["inference_count"])

    before = windows()
    answer = transcribe(client, wav(95), response_format="verbose_json")
    assert windows() - before >= 4
    assert answer.duration == 95
    starts = [segment.start for segment in answer.segments]
    assert starts == sorted(starts)
    assert {segment.seek for segment in answer.segments} >= {0}
    assert max(segment.seek for segment in answer.segments) >= 6000
    assert max(segment.end for segment in answer.segments) <= 95


def test_other_formats_by_pyav(client: OpenAI) -> None:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as output:
        stream = output.add_stream("flac", rate=16_000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(samples(4).reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = 16_000
        for part in (frame, None):
            output.mux(stream.encode(part))
    # FLAC loses nothing.
    assert transcribe(client, file.getvalue(), "speech.flac").text == transcribe(client).text


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"model": "nobody"}, "model"),
        ({"model": "writer"}, "model"),
        ({"language": "xx"}, "language"),
        ({"temperature": 2}, "temperature"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities"),
        ({"timestamp_granularities": ["word"], "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"timestamp_granularities": ["letter"], "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"prompt": "x" * 8193}, "prompt"),
        ({"prompt": "x" * 70_000}, "prompt"),
        ({"include": ["logprobs"]}, "include"),
        ({"extra_body": {"stream": "true"}}, "stream"),
        ({"file": ("speech.wav", b"")}, "file"),
        ({"file": ("speech.wav", b"not a sound")}, "file"),
        ({"file": ("speech.wav", wav(4)[:30])}, "file"),
        ({"file": ("speech.wav", wav(201))}, "file"),
    ],
)
def test_wrong_requests_name_the_field(client: OpenAI, more: dict[str, Any], param: str) -> None:
    sent = {"model": "whisper", "file": ("speech.wav", wav(1)), "language": "en", **more}
    with pytest.raises(openai.NotFoundError if sent["model"] == "nobody" else openai.BadRequestError) as raised:
        client.audio.transcriptions.create(**sent)
    assert raised.value.param == param
    assert client.audio.transcriptions.create(model="whisper", file=("speech.wav", wav(1)), language="en")


def post(server: Serving, body: bytes, kind: str, path: str = "/v1/audio/transcriptions") -> tuple[int, Any]:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", path, body, {"Content-Type": kind})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"model": "whisper"}', "application/json"),
        (b"", "multipart/form-data; boundary=b"),
        (b"--b\r\n", "multipart/form-data"),
        (b"--b\r\nContent-Disposition: form-data; name=model\r\n\r\nwhisper", "multipart/form-data; boundary=b"),
        (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
        ),
    ],
)
def test_bodies_that_are_no_forms(server: Serving, body: bytes, kind: str) -> None:
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        status, answer = post(server, body, kind, path)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_other_routes_name_the_one_for_speech(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"whisper", "writer"}
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
        client.completions.create(model="whisper", prompt="x")


def test_too_many_files_at_once_and_clients_that_leave(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, is_left = threading.Event(), threading.Event()

    def read(audio: bytes, limits: AudioLimits, is_cancelled: Callable[[], bool]) -> Samples:
        """Read the first file until its client has left."""
        if not is_reading.is_set():
            is_reading.set()
            eventually(is_cancelled)
            is_left.set()
        return read_audio(audio, limits, is_cancelled)

    monkeypatch.setattr(transcriptions, "read_audio", read)
    with served(folder, OpenAiSettings(audio_files_at_once=1)) as running:
        boundary = b"b"
        parts = {"model": b"whisper", "language": b"en"}
        body = b"".join(
            b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
            for name, value in parts.items()
        )
        body += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n--b--\r\n'
        body %= wav(0.1)
        kind = f"multipart/form-data; boundary={boundary.decode()}"
        with closing(HTTPConnection("127.0.0.1", running.port, timeout=60)) as connection:
            connection.request("POST", "/v1/audio/transcriptions", body, {"Content-Type": kind})
            assert is_reading.wait(60)
            assert post(running, body, kind)[0] == 503
        # The client has gone, so its file no longer counts.
        assert is_left.wait(60)
        eventually(lambda: post(running, body, kind)[0] == 200)
