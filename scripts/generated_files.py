# SPDX-License-Identifier: Apache-2.0
"""Write the files that a script generates, or with `--check` compare them with those in the repository."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_or_check(fresh: Mapping[Path, str], present: Iterable[Path] = ()) -> int:
    """Write what differs and delete what is in `present` but not in `fresh`. With `--check` only say so, and return 1."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in fresh.items() if not path.exists() or path.read_text() != text]
    stale += [path for path in present if path not in fresh]
    if check and stale:
        names = "".join(f"\n  {path.name}" for path in sorted(stale))
        print(f"out of date, run 'python scripts/{Path(sys.argv[0]).name}':{names}")
        return 1
    for path in stale:
        path.unlink(missing_ok=True)
        if path in fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fresh[path])
    print(f"{len(fresh)} files", "are up to date" if check else f"made, {len(stale)} of them changed")
    return 0
