# SPDX-License-Identifier: Apache-2.0
"""The first lines of a child process that must not outlive its parent: make it stop with the parent, then exec the program.

    python child_stub.py PARENT PROGRAM ARGUMENT ...

Run by its path, `child_stub.__file__`. PARENT is the parent's process id. The kernel watches the thread that starts the
child, so this has to be one that lives as long as the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _run(parent: int, command: list[str]) -> None:
    try:
        # The kernel sends SIGTERM when the parent dies for any reason. The setting survives exec.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    except AttributeError:
        pass  # not Linux
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606  # the caller's command, without a shell
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2:])
