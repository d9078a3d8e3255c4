# SPDX-License-Identifier: Apache-2.0
"""The first lines of every process of the fleet: `python -I -S child.py PROGRAM WORD...`. Started by `processes`.

Waits at a gate, its standard input, until it is recorded who it is: if the daemon dies before that, the gate ends and so
does this. Then it becomes the program. Imports nothing else, so that the gate is reached at once.

A socket that the daemon listens on for the program becomes its descriptor 3, and it is told as systemd tells it.
"""

import os
import sys

GO = b"\n"
LISTENS = "HEADRACE_LISTENS"
"""A variable: the number of that socket here."""
_FIRST = 3


def main() -> None:
    """Become the program."""
    if os.read(0, 1) != GO:
        sys.exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    listens = os.environ.pop(LISTENS, "")
    if listens:
        if int(listens) != _FIRST:
            os.dup2(int(listens), _FIRST)
            os.close(int(listens))
        os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
    try:
        os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"{sys.argv[1]} cannot be run: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
