# SPDX-License-Identifier: Apache-2.0
"""What to say to someone who sends a picture as it is, where the model wants its numbers: the most common mistake there is.

Called by `decoding` when the size of the data is wrong anyway.
"""

from __future__ import annotations

from math import prod

from headrace.core.tensors import Buffer
from headrace.models.config.types import InputSpec

_KINDS = ((b"\xff\xd8\xff", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"))


def image_hint(data: Buffer, spec: InputSpec | None) -> str:
    """A clause to end an error message with; "" if the data does not begin like a picture's."""
    start = bytes(data[:8])
    kind = next((kind for mark, kind in _KINDS if start.startswith(mark)), None)
    if kind is None:
        return ""
    wanted = "the model's input"
    if spec is not None and spec.dtype is not None and spec.dims is not None:
        shape = "x".join("any" if size < 0 else str(size) for size in spec.dims)
        wanted = f"input '{spec.name}' as {shape} values of {spec.dtype.name}"
        if spec.dtype.item_bytes and min(spec.dims, default=0) > 0:
            wanted += f", {prod(spec.dims) * spec.dtype.item_bytes} bytes for each image of the batch"
    return (
        f". The data is a {kind} file, and nobody decodes it on the way to the model: decode and resize the image, scale "
        f"it as the model was trained, and send {wanted} (in Python, array.tobytes())"
    )
