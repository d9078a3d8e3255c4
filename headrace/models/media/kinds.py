# SPDX-License-Identifier: Apache-2.0
"""What a file is, by its first bytes. Called before a decoder sees it: names and MIME types are only what someone said.

The table of MIME types says which are taken in `data:` URLs and what their content must then be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["image", "video"]

HEAD_BYTES = 64
"""How much of a file `sniff` wants to see."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format that is decoded."""

    kind: Kind
    decoder: str
    """What Pillow calls it, or FFmpeg its demuxer."""


PNG, JPEG, WEBP = Format("image", "PNG"), Format("image", "JPEG"), Format("image", "WEBP")
GIF, BMP, TIFF = Format("image", "GIF"), Format("image", "BMP"), Format("image", "TIFF")
MP4, MATROSKA, AVI = Format("video", "mov"), Format("video", "matroska"), Format("video", "avi")

MIME_KINDS: dict[str, Kind] = {
    "image/jpeg": "image",
    "image/jpg": "image",
    "image/png": "image",
    "image/webp": "image",
    "image/gif": "image",
    "image/bmp": "image",
    "image/tiff": "image",
    "video/mp4": "video",
    "video/avi": "video",
    "video/x-msvideo": "video",
    "video/webm": "video",
    "video/mkv": "video",
    "video/x-matroska": "video",
    "video/mov": "video",
    "video/quicktime": "video",
}

IMAGES = "PNG, JPEG, WebP, GIF, BMP or TIFF"
VIDEOS = "MP4, MOV, MKV, WebM or AVI"

# Boxes with which files of the MP4 family begin.
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")


def sniff(head: bytes) -> Format | None:
    """The format of a file that begins like this; None for all that are not decoded."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return PNG
    if head.startswith(b"\xff\xd8\xff"):
        return JPEG
    if head.startswith((b"GIF87a", b"GIF89a")):
        return GIF
    if head.startswith(b"BM"):
        return BMP
    if head.startswith((b"II*\0", b"MM\0*")):
        return TIFF
    if head.startswith(b"RIFF"):
        return {b"WEBP": WEBP, b"AVI ": AVI}.get(head[8:12])
    if head.startswith(b"\x1aE\xdf\xa3"):
        return MATROSKA
    return _mp4(head)


def _mp4(head: bytes) -> Format | None:
    # Pictures in HEIF and AVIF begin with the same box; they are not videos.
    if head[4:8] == b"ftyp" and head[8:12] in {b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif", b"avis"}:
        return None
    return MP4 if head[4:8] in _BOXES else None
