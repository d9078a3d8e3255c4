# SPDX-License-Identifier: Apache-2.0
"""From what an input holds (a line, a row, a file) to an item: what to ask the model, and what to call it in the results.

Called by the sources. Knows which words each kind of model uses for a text or a picture, and nothing of the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.core.errors import InvalidArgument
from headrace.models.storage.locations import public_text, scheme_of

_TEXT_KEYS: Mapping[str, str] = {"llm": "prompt", "vlm": "prompt", "video": "prompt", "embedding": "input"}
_MEDIA_KEYS = ("media", "files", "images", "image", "videos", "video")
_PICTURES = ("classifier", "detector")
IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff"})
VIDEOS = frozenset({"mp4", "avi", "webm", "mkv", "mov"})


@dataclass(slots=True)  # frozen, each would take a microsecond more to make
class Item:
    """One thing to compute."""

    index: int
    id: str | int | None
    body: Mapping[str, Any]
    """As of an inference request; of a model of tensors {"inputs": {name: values}}."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What its media are called in results, by the URLs they are read from."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the model's requests look like."""

    model_type: str
    """As `Kind.model_type` has it."""
    inputs: tuple[str, ...] = ()
    """Names of those of a model of tensors that must be there."""
    takes_text: bool = False
    """Whether a model of tensors has one input, of texts."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Of every request, before what the item says."""

    @property
    def extensions(self) -> frozenset[str]:
        """Of the files of a folder that are items."""
        known = {"json"}
        if self.model_type in _PICTURES:
            known |= IMAGES
        elif self.model_type in ("vlm", "video"):
            known |= IMAGES | VIDEOS | {"txt"}
        elif self.model_type == "tensors":
            known |= {"npy", "txt"} if self.takes_text else {"npy"}
        else:
            known.add("txt")
        return frozenset(known)

    def item(self, index: int, value: Any, base: str, default_id: str | None = None) -> Item:
        """A value of JSON, which it takes for its own, as an item. Paths of media that are not absolute begin at `base`."""
        given: str | int | None = default_id
        if isinstance(value, dict):
            body = value
            if "id" in body and "id" not in self.inputs:
                told = body.pop("id")
                if told is not None and (isinstance(told, bool) or not isinstance(told, str | int)):
                    raise InvalidArgument("'id' is neither a text nor a whole number")
                given = default_id if told is None else told
            if self.model_type == "tensors" and "inputs" not in body:
                body = {"inputs": body}
        elif isinstance(value, str):
            body = self._of_text(value)
        elif isinstance(value, list | int | float) and self.model_type == "tensors":
            body = self._of_values(value)
        else:
            raise InvalidArgument("an item is a JSON object, or a text where the model takes one")
        return self._completed(index, given, body, base)

    def file(self, index: int, path: Path, id: str) -> Item:
        """A picture or a video of a folder as an item."""
        url = path.as_uri()
        return Item(index, id, {**self.parameters, "media": [url]}, {public_text(url): id})

    def array(self, index: int, values: Any, id: str) -> Item:
        """A numpy array as an item."""
        return Item(index, id, self._of_values(values))

    def _of_text(self, text: str) -> dict[str, Any]:
        if self.model_type in _PICTURES:
            return {"media": [text]}
        return self._of_values(text) if self.model_type == "tensors" else {_TEXT_KEYS[self.model_type]: text}

    def _of_values(self, values: Any) -> dict[str, Any]:
        if len(self.inputs) != 1:
            raise InvalidArgument(f"the model takes {', '.join(self.inputs)}: give an object with each of them")
        return {"inputs": {self.inputs[0]: values}}

    def _completed(self, index: int, id: str | int | None, body: dict[str, Any], base: str) -> Item:
        if self.model_type == "tensors":
            return Item(index, id, body)
        names: dict[str, str] = {}
        for key in _MEDIA_KEYS:
            value = body.get(key)
            if isinstance(value, str):
                body[key] = _placed(value, base, names)
            elif isinstance(value, list):
                body[key] = [_placed(each, base, names) if isinstance(each, str) else each for each in value]
        return Item(index, id, {**self._defaults(body), **body}, names)

    def _defaults(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without a prompt of all where the item has one by another name."""
        said = {"prompt", "text", "question"} & body.keys()
        return {key: value for key, value in self.parameters.items() if not (said and key in ("prompt", "text"))}


def _placed(text: str, base: str, names: dict[str, str]) -> str:
    """A medium's URL."""
    if scheme_of(text) or text[:5].lower() == "data:":
        return text
    in_cloud = scheme_of(base) and not text.startswith("/")
    url = f"{base}/{text}" if in_cloud else "file://" + quote(str(Path(base, text)))
    names[public_text(url)] = text
    return url
