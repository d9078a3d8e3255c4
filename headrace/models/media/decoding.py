# SPDX-License-Identifier: Apache-2.0
"""Decode images and videos within limits; detect their formats by content; parse data: URLs."""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, Literal
from urllib.parse import unquote

import numpy as np

from headrace.core.errors import Cancelled, HeadraceError, InvalidArgument
from headrace.core.extras import MissingExtra
from headrace.core.generation import Pixels, PromptImage, PromptVideo

Kind = Literal["image", "video"]

HEAD_BYTES = 64
"""How many bytes `sniff` needs."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format that can be decoded."""

    kind: Kind
    decoder: str
    """The name of Pillow's format, or of FFmpeg's demuxer."""


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

# The first boxes of MP4 files.
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")


def sniff(head: bytes) -> Format | None:
    """Return the format of a file by its first bytes; None if it is not supported."""
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
    # HEIF and AVIF images begin with the same box; they are not videos.
    if head[4:8] == b"ftyp" and head[8:12] in {b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif", b"avis"}:
        return None
    return MP4 if head[4:8] in _BOXES else None


@dataclass(frozen=True, slots=True)
class DataUrl:
    """A data: URL with a parsed head."""

    mime: str
    kind: Kind
    payload: str = field(repr=False)

    @property
    def size(self) -> int:
        """Upper bound of the decoded size."""
        return len(self.payload) // 4 * 3 + 3


def parse_data_url(url: str) -> DataUrl:
    """Parse the head of a data: URL. Raises InvalidArgument for an unsupported MIME type or encoding."""
    head, comma, payload = url[5:].partition(",") if url[:5].lower() == "data:" else ("", "", "")
    parts = [part.strip().lower() for part in head[:200].split(";")]
    if not comma or len(parts) < 2 or parts[-1] != "base64":
        raise InvalidArgument("a data: URL must read data:<MIME type>;base64,<content>")
    kind = MIME_KINDS.get(parts[0])
    if kind is None:
        shown = "".join(char if char.isprintable() else "?" for char in parts[0][:60])
        raise InvalidArgument(f"data: URLs of type {shown!r} are not read; these are: {', '.join(MIME_KINDS)}")
    return DataUrl(parts[0], kind, payload)


def decode_content(data: DataUrl, max_bytes: int) -> bytes:
    """Decode the content. Raises InvalidArgument if it is larger than `max_bytes` or not base64."""
    # One character may be percent-encoded as three.
    percent = data.payload.count("%") if len(data.payload) <= 3 * (max_bytes * 4 // 3 + 8) else 0
    estimated = (len(data.payload) - 2 * percent) // 4 * 3
    if estimated - 2 > max_bytes:
        raise InvalidArgument(f"the content of a data: URL has about {estimated} bytes; {max_bytes} are the most")
    payload = unquote(data.payload, errors="replace") if percent else data.payload
    try:
        # Some encoders break lines.
        content = base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(f"the content of the data: URL ({data.mime}) is not base64, or is cut off") from None
    if not content:
        raise InvalidArgument(f"the data: URL ({data.mime}) has no content")
    return content


log = logging.getLogger("headrace.media")


def decode_image(file: IO[bytes], format: Format, max_pixels: int) -> PromptImage:
    """Decode an image, or its first frame, and apply its orientation. Raises InvalidArgument."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("reading images", "media") from None
    try:
        with Image.open(file, formats=(format.decoder,)) as image:
            width, height = image.size
            if width < 1 or height < 1 or width * height > max_pixels:
                raise _too_large(max_pixels)
            return PromptImage(_pixels(image))
    except HeadraceError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(max_pixels) from None
    except MemoryError:
        raise InvalidArgument("the image is too large for the memory that is left") from None
    except Exception as error:  # Decoders raise all kinds of exceptions for damaged files.
        log.info("could not decode an image: %s", type(error).__name__)
        raise InvalidArgument(f"the image is damaged or cut off: it could not be decoded as {IMAGES}") from None


def _pixels(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from PIL import ImageOps

    image.load()
    if image.mode == "F":
        raise InvalidArgument("images of floating-point pixels have no range that we know; send 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow clips 16-bit images at 255, which makes nearly everything white.
        grey = np.asarray(image).astype(np.int64)
        high = (grey >> 8 if grey.max(initial=0) > 255 else grey).clip(0, 255).astype(np.uint8)
        return np.repeat(high[:, :, None], 3, axis=2)
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "P" and "transparency" in upright.info:
        upright = upright.convert("RGBA")  # converting straight to RGB makes Pillow warn
    return np.array(upright.convert("RGB"), dtype=np.uint8)


def _too_large(max_pixels: int) -> InvalidArgument:
    return InvalidArgument(
        f"the image has no pixels or more than {max_pixels}, the most that are decoded; send a smaller one"
    )


CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "prores")
"""Supported codecs. FFmpeg has hundreds more, most of them rarely audited."""

_MAX_PACKETS = 2_000_000
_SLACK_SECONDS = 0.5
_PROBE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Which frames to take from a video, and its limits."""

    fps: float
    """Frames per second of the video, unless that exceeds `max_frames`."""
    max_frames: int
    frame_pixels: int
    """Width times height."""
    clip_pixels: int
    """All chosen frames together."""
    video_seconds: float
    decode_seconds: float


def decode_video(file: IO[bytes], format: Format, limits: VideoLimits, cancelled: Callable[[], bool]) -> PromptVideo:
    """Return frames spread evenly over the video. Raises InvalidArgument."""
    try:
        import av
    except ImportError:
        raise MissingExtra("reading videos", "media") from None
    try:
        with av.open(
            file,
            "r",
            format=format.decoder,
            options={"probesize": str(_PROBE_BYTES), "protocol_whitelist": "none"},
            metadata_errors="replace",
            timeout=(limits.decode_seconds, limits.decode_seconds),
            io_open=_refuse_open,
        ) as container:
            if not container.streams.video:
                raise InvalidArgument("the video has no picture: it holds only sound or data, or is cut off")
            return _decode(container, container.streams.video[0], limits, cancelled)
    except HeadraceError:
        raise
    except MemoryError:
        raise InvalidArgument("the video is too large for the memory that is left") from None
    except Exception as error:  # Decoders raise all kinds of exceptions for damaged files.
        log.info("could not decode a video: %s", type(error).__name__)
        raise InvalidArgument(f"the video is damaged or cut off: it could not be decoded as {VIDEOS}") from None


def _refuse_open(*_arguments: object) -> IO[bytes]:
    raise ValueError("a video may not name other files")


def _decode(container: Any, stream: Any, limits: VideoLimits, cancelled: Callable[[], bool]) -> PromptVideo:
    context = stream.codec_context
    if context is None or context.codec.canonical_name not in CODECS:
        raise InvalidArgument(f"the video's codec is not decoded here; these are: {', '.join(CODECS)}")
    # Checked before a frame is allocated. Decoders include their margins; the sampler checks exactly.
    context.options = {"max_pixels": str(2 * limits.frame_pixels + 1_000_000)}
    context.thread_count = 2
    stream.thread_type = "AUTO"
    end = time.monotonic() + limits.decode_seconds
    sampler: _Sampler | None = None
    start: float | None = None
    frame_count = 0
    for count, packet in enumerate(container.demux(stream)):
        if cancelled():
            raise Cancelled("reading a video was cancelled")
        if count > _MAX_PACKETS or time.monotonic() > end:
            raise InvalidArgument(
                f"the video takes more than {limits.decode_seconds:g} s to decode; send a shorter one"
            )
        for frame in packet.decode():
            seconds = frame.time if frame.time is not None else frame_count / float(stream.average_rate or limits.fps)
            frame_count += 1
            start = seconds if start is None else start
            if seconds - start > limits.video_seconds:
                raise InvalidArgument(f"the video is longer than {limits.video_seconds:g} seconds; send a part of it")
            if sampler is None:
                sampler = _Sampler(frame, _duration(container, stream), limits)
            sampler.add(frame, seconds - start)
    if sampler is None:
        raise InvalidArgument("the video has no frame that could be decoded")
    return sampler.clip(limits.fps)


def _duration(container: Any, stream: Any) -> float:
    """Return the duration in seconds that the file declares; 0 if it does not."""
    if stream.duration and stream.time_base:
        return max(float(stream.duration * stream.time_base), 0.0)
    return max(container.duration / 1_000_000, 0.0) if container.duration else 0.0


class _Sampler:
    """Choose evenly spaced frames while decoding, up to a maximum.

    The interval follows from the length that the file declares. If that is missing or wrong, every second frame is
    dropped and the interval doubled whenever there are too many.
    """

    def __init__(self, first: Any, duration: float, limits: VideoLimits) -> None:
        self._size = (first.width, first.height)
        pixels = first.width * first.height
        self._frame_pixels = limits.frame_pixels
        self._max_frames = min(limits.max_frames, limits.clip_pixels // max(pixels, 1))
        if pixels > limits.frame_pixels or self._max_frames < 1:
            raise InvalidArgument(f"the video's frames have {pixels} pixels; {limits.frame_pixels} are the most")
        self._quarter_turns = round(getattr(first, "rotation", 0) / 90) % 4
        width, height = self._size if self._quarter_turns % 2 == 0 else reversed(self._size)
        # Memory that is never written to costs nothing.
        self._frames: Pixels = np.empty((self._max_frames, height, width, 3), np.uint8)
        self._seconds: list[float] = []
        self._duration = min(duration, limits.video_seconds)
        self._step = max(1.0 / limits.fps, self._duration / self._max_frames)
        self._next = 0.0

    def add(self, frame: Any, seconds: float) -> None:
        """Take or skip a decoded frame."""
        if seconds < self._next - 1e-4:
            return
        if len(self._seconds) == self._max_frames:
            if seconds < self._duration + _SLACK_SECONDS:
                return
            self._halve()
            if seconds < self._next - 1e-4:
                return
        if frame.width * frame.height > self._frame_pixels:
            raise InvalidArgument(f"a frame of the video has more than {self._frame_pixels} pixels")
        width, height = self._size
        pixels = frame.to_ndarray(width=width, height=height, format="rgb24")
        self._frames[len(self._seconds)] = np.rot90(pixels, self._quarter_turns)
        self._seconds.append(seconds)
        self._next = (int(seconds / self._step + 1e-4) + 1) * self._step

    def clip(self, fps: float) -> PromptVideo:
        """Return the chosen frames."""
        count = len(self._seconds)
        length = self._seconds[-1] - self._seconds[0]
        rate = (count - 1) / length if length > 0 else fps
        return PromptVideo(self._frames[:count], tuple(self._seconds), rate)

    def _halve(self) -> None:
        if self._max_frames > 1:
            frames = self._frames[: len(self._seconds) : 2].copy()
            self._frames[: len(frames)] = frames
            self._seconds = self._seconds[::2]
            self._step *= 2
            self._next = (int(self._seconds[-1] / self._step + 1e-4) + 1) * self._step
        else:
            self._next = float("inf")
