# SPDX-License-Identifier: Apache-2.0
"""Audio files become mono samples at 16 kHz, whatever they were; files that cannot are refused."""

from __future__ import annotations

import io
import struct
import sys
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import Cancelled, InvalidArgument
from headrace.core.extras import MissingExtra
from headrace.models.media.audio import AudioLimits, read_audio, resample

LIMITS = AudioLimits(seconds=10)


def tone(rate: int, frequency: float = 440, seconds: float = 1) -> Any:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)


def wav(samples: Any, rate: int, bits: int = 16, *, floats: bool = False, extensible: bool = False) -> bytes:
    """`samples`: [frames] or [frames, channels]."""
    frames = np.atleast_2d(samples.T).T
    if floats:
        raw = frames.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        raw = (frames * 127 + 128).round().astype(np.uint8).tobytes()
    elif bits == 24:
        raw = b"".join(int(value * (2**23 - 1)).to_bytes(3, "little", signed=True) for value in frames.ravel())
    else:
        raw = (frames * (2 ** (bits - 1) - 1)).round().astype(f"<i{bits // 8}").tobytes()
    kind, channels = 3 if floats else 1, frames.shape[1]
    width = bits // 8 * channels
    layout = struct.pack("<HHIIHH", 0xFFFE if extensible else kind, channels, rate, rate * width, width, bits)
    if extensible:
        layout += struct.pack("<HHIH", 22, bits, 0, kind) + b"\0" * 14
    chunks = b"fmt " + struct.pack("<I", len(layout)) + layout
    chunks += b"LIST" + struct.pack("<I", 3) + b"abc\0"  # an odd size is padded
    chunks += b"data" + struct.pack("<I", len(raw)) + raw
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def expected(frequency: float = 440) -> Any:
    return tone(16_000, frequency) * 32767


@pytest.mark.parametrize(
    ("bits", "floats", "extensible", "most"),
    [(8, False, False, 300), (16, False, True, 2), (24, False, False, 2), (32, False, False, 2), (32, True, True, 2),
     (64, True, False, 2)],
)  # fmt: skip
def test_samples_of_every_size(bits: int, floats: bool, extensible: bool, most: int) -> None:
    samples = read_audio(wav(tone(16_000), 16_000, bits, floats=floats, extensible=extensible), LIMITS)
    assert samples.dtype == np.int16
    assert np.abs(samples - expected()).max() <= most


def test_channels_are_mixed() -> None:
    stereo = np.stack([tone(16_000), np.zeros(16_000)], 1)
    assert np.abs(read_audio(wav(stereo, 16_000), LIMITS) - expected() / 2).max() <= 2


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_other_rates_are_resampled(rate: int) -> None:
    samples = read_audio(wav(tone(rate), rate), LIMITS)
    assert len(samples) == pytest.approx(16_000, abs=2)
    middle = slice(500, 15_500)
    assert np.abs(samples[middle] - expected()[: len(samples)][middle]).max() < 60


def test_what_16_khz_cannot_have_is_filtered_out() -> None:
    high = resample(tone(48_000, 11_000).astype(np.float32), 48_000, 16_000)
    assert np.abs(high[500:-500]).max() < 0.01
    assert len(resample(np.zeros(0, np.float32), 48_000, 16_000)) == 0
    assert len(resample(np.ones(1, np.float32), 44_100, 16_000)) == 1


def test_a_wav_that_was_written_to_a_pipe() -> None:
    data = bytearray(wav(tone(16_000), 16_000))
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff\xff\xff\xff"
    assert len(read_audio(bytes(data), LIMITS)) == 16_000


def encoded(codec: str, container: str, rate: int = 48_000, seconds: float = 1) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(
            (tone(rate, seconds=seconds) * 32767).astype(np.int16).reshape(1, -1), format="s16", layout="mono"
        )
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            format=stream.codec_context.format or "s16", layout="mono", rate=rate, frame_size=stream.frame_size or 1024
        )
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("codec", "container"),
    [("flac", "flac"), ("libmp3lame", "mp3"), ("libopus", "ogg"), ("aac", "mp4"), ("libopus", "webm")],
)
def test_other_formats_by_pyav(codec: str, container: str) -> None:
    pytest.importorskip("av")
    samples = read_audio(encoded(codec, container), LIMITS)
    assert len(samples) == pytest.approx(16_000, abs=2500)
    spectrum = np.abs(np.fft.rfft(samples[2000:14_000]))
    assert spectrum.argmax() * 16_000 / 12_000 == pytest.approx(440, abs=3)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "send WAV, MP3"),
        (b"GIF89a" + b"\0" * 100, "send WAV, MP3"),
        (b"RIFF\0\0\0\0WAVE", "no format"),
        (b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd", "no format"),
        (b"RIFF\0\0\0\0WAVEfmt \4\0\0\0abcd", "cut off"),
        (wav(np.zeros(0), 16_000), "empty"),
        (wav(tone(16_000), 16_000).replace(b"\1\0\1\0\x80\x3e", b"\2\0\1\0\x80\x3e"), "compressed"),
        (wav(tone(16_000), 16_000).replace(b"\1\0\1\0\x80\x3e", b"\1\0\0\0\x80\x3e"), "0 channels"),
        (wav(tone(500), 500), "500 Hz"),
        (wav(tone(16_000, seconds=11), 16_000), "longer than 10 seconds"),
        (b"fLaC" + b"\0" * 50, "damaged"),
        (b"ID3" + b"\xff" * 500, "damaged"),
        (b"\0\0\0\x18ftypM4A " + b"\0" * 50, "damaged"),
    ],
)
def test_files_that_cannot_be_read(data: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_audio(data, LIMITS)


def test_long_files_and_cancelled_ones_end_early() -> None:
    pytest.importorskip("av")
    data = encoded("flac", "flac", seconds=3)
    with pytest.raises(InvalidArgument, match="longer than 2 seconds"):
        read_audio(data, AudioLimits(2))
    with pytest.raises(InvalidArgument, match="to decode"):
        read_audio(data, AudioLimits(10, decode_seconds=-1))
    with pytest.raises(Cancelled):
        read_audio(data, LIMITS, lambda: True)


def test_without_pyav_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert len(read_audio(wav(tone(8000), 8000), LIMITS)) == 16_000
    with pytest.raises(MissingExtra, match=r"headrace\[media\]"):
        read_audio(b"fLaC" + b"\0" * 50, LIMITS)
