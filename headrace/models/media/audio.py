# SPDX-License-Identifier: Apache-2.0
"""Decode audio files within limits, to mono samples at 16 kHz. WAV needs numpy alone, other formats PyAV."""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import Cancelled, HeadraceError, InvalidArgument
from headrace.core.extras import MissingExtra
from headrace.core.transcription import SAMPLE_RATE

log = logging.getLogger("headrace.media")

Samples = npt.NDArray[np.int16]
_Floats = npt.NDArray[np.float32]

FORMATS = "WAV, MP3, FLAC, Ogg, M4A or WebM"
_CODECS = ("mp3", "flac", "vorbis", "opus", "aac", "alac")
_PROBE_BYTES = 1 << 20
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MAX_CHANNELS, _MIN_RATE, _MAX_RATE = 32, 1000, 384_000
_ZERO_CROSSINGS = 16
"""Of the resampling filter, on each side."""
_BLOCK = 1 << 15
"""Samples that are resampled at a time: the filter needs some hundred times their memory."""


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Limits on one audio file."""

    seconds: float
    """Its length."""
    decode_seconds: float = 120.0
    """Time to decode it."""


def read_audio(data: bytes, limits: AudioLimits, cancelled: Callable[[], bool] = lambda: False) -> Samples:
    """Return the samples of an audio file. Raises InvalidArgument. Slow: not for an event loop."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        floats, rate = _read_wav(data, limits)
        samples = _to_int16(resample(floats, rate, SAMPLE_RATE))
    else:
        samples = _decode(data, _demuxer(data), limits, cancelled)
    if not len(samples):
        raise InvalidArgument("the audio is empty: send some sound")
    return samples


def resample(samples: _Floats, rate: int, target_rate: int) -> _Floats:
    """Return the samples at another rate, filtered by a windowed sinc."""
    if rate == target_rate or not len(samples):
        return samples
    divisor = math.gcd(rate, target_rate)
    up, down = target_rate // divisor, rate // divisor
    cutoff = min(1.0, target_rate / rate)
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    padded = np.concatenate([np.zeros(half, np.float32), samples, np.zeros(half + down, np.float32)])
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    resampled = np.empty(math.ceil(len(samples) * up / down), np.float32)
    offsets = np.arange(1 - half, half + 1)
    for phase in range(min(up, len(resampled))):
        base, part = divmod(phase * down, up)
        distances = offsets - part / up
        window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distances / half, -1, 1))
        weights = (cutoff * np.sinc(cutoff * distances) * window).astype(np.float32)
        count = len(range(phase, len(resampled), up))
        for first in range(0, count, _BLOCK):
            last = min(first + _BLOCK, count)
            rows = neighbours[base + 1 + first * down : base + 1 + last * down : down]
            resampled[phase + first * up : phase + last * up : up] = rows[: last - first] @ weights
    return resampled


def _to_int16(samples: _Floats) -> Samples:
    return (np.clip(np.nan_to_num(samples), -1, 1) * 32767).round().astype(np.int16)


def _read_wav(data: bytes, limits: AudioLimits) -> tuple[_Floats, int]:
    """Return mono samples and their rate."""
    layout: tuple[int, int, int, int] | None = None
    at = 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        content = memoryview(data)[at + 8 : at + 8 + size]
        if name == b"fmt ":
            layout = _wav_layout(content)
        elif name == b"data":
            if layout is None:
                break
            # A size that is too large comes from a program that wrote the file to a pipe.
            return _wav_samples(content, layout, limits), layout[2]
        at += 8 + size + size % 2
    raise InvalidArgument("the WAV file is damaged: it has no format or no samples")


def _wav_layout(content: memoryview) -> tuple[int, int, int, int]:
    """Return encoding, channels, rate and bits of a sample."""
    if len(content) < 16:
        raise InvalidArgument("the WAV file is damaged: its format is cut off")
    encoding, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content)
    if encoding == _EXTENSIBLE and len(content) >= 26:
        encoding = int.from_bytes(content[24:26], "little")
    if (encoding, bits) not in ((_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)):
        raise InvalidArgument("the WAV file is compressed or has unusual samples: send PCM of 8, 16, 24 or 32 bits")
    if not 1 <= channels <= _MAX_CHANNELS or not _MIN_RATE <= rate <= _MAX_RATE:
        raise InvalidArgument(
            f"the WAV file has {channels} channels of {rate} Hz: send 1 to {_MAX_CHANNELS} of {_MIN_RATE} to {_MAX_RATE} Hz"
        )
    return encoding, channels, rate, bits


