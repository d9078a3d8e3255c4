# SPDX-License-Identifier: Apache-2.0
"""Target `audio`: a WAV file is decoded within the limits, or refused with a reason."""

from __future__ import annotations

import struct

from fuzz.target import Check, Target, require
from headrace.core.errors import HeadraceError
from headrace.models.media.audio import AudioLimits, read_audio

_SECONDS = 5.0


def _open() -> Check:
    limits = AudioLimits(_SECONDS)

    def check(data: bytes) -> None:
        try:
            # Other formats are FFmpeg's to read.
            samples = read_audio(b"RIFF" + data[4:8].ljust(4, b"\0") + b"WAVE" + data[12:], limits)
        except HeadraceError as error:
            require(bool(str(error)), "a refusal without a word")
            return
        require(0 < len(samples) <= _SECONDS * 16_000 + 1, f"{len(samples)} samples")

    return check


TARGET = Target(
    "WAV files: samples within the limits, or a refusal with a reason",
    _open,
    (
        b"fmt \x10\0\0\0",
        b"fmt \x28\0\0\0",
        b"data",
        b"\xff\xff\xff\xff",
        b"LIST\x03\0\0\0abc\0",
        struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16),
        struct.pack("<HHIIHH", 3, 2, 44_100, 352_800, 8, 32),
        struct.pack("<HHIIHH", 0xFFFE, 1, 8000, 8000, 1, 8),
        b"\0\0\x80\x7f",
    ),
)
