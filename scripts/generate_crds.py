# SPDX-License-Identifier: Apache-2.0
"""Write `deploy/crds/` from the tables of `headrace/fleet/schema`; `--check` fails if a committed file is out of date.

Run by hand after a table has changed and, with `--check`, by `make check`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.fleet.schema.crds import crds
from headrace.fleet.yaml_documents import write

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "crds"
MOST_BYTES = 200_000
"""`kubectl apply` keeps the whole of an object in an annotation, and those have 256 KiB."""
HEAD = "# SPDX-License-Identifier: Apache-2.0\n# Made by scripts/generate_crds.py; do not edit.\n"


def main() -> int:
    """Write, or compare."""
    check = "--check" in sys.argv[1:]
    fresh = {name: (HEAD + write([definition])).encode() for name, definition in crds().items()}
    large = [name for name, content in fresh.items() if len(content) > MOST_BYTES]
    if large:
        print(f"over {MOST_BYTES} bytes:", *large, sep="\n  ")
        return 1
    there = {path.name: path.read_bytes() for path in FOLDER.glob("*.yaml")}
    stale = sorted(name for name in fresh.keys() | there.keys() if fresh.get(name) != there.get(name))
    if check and stale:
        print("out of date, run 'python scripts/generate_crds.py':", *stale, sep="\n  ")
        return 1
    if not check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name in stale:
            (FOLDER / name).unlink(missing_ok=True)
            if name in fresh:
                (FOLDER / name).write_bytes(fresh[name])
    print(f"{len(fresh)} CRDs", "checked" if check else f"written, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
