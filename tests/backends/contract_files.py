# SPDX-License-Identifier: Apache-2.0
"""Model files that are none: cut short, empty, corrupted, or something else under a model's name.

`harmful` ones carry a pickle that makes a file, the canary, when somebody unpickles it.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from support.malicious_pickle import poisoned_pickle

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
    "0000000d49444154789c6360000002000001e221bc330000000049454e44ae426082"
)
LETTER = b"Dear colleague, this is the model that you asked for.\nIt is no model, it is a letter.\n" * 4


class Canary:
    """Sings (makes a folder) when somebody reads a pickle that it is in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def sang(self) -> bool:
        return self.folder.exists()


def files_of_other_formats(canary: Canary) -> dict[str, bytes]:
    """Files of another kind."""
    poison = poisoned_pickle(canary.folder)
    archive = io.BytesIO()
    # As `torch.save` lays out a whole module, and as a folder of one that was zipped by hand.
    with zipfile.ZipFile(archive, "w") as file:
        for folder in ("", "model/"):
            file.writestr(f"{folder}data.pkl", poison)
            file.writestr(f"{folder}version", "3\n")
    return {
        "a pickle": poison,
        "an old pickle": poisoned_pickle(canary.folder, protocol=0),
        "an archive with a pickle": archive.getvalue(),
        "a picture": PNG,
        "a letter": LETTER,
    }


def cut_and_emptied(whole: bytes) -> dict[str, bytes]:
    """Files that were not copied to their end."""
    return {"half a file": whole[: len(whole) // 2], "a few bytes": whole[:3], "an empty file": b""}


def corrupted(whole: bytes) -> bytes:
    """A file of the right length with a hole of noise: some formats notice, others have other weights now."""
    noise = np.random.default_rng(1).bytes(min(48, max(1, len(whole) // 3)))
    middle = len(whole) // 2
    return whole[:middle] + noise + whole[middle + len(noise) :]
