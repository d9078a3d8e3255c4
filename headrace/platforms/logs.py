# SPDX-License-Identifier: Apache-2.0
"""The log file of a service that writes to it by itself: its end is read, and its beginning is dropped when it grows.

Used by `process`. The service has the file open for appending, so cutting it to nothing is safe for both sides.
"""

from __future__ import annotations

import os
from pathlib import Path


def last_lines(path: Path, tail: int, most_bytes: int) -> str:
    """The last lines, as text whatever the bytes are; "" if there is no file."""
    if tail <= 0:
        return ""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            text = file.read(most_bytes).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.replace("\0", "\ufffd").splitlines()[-tail:])


def keep_end(path: Path, most_bytes: int) -> None:
    """Drop the beginning of a log of more than twice `most_bytes`. What is written at that very moment may be lost."""
    if os.stat(path).st_size <= 2 * most_bytes:
        return
    with path.open("r+b") as file:
        file.seek(-most_bytes, os.SEEK_END)
        kept = file.read(most_bytes)
        file.truncate(0)
    with path.open("ab") as file:
        file.write(kept[kept.find(b"\n") + 1 :])
