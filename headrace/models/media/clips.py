# SPDX-License-Identifier: Apache-2.0
"""An encoded video, as some of its frames. Called in threads by `reader`, with a file whose format `kinds` has told.

FFmpeg is told which demuxer to use and may open nothing else: playlists, which name other files and hosts, are never read.
What a header says of length and number of frames is a hint; the bounds hold for what is really decoded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.generation import Clip, Pixels
from headrace.models.media.kinds import VIDEOS, Format

log = logging.getLogger("headrace.media")

CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg", "prores")
"""What is decoded. FFmpeg knows hundreds more, most of them seldom looked at by anyone but attackers."""

_PACKETS = 2_000_000
_SLACK_SECONDS = 0.5
_PROBE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ClipLimits:
    """What is wanted of a video, and how much it may take."""

    fps: float
    """Frames for each second of the video, if that makes not too many."""
    max_frames: int
    frame_pixels: int
    """Width times height."""
    clip_pixels: int
    """All chosen frames together."""
    video_seconds: float
    decode_seconds: float


def decode_clip(file: IO[bytes], format: Format, limits: ClipLimits, cancelled: Callable[[], bool]) -> Clip:
    """Frames spread evenly over the video. Raises InvalidArgument."""
    try:
        import av
    except ImportError:
        raise FailedPrecondition("reading videos needs PyAV; install it with `pip install headrace[media]`") from None
    try:
        with av.open(
            file,
            "r",
            format=format.decoder,
            options={"probesize": str(_PROBE_BYTES), "protocol_whitelist": "none"},
            metadata_errors="replace",
            timeout=(limits.decode_seconds, limits.decode_seconds),
            io_open=_open_nothing,
        ) as container:
            if not container.streams.video:
                raise InvalidArgument("the video has no picture: it holds only sound or data, or is cut off")
            return _decode(container, container.streams.video[0], limits, cancelled)
    except HeadraceError:
        raise
    except MemoryError:
        raise InvalidArgument("the video is too large for the memory that is left") from None
    except Exception as error:  # decoders raise whatever a damaged file makes them
        log.info("a video was not decoded: %s", type(error).__name__)
        raise InvalidArgument(f"the video is damaged or cut off: it could not be decoded as {VIDEOS}") from None


def _open_nothing(*_asked: object) -> IO[bytes]:
    raise ValueError("a video may not name other files")


def _decode(container: Any, stream: Any, limits: ClipLimits, cancelled: Callable[[], bool]) -> Clip:
    context = stream.codec_context
    if context is None or context.codec.canonical_name not in CODECS:
        raise InvalidArgument(f"the video's codec is not decoded here; these are: {', '.join(CODECS)}")
    # Before a frame is allocated. Decoders count their margins too; the sampler is exact.
    context.options = {"max_pixels": str(2 * limits.frame_pixels + 1_000_000)}
    context.thread_count = 2
    stream.thread_type = "AUTO"
    end = time.monotonic() + limits.decode_seconds
    sampler: _Sampler | None = None
    start: float | None = None
    shown = 0
    for count, packet in enumerate(container.demux(stream)):
        if cancelled():
            raise Cancelled("reading a video was cancelled")
        if count > _PACKETS or time.monotonic() > end:
            raise InvalidArgument(
                f"the video takes more than {limits.decode_seconds:g} s to decode; send a shorter one"
            )
        for frame in packet.decode():
            at = frame.time if frame.time is not None else shown / float(stream.average_rate or limits.fps)
            shown += 1
            start = at if start is None else start
            if at - start > limits.video_seconds:
                raise InvalidArgument(f"the video is longer than {limits.video_seconds:g} seconds; send a part of it")
            if sampler is None:
                sampler = _Sampler(frame, _duration(container, stream), limits)
            sampler.see(frame, at - start)
    if sampler is None:
        raise InvalidArgument("the video has no frame that could be decoded")
    return sampler.clip(limits.fps)


def _duration(container: Any, stream: Any) -> float:
    """Seconds, as the file says; 0 if it does not."""
    if stream.duration and stream.time_base:
        return max(float(stream.duration * stream.time_base), 0.0)
    return max(container.duration / 1_000_000, 0.0) if container.duration else 0.0


class _Sampler:
    """Chooses frames as they come by, at most so many, evenly.

    Where the file told its length, the distance is right from the beginning. Where it did not, or lied, every second frame
    is dropped and the distance doubled whenever there are too many.
    """

    def __init__(self, first: Any, duration: float, limits: ClipLimits) -> None:
        self._size = (first.width, first.height)
        pixels = first.width * first.height
        self._frame_pixels = limits.frame_pixels
        self._most = min(limits.max_frames, limits.clip_pixels // max(pixels, 1))
        if pixels > limits.frame_pixels or self._most < 1:
            raise InvalidArgument(f"the video's frames have {pixels} pixels; {limits.frame_pixels} are the most")
        self._turns = round(getattr(first, "rotation", 0) / 90) % 4
        width, height = self._size if self._turns % 2 == 0 else reversed(self._size)
        # Room that is never written to costs nothing.
        self._frames: Pixels = np.empty((self._most, height, width, 3), np.uint8)
        self._seconds: list[float] = []
        self._duration = min(duration, limits.video_seconds)
        self._step = max(1.0 / limits.fps, self._duration / self._most)
        self._next = 0.0

    def see(self, frame: Any, at: float) -> None:
        """A frame comes by."""
        if at < self._next - 1e-4:
            return
        if len(self._seconds) == self._most:
            if at < self._duration + _SLACK_SECONDS:
                return
            self._halve()
            if at < self._next - 1e-4:
                return
        if frame.width * frame.height > self._frame_pixels:
            raise InvalidArgument(f"a frame of the video has more than {self._frame_pixels} pixels")
        width, height = self._size
        pixels = frame.to_ndarray(width=width, height=height, format="rgb24")
        self._frames[len(self._seconds)] = np.rot90(pixels, self._turns)
        self._seconds.append(at)
        self._next = (int(at / self._step + 1e-4) + 1) * self._step

    def clip(self, fps: float) -> Clip:
        """What was chosen."""
        count = len(self._seconds)
        length = self._seconds[-1] - self._seconds[0]
        rate = (count - 1) / length if length > 0 else fps
        return Clip(self._frames[:count], tuple(self._seconds), rate)

    def _halve(self) -> None:
        if self._most > 1:
            kept = self._frames[: len(self._seconds) : 2].copy()
            self._frames[: len(kept)] = kept
            self._seconds = self._seconds[::2]
            self._step *= 2
            self._next = (int(self._seconds[-1] / self._step + 1e-4) + 1) * self._step
        else:
            self._next = float("inf")
