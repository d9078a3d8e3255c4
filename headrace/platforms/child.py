# SPDX-License-Identifier: Apache-2.0
"""The first lines of a started service, `python -m headrace.platforms.child JOB FILE MODULE:FUNCTION WORD...`.

Started by `process`. Waits at a gate, its standard input, until it is recorded who it is: if the gateway dies before
that, the gate ends and so does the service, so that none runs that nobody knows. Then it takes the secret words from FILE,
which never are on a command line, and calls the function. Imports nothing else, so that the gate is reached at once.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys

GO = b"\n"
_SECRET = re.compile(r"\{secret:([a-z_]+)\}")


def main() -> None:
    """Run the program of a service."""
    secrets_file, target, words = sys.argv[2], sys.argv[3], sys.argv[4:]
    if os.read(0, 1) != GO:
        sys.exit(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with open(secrets_file, encoding="utf-8") as file:
        secrets = json.load(file)
    module, _, function = target.partition(":")
    sys.argv = [module, *(_word(word, secrets) for word in words)]
    getattr(importlib.import_module(module), function)()


def _word(word: str, secrets: dict[str, str]) -> str:
    found = _SECRET.fullmatch(word)
    return secrets[found[1]] if found else word


if __name__ == "__main__":
    main()
