# SPDX-License-Identifier: Apache-2.0
"""The first lines of an engine's process: have it end with the server, then become the engine. Never imported.

    python stub.py PARENT PROGRAM ARGUMENT ...

Run by `child`, by its path. PARENT is the server's process id.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _run(parent: int, command: list[str]) -> None:
    try:
        # Whatever the server dies of, the engine is asked to end. It stays so when the program is another.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    except AttributeError:
        pass  # not Linux
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606  # the operator's command, without a shell
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2:])
