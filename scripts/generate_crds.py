# SPDX-License-Identifier: Apache-2.0
"""Write `deploy/crds/` from the tables of `headrace/fleet/schema`; `--check` fails if a committed file is out of date.

Run by hand after a table has changed and, with `--check`, by `make check`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from generated_files import write_or_check

from headrace.fleet.schema.crds import crds
from headrace.fleet.yaml_documents import write

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "crds"
MOST_BYTES = 200_000
"""`kubectl apply` keeps the whole of an object in an annotation, and those have 256 KiB."""
HEAD = "# SPDX-License-Identifier: Apache-2.0\n# Made by scripts/generate_crds.py; do not edit.\n"


def main() -> int:
    """Write, or compare."""
    fresh = {FOLDER / name: HEAD + write([definition]) for name, definition in crds().items()}
    large = [path.name for path, text in fresh.items() if len(text.encode()) > MOST_BYTES]
    if large:
        print(f"over {MOST_BYTES} bytes:", *large, sep="\n  ")
        return 1
    return write_or_check(fresh, FOLDER.glob("*.yaml"))


if __name__ == "__main__":
    sys.exit(main())