def _wav_samples(content: memoryview, layout: tuple[int, int, int, int], limits: AudioLimits) -> _Floats:
    encoding, channels, rate, bits = layout
    width = bits // 8
    frames = len(content) // (width * channels)
    if frames > limits.seconds * rate:
        raise _too_long(limits)
    raw = content[: frames * width * channels]
    if encoding == _FLOAT:
        values = np.frombuffer(raw, f"<f{width}").astype(np.float32)
    elif bits == 8:
        values = (np.frombuffer(raw, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    elif bits == 24:
        wide = np.zeros((frames * channels, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        values = wide.view("<i4").ravel().astype(np.float32) / np.float32(2**31)
    else:
        values = np.frombuffer(raw, f"<i{width}").astype(np.float32) / np.float32(2 ** (bits - 1))
    return values if channels == 1 else values.reshape(-1, channels).mean(1, dtype=np.float32)


def _demuxer(data: bytes) -> str:
    """Return FFmpeg's name of the file's format, found by its content."""
    if data.startswith(b"fLaC"):
        return "flac"
    if data.startswith(b"OggS"):
        return "ogg"
    if data.startswith(b"ID3") or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return "mp3"
    if data[4:8] == b"ftyp":
        return "mov"
    if data.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    raise InvalidArgument(f"the file is not audio that can be read here: send {FORMATS}")


def _decode(data: bytes, demuxer: str, limits: AudioLimits, cancelled: Callable[[], bool]) -> Samples:
    try:
        import av
    except ImportError:
        raise MissingExtra("reading audio other than WAV", "media", "send WAV") from None
    try:
        with av.open(
            BytesIO(data),
            "r",
            format=demuxer,
            options={"probesize": str(_PROBE_BYTES), "protocol_whitelist": "none"},
            metadata_errors="replace",
            io_open=_refuse_open,
        ) as container:
            if not container.streams.audio:
                raise InvalidArgument("the file has no sound")
            resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
            return _decode_stream(container, container.streams.audio[0], resampler, limits, cancelled)
    except HeadraceError:
        raise
    except MemoryError:
        raise InvalidArgument("the audio is too large for the memory that is left") from None
    except Exception as error:  # Decoders raise all kinds of exceptions for damaged files.
        log.info("could not decode audio: %s", type(error).__name__)
        raise InvalidArgument(f"the audio is damaged or cut off: it could not be decoded as {FORMATS}") from None


def _refuse_open(*_arguments: object) -> Any:
    raise ValueError("audio may not name other files")


def _decode_stream(
    container: Any, stream: Any, resampler: Any, limits: AudioLimits, cancelled: Callable[[], bool]
) -> Samples:
    context = stream.codec_context
    if context is None or context.codec.canonical_name not in _CODECS:
        raise InvalidArgument(f"the audio's codec is not decoded here; these are: {', '.join(_CODECS)}")
    end = time.monotonic() + limits.decode_seconds
    most = int(limits.seconds * SAMPLE_RATE)
    parts: list[Samples] = []
    count = 0
    for packet in container.demux(stream):
        if cancelled():
            raise Cancelled("reading audio was cancelled")
        if time.monotonic() > end:
            raise InvalidArgument(
                f"the audio takes more than {limits.decode_seconds:g} s to decode: send a shorter file"
            )
        for frame in packet.decode():
            for resampled in resampler.resample(frame):
                part: Samples = resampled.to_ndarray().ravel()
                parts.append(part)
                count += len(part)
                if count > most:
                    raise _too_long(limits)
    parts += [resampled.to_ndarray().ravel() for resampled in resampler.resample(None)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int16)


def _too_long(limits: AudioLimits) -> InvalidArgument:
    return InvalidArgument(f"the audio is longer than {limits.seconds:g} seconds: send it in parts")
