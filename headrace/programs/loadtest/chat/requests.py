# SPDX-License-Identifier: Apache-2.0
"""Build chat requests of given sizes: prompts from words or a data set, and images."""

from __future__ import annotations

import base64
import csv
import json
import random
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument
from headrace.fleet.benchmarks.scenarios import RequestSizes

_STORY = (
    "the water runs down from the hills and the old mill by the river turns all day while people come and go with corn "
    "and bread to the market where they talk about rain and the price of wood until the evening comes and the light of "
    "the last house goes out over the quiet valley"
)
_FIELDS = ("prompt", "text", "question", "instruction", "input", "content", "value")
_SUFFIXES = (".jsonl", ".json", ".csv", ".txt")
_MAX_PROMPTS = 100_000


class Prompts:
    """Generates prompts and images. `calibrate` sets `tokens_per_word` from what the server counts."""

    def __init__(self, rng: random.Random, texts: Sequence[str] = ()) -> None:
        self._rng = rng
        self._texts = texts
        self._words = _STORY.split()
        self._bag: list[str] = []
        self.tokens_per_word = 1.3
        self.overhead = 0.0
        """Tokens of every prompt besides its words: the chat template, and the number that it starts with."""

    def text(self, tokens: int) -> str:
        """Return a text of about so many tokens; with a data set, one of its texts, cut or repeated."""
        count = max(1, round((tokens - self.overhead) / self.tokens_per_word))
        start = f"{self._rng.randrange(10**6):06}"
        if not self._texts:
            return " ".join([start, *self._draw_words(count)])
        words = self._rng.choice(self._texts).split() or self._words
        repeated = words * (count // len(words) + 1)
        return " ".join([start, *repeated[:count]])

    def _draw_words(self, count: int) -> list[str]:
        """Draw random words, each once before any is repeated: texts then differ little in their tokens per word."""
        while len(self._bag) < count:
            self._bag += self._rng.sample(self._words, len(self._words))
        drawn, self._bag = self._bag[:count], self._bag[count:]
        return drawn

    def calibrate(self, samples: Sequence[tuple[int, int]]) -> None:
        """Set the tokens per word from two samples of different length: (words, tokens that the server counted)."""
        (few, fewest_tokens), (many, most_tokens) = sorted(samples)
        if many > few and most_tokens > fewest_tokens:
            self.tokens_per_word = (most_tokens - fewest_tokens) / (many - few)
            self.overhead = max(0.0, fewest_tokens - few * self.tokens_per_word)

    def image(self, width: int, height: int) -> str:
        """Return an image of that size as a data URL, with stripes of random colours."""
        row = bytes(self._rng.randrange(256) for _ in range(3 * width))
        lines = b"".join(
            b"\0" + row[3 * (row_number % width) :] + row[: 3 * (row_number % width)] for row_number in range(height)
        )
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b"")]
        png = b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(*chunk) for chunk in chunks)
        return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def read_dataset(path: Path) -> list[str]:
    """Return the prompts of a JSONL, JSON, CSV or text file (one per line), or of all such files of a folder."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES)
    prompts: list[str] = []
    for file in files:
        try:
            prompts += [text for text in _texts_of(file) if text.strip()][: _MAX_PROMPTS - len(prompts)]
        except (OSError, ValueError, csv.Error):
            raise InvalidArgument(f"--dataset {file}: cannot be read as {file.suffix or 'text'}") from None
    if not prompts:
        raise InvalidArgument(
            f"--dataset {path}: has no prompts; give .jsonl, .json, .csv or .txt, with a field {' or '.join(_FIELDS[:2])}"
        )
    return prompts


def _texts_of(path: Path) -> Iterator[str]:
    suffix, content = path.suffix.lower(), path.read_text(encoding="utf-8-sig")
    if suffix == ".jsonl":
        yield from (_text_of(json.loads(line)) for line in content.splitlines() if line.strip())
    elif suffix == ".json":
        loaded = json.loads(content)
        lists = [loaded, *(loaded.values() if isinstance(loaded, dict) else ())]
        yield from map(_text_of, next((value for value in lists if isinstance(value, list)), []))
    elif suffix == ".csv":
        yield from map(_text_of, csv.DictReader(content.splitlines()))
    else:
        yield from content.splitlines()


def _text_of(row: Any) -> str:
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        return ""
    for name in _FIELDS:
        if isinstance(row.get(name), str):
            return str(row[name])
    for name in ("messages", "conversations"):
        messages = row.get(name)
        if isinstance(messages, list) and messages:
            return _text_of(messages[0])
    return next((value for value in row.values() if isinstance(value, str)), "")


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
_IMAGE_PROMPT = "Describe what is shown."


@dataclass
class RequestBodies:
    """Builds request bodies for one task of one model."""

    model: str
    task: str
    prompts: Prompts
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the user for every request; they take precedence."""
    ignore_eos: bool = True
    """Request answers of the full length. An extension of vLLM; `ChatTest` switches it off for servers that refuse it."""
    usage: bool = True
    """Request the token counts at the end of a stream."""

    @property
    def path(self) -> str:
        """The path of the requests."""
        return EMBEDDINGS if self.task.endswith("embeddings") else CHAT

    def build(self, sizes: RequestSizes) -> bytes:
        """Return the body of one request."""
        if self.path == EMBEDDINGS:
            images = [self.prompts.image(sizes.width, sizes.height) for _ in range(sizes.pictures)]
            inputs = images or [self.prompts.text(sizes.prompt_tokens)]
            return orjson.dumps({"model": self.model, "input": inputs, **self.parameters})
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": self._content(sizes)}],
            "stream": True,
            "max_tokens": sizes.answer_tokens,
        }
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return orjson.dumps({**body, **self.parameters})

    def _content(self, sizes: RequestSizes) -> Any:
        if not sizes.pictures:
            return self.prompts.text(sizes.prompt_tokens)
        images = [self.prompts.image(sizes.width, sizes.height) for _ in range(sizes.pictures)]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        return [{"type": "text", "text": _IMAGE_PROMPT}, *parts]
