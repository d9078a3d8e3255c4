# SPDX-License-Identifier: Apache-2.0
"""Count the GPUs that models may use, without loading a driver library."""

from __future__ import annotations

import os
import re
from pathlib import Path

_DEVICE = re.compile(r"nvidia[0-9]+")


def visible_gpus(devices: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA devices of this machine that CUDA_VISIBLE_DEVICES leaves visible."""
    try:
        present = sum(1 for entry in os.listdir(devices) if _DEVICE.fullmatch(entry))
    except OSError:
        return 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return present
    # CUDA stops at the first entry that it does not know; -1 is the usual way to hide all GPUs.
    chosen = 0
    for entry in named.split(","):
        text = entry.strip()
        if not text or text.startswith("-"):
            break
        chosen += 1
    return min(present, chosen)
