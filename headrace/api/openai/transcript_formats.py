# SPDX-License-Identifier: Apache-2.0
"""The formats of a transcript: OpenAI's `json` and `verbose_json`, `text`, and the subtitles `srt` and `vtt`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

RESPONSE_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")


@dataclass(slots=True)
class Transcript:
    """What was said in an audio file."""

    task: str
    seconds: float
    language_name: str = ""
    segments: list[dict[str, Any]] = field(default_factory=list)
    """As OpenAI's `verbose_json` has them."""

    def add(self, window: Mapping[str, Any], offset: float, temperature: float) -> None:
        """Add the segments of a window that begins at `offset` seconds: see `core.transcription`."""
        self.language_name = self.language_name or str(window["language_name"])
        for segment in window["segments"]:
            self.segments.append(
                {
                    "id": len(self.segments),
                    "seek": round(offset * 100),
                    "start": round(offset + segment["start"], 2),
                    "end": round(offset + segment["end"], 2),
                    "text": segment["text"],
                    "tokens": segment["tokens"],
                    "temperature": temperature,
                    "avg_logprob": window["avg_logprob"],
                    "compression_ratio": window["compression_ratio"],
                    "no_speech_prob": window["no_speech_prob"],
                }
            )

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(segment["text"] for segment in self.segments).strip()


def write_transcript(transcript: Transcript, kind: str) -> tuple[bytes, bytes]:
    """Return the content type and the body of a response in one of `RESPONSE_FORMATS`."""
    if kind == "text":
        return b"text/plain; charset=utf-8", f"{transcript.text}\n".encode(errors="replace")
    if kind == "srt":
        return b"text/plain; charset=utf-8", _subtitles(transcript, ",", numbered=True)
    if kind == "vtt":
        return b"text/vtt; charset=utf-8", b"WEBVTT\n\n" + _subtitles(transcript, ".", numbered=False)
    document: dict[str, Any] = {"text": transcript.text}
    if kind == "verbose_json":
        document = {
            "task": transcript.task,
            "language": transcript.language_name,
            "duration": round(transcript.seconds, 2),
            "text": transcript.text,
            "segments": transcript.segments,
        }
    document["usage"] = {"type": "duration", "seconds": -(-transcript.seconds // 1)}
    return b"application/json", orjson.dumps(document)


def _subtitles(transcript: Transcript, mark: str, *, numbered: bool) -> bytes:
    blocks = []
    for number, segment in enumerate(transcript.segments, 1):
        lines = [str(number)] if numbered else []
        lines.append(f"{_time(segment['start'], mark)} --> {_time(segment['end'], mark)}")
        # An arrow in the text would be read as a time.
        lines.append(" ".join(segment["text"].replace("-->", "->").split()))
        blocks.append("\n".join(lines) + "\n\n")
    return "".join(blocks).encode(errors="replace")


def _time(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
