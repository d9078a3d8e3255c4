# SPDX-License-Identifier: Apache-2.0
"""`data:<mime>;base64,<payload>`, as bytes. Called by `reader`. The size is known before anything is decoded."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from urllib.parse import unquote

from headrace.core.errors import InvalidArgument
from headrace.models.media.kinds import MIME_KINDS, Kind


@dataclass(frozen=True, slots=True)
class DataUrl:
    """A data URL whose head has been read."""

    mime: str
    kind: Kind
    payload: str = field(repr=False)

    @property
    def size(self) -> int:
        """At most so many bytes, once decoded."""
        return len(self.payload) // 4 * 3 + 3


def parse_data_url(url: str) -> DataUrl:
    """Read the head. Raises InvalidArgument for a MIME type that is not taken, or for what is not base64."""
    head, comma, payload = url[5:].partition(",") if url[:5].lower() == "data:" else ("", "", "")
    words = [word.strip().lower() for word in head[:200].split(";")]
    if not comma or len(words) < 2 or words[-1] != "base64":
        raise InvalidArgument("a data: URL must read data:<MIME type>;base64,<content>")
    kind = MIME_KINDS.get(words[0])
    if kind is None:
        shown = "".join(char if char.isprintable() else "?" for char in words[0][:60])
        raise InvalidArgument(f"data: URLs of type {shown!r} are not read; these are: {', '.join(MIME_KINDS)}")
    return DataUrl(words[0], kind, payload)


def content_of(data: DataUrl, max_bytes: int) -> bytes:
    """Decode. Raises InvalidArgument for more than `max_bytes`, or for what is not base64."""
    # `%2B` and the like: one character may be written as three.
    percent = data.payload.count("%") if len(data.payload) <= 3 * (max_bytes * 4 // 3 + 8) else 0
    estimated = (len(data.payload) - 2 * percent) // 4 * 3
    if estimated - 2 > max_bytes:
        raise InvalidArgument(f"the content of a data: URL has about {estimated} bytes; {max_bytes} are the most")
    payload = unquote(data.payload, errors="replace") if percent else data.payload
    try:
        # Without white space: some encoders break lines.
        content = base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"the content of the data: URL ({data.mime}) is not base64, or is cut off") from None
    if not content:
        raise InvalidArgument(f"the data: URL ({data.mime}) has no content")
    return content
