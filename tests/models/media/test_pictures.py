# SPDX-License-Identifier: Apache-2.0
"""Images: every format that is taken, and everything that pretends to be one."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
from media_files import image, long_gif, png_header
from PIL import Image

from headrace.core.errors import InvalidArgument
from headrace.models.media.decoding import PNG, decode_image, sniff

PIXELS = 1_000_000


def decoded(content: bytes, pixels: int = PIXELS) -> np.ndarray:
    result = sniff(content[:64])
    assert result is not None
    return decode_image(io.BytesIO(content), result, pixels).pixels


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_format_becomes_rgb(format: str) -> None:
    pixels = decoded(image(format, (32, 16)))
    assert (pixels.shape, pixels.dtype) == ((16, 32, 3), np.uint8)
    assert np.abs(pixels[8, 4].astype(int) - (255, 0, 0)).max() < 30
    assert np.abs(pixels[8, 28].astype(int) - (0, 0, 255)).max() < 30
    assert pixels.flags.writeable


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    assert decoded(image("PNG", mode=mode)).shape == (6, 8, 3)


def test_a_palette_with_transparency_becomes_rgb() -> None:
    noise = np.random.default_rng(1).integers(0, 255, (20, 20, 4), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).quantize(16).save(buffer, "PNG")
    assert decoded(buffer.getvalue()).shape == (20, 20, 3)


def test_cmyk_becomes_rgb() -> None:
    assert decoded(image("JPEG", mode="CMYK")).shape == (6, 8, 3)


def test_sixteen_bits_are_scaled() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.array([[0, 32768, 65535]], np.uint16)).save(buffer, "PNG")
    assert decoded(buffer.getvalue())[0, :, 0].tolist() == [0, 128, 255]


def test_a_picture_is_turned_as_the_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = decoded(image("JPEG", (64, 32), exif=exif))
    assert pixels.shape == (64, 32, 3)
    assert pixels[4, 16, 0] > 200
    assert pixels[60, 16, 2] > 200


@pytest.mark.parametrize(("width", "height"), [(10**9, 10**9), (2**31 - 1, 2**31 - 1), (20_000, 8_000), (1001, 1000)])
def test_a_header_with_a_false_size_is_not_believed(width: int, height: int) -> None:
    with pytest.raises(InvalidArgument, match="1000000"):
        decoded(png_header(width, height))


def test_the_largest_that_is_allowed() -> None:
    assert decoded(image("PNG", (1000, 1000))).shape == (1000, 1000, 3)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("part", [0.5, 0.9])
def test_cut_off_images_are_errors(format: str, part: float) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format)
    content = buffer.getvalue()
    with pytest.raises(InvalidArgument, match="damaged or cut off"):
        decoded(content[: int(len(content) * part)])


def test_a_gif_of_very_many_frames_is_its_first() -> None:
    content = long_gif(1_000_000)
    assert decoded(content).shape == (2, 2, 3)


def test_texts_of_pillow_stay_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "headrace")
    with pytest.raises(InvalidArgument) as caught:
        decode_image(io.BytesIO(b"\x89PNG\r\n\x1a\nrubbish"), PNG, PIXELS)
    assert "0x" not in caught.value.message + caplog.text
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"PK\x03\x04",
        b"%PDF-1.7",
        b"<svg ",
        b"<html>",
        b"#EXTM3U",
        b"\0\0\0\x18ftypheic",
        b"\0\0\0\x18ftypavif",
        b"RIFF\0\0\0\0WAVE",
    ],
)
def test_other_files_are_recognised_by_their_content(head: bytes) -> None:
    assert sniff(head) is None


def test_bytes_at_random_do_no_harm() -> None:
    """Damaged anywhere: an image or an InvalidArgument, never another exception."""
    random = np.random.default_rng(7)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = image(kind, (24, 24))
        for _ in range(60):
            content = bytearray(whole)
            for place in random.integers(16, len(content), 4):
                content[place] = int(random.integers(0, 256))
            try:
                assert decoded(bytes(content)).ndim == 3
            except InvalidArgument:
                pass
