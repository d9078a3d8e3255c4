# SPDX-License-Identifier: Apache-2.0
"""An encoded image, as RGB pixels. Called in threads by `reader`, with a file whose format `kinds` has told.

Pillow is told which one format to expect, so that no other of its many readers ever sees the bytes; the size in the header
is checked before anything is decoded. Texts of Pillow's errors hold addresses of memory and never leave this module.
"""

from __future__ import annotations

import logging
from typing import IO, Any

import numpy as np

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.generation import Picture
from headrace.models.media.kinds import IMAGES, Format

log = logging.getLogger("headrace.media")


def decode_picture(file: IO[bytes], format: Format, max_pixels: int) -> Picture:
    """The image, or its first frame, turned as its camera was held. Raises InvalidArgument."""
    try:
        from PIL import Image
    except ImportError:
        raise FailedPrecondition("reading images needs Pillow; install it with `pip install headrace[media]`") from None
    try:
        with Image.open(file, formats=(format.decoder,)) as image:
            width, height = image.size
            if width < 1 or height < 1 or width * height > max_pixels:
                raise _too_large(max_pixels)
            return Picture(_pixels(image))
    except HeadraceError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(max_pixels) from None
    except MemoryError:
        raise InvalidArgument("the image is too large for the memory that is left") from None
    except Exception as error:  # decoders raise whatever a damaged file makes them
        log.info("an image was not decoded: %s", type(error).__name__)
        raise InvalidArgument(f"the image is damaged or cut off: it could not be decoded as {IMAGES}") from None


def _pixels(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from PIL import ImageOps

    image.load()
    if image.mode == "F":
        raise InvalidArgument("images of floating-point pixels have no range that we know; send 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow cuts 16 bits at 255, which makes nearly everything white.
        grey = np.asarray(image).astype(np.int64)
        high = (grey >> 8 if grey.max(initial=0) > 255 else grey).clip(0, 255).astype(np.uint8)
        return np.repeat(high[:, :, None], 3, axis=2)
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "P" and "transparency" in upright.info:
        upright = upright.convert("RGBA")  # straight to RGB, Pillow warns
    return np.array(upright.convert("RGB"), dtype=np.uint8)


def _too_large(max_pixels: int) -> InvalidArgument:
    return InvalidArgument(
        f"the image has no pixels or more than {max_pixels}, the most that are decoded; send a smaller one"
    )
