# SPDX-License-Identifier: Apache-2.0
"""A picture file, as a browser or a camera sends it, to the numbers that the classifier takes."""

import io
from typing import Annotated

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

BATCH = 16  # up to so many pictures come in one call; the arrays have one more dimension in front for them


def predict(picture: Annotated[npt.NDArray[np.bytes_], (1,)]) -> Annotated[npt.NDArray[np.float32], (3, 32, 32)]:
    """Each file as [channels, height, width] from 0 to 1."""
    return np.stack([_numbers(file) for (file,) in picture])


def _numbers(file: bytes) -> npt.NDArray[np.float32]:
    try:
        image = Image.open(io.BytesIO(file), formats=("PNG", "JPEG")).convert("RGB").resize((32, 32))
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError("this is no PNG or JPEG file") from error  # told to the caller, with status 400
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 255
