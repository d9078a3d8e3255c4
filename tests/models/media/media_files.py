# SPDX-License-Identifier: Apache-2.0
"""Images and videos made on the spot, good and bad, for the tests of media."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image


def image(format: str = "PNG", size: tuple[int, int] = (8, 6), mode: str = "RGB", **more: Any) -> bytes:
    """Left half red, right half blue."""
    picture = Image.new("RGB", size, (255, 0, 0))
    picture.paste((0, 0, 255), (size[0] // 2, 0, size[0], size[1]))
    buffer = io.BytesIO()
    picture.convert(mode).save(buffer, format, **more)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is so large, and has one line of pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")


def long_gif(frames: int) -> bytes:
    """An animation of so many tiny frames."""
    first = image("GIF", (2, 2))
    body = first[:-1]
    frame = b"\x21\xf9\x04\0\0\0\0\0" + b"\x2c\0\0\0\0\x01\0\x01\0\0" + b"\x02\x02\x44\x01\0"
    return body + frame * frames + b"\x3b"


def video(
    format: str = "mp4",
    codec: str = "libx264",
    frames: int = 20,
    rate: int = 10,
    size: tuple[int, int] = (32, 16),
) -> bytes:
    """Frame i is grey, of brightness 10 * i."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, rate)
        for index in range(frames):
            level = min(10 * index, 255)
            pixels = np.full((size[1], size[0], 3), level, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def sound() -> bytes:
    """A container with sound only."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        frame.pts = 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def data_url(content: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"
