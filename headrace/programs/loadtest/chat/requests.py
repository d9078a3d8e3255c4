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
_MOST_PROMPTS = 100_000


class Prompts:
    """Texts. `tokens_per_word` may be set once the server has told how it counts."""

    def __init__(self, chance: random.Random, texts: Sequence[str] = ()) -> None:
        self._chance = chance
        self._texts = texts
        self._words = _STORY.split()
        self._bag: list[str] = []
        self.tokens_per_word = 1.3
        self.overhead = 0.0
        """Tokens that every prompt has before its words: of a template, and the number that it begins with."""

    def text(self, tokens: int) -> str:
        """A text of about so many tokens; of a data set, one of its texts, cut or repeated."""
        count = max(1, round((tokens - self.overhead) / self.tokens_per_word))
        start = f"{self._chance.randrange(10**6):06}"
        if not self._texts:
            return " ".join([start, *self._drawn(count)])
        words = self._chance.choice(self._texts).split() or self._words
        repeated = words * (count // len(words) + 1)
        return " ".join([start, *repeated[:count]])

    def _drawn(self, count: int) -> list[str]:
        """Words by chance, none again before all others: texts then differ little in the tokens of their words."""
        while len(self._bag) < count:
            self._bag += self._chance.sample(self._words, len(self._words))
        drawn, self._bag = self._bag[:count], self._bag[count:]
        return drawn

    def learn(self, samples: Sequence[tuple[int, int]]) -> None:
        """From (words, tokens that the server counted) of two prompts of different length."""
        (few, least), (many, most) = sorted(samples)
        if many > few and most > least:
            self.tokens_per_word = (most - least) / (many - few)
            self.overhead = max(0.0, least - few * self.tokens_per_word)

    def picture(self, width: int, height: int) -> str:
        """A picture of that size as a data URL: stripes in colours of chance."""
        row = bytes(self._chance.randrange(256) for _ in range(3 * width))
        lines = b"".join(b"\0" + row[3 * (at % width) :] + row[: 3 * (at % width)] for at in range(height))
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        pieces = [(b"IHDR", header), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b"")]
        made = b"\x89PNG\r\n\x1a\n" + b"".join(_piece(*each) for each in pieces)
        return f"data:image/png;base64,{base64.b64encode(made).decode()}"


def read_dataset(path: Path) -> list[str]:
    """The prompts of a file: JSON lines, JSON, CSV, or text with one in a line; of a folder, those of its files."""
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix.lower() in _SUFFIXES)
    found: list[str] = []
    for each in files:
        try:
            found += [text for text in _texts_of(each) if text.strip()][: _MOST_PROMPTS - len(found)]
        except (OSError, ValueError, csv.Error):
            raise InvalidArgument(f"--dataset {each}: cannot be read as {each.suffix or 'text'}") from None
    if not found:
        raise InvalidArgument(
            f"--dataset {path}: has no prompts; give .jsonl, .json, .csv or .txt, with a field {' or '.join(_FIELDS[:2])}"
        )
    return found


def _texts_of(path: Path) -> Iterator[str]:
    suffix, content = path.suffix.lower(), path.read_text(encoding="utf-8-sig")
    if suffix == ".jsonl":
        yield from (_text_of(json.loads(line)) for line in content.splitlines() if line.strip())
    elif suffix == ".json":
        loaded = json.loads(content)
        lists = [loaded, *(loaded.values() if isinstance(loaded, dict) else ())]
        yield from map(_text_of, next((each for each in lists if isinstance(each, list)), []))
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
        said = row.get(name)
        if isinstance(said, list) and said:
            return _text_of(said[0])
    return next((each for each in row.values() if isinstance(each, str)), "")


def _piece(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
_ABOUT_PICTURES = "Describe what is to be seen."


@dataclass
class Bodies:
    """Makes requests for one task of one model."""

    model: str
    task: str
    prompts: Prompts
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The user's own, for every request; they win."""
    ignore_eos: bool = True
    """Ask for answers of the full length. Not OpenAI's own; what does not know it is asked without."""
    usage: bool = True
    """Ask for the numbers of tokens at the end of a stream."""

    @property
    def path(self) -> str:
        """Where they go."""
        return EMBEDDINGS if self.task.endswith("embeddings") else CHAT

    def make(self, sizes: RequestSizes) -> bytes:
        """One request."""
        if self.path == EMBEDDINGS:
            pictures = [self.prompts.picture(sizes.width, sizes.height) for _ in range(sizes.pictures)]
            given = pictures or [self.prompts.text(sizes.prompt_tokens)]
            return orjson.dumps({"model": self.model, "input": given, **self.parameters})
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
        pictures = [self.prompts.picture(sizes.width, sizes.height) for _ in range(sizes.pictures)]
        shown = [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
        return [{"type": "text", "text": _ABOUT_PICTURES}, *shown]
