# SPDX-License-Identifier: Apache-2.0
"""The entry script of a model's process. Run by its path, so that any interpreter can run it; never imported.

    python stub.py SOCKET IN OUT PARENT ROOT INSTANCE

SOCKET, IN and OUT are inherited descriptors, PARENT is the server's process id, ROOT the folder that contains the
package. INSTANCE only shows up in the list of processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def _run(arguments: list[str]) -> None:
    descriptor, incoming, outgoing, parent = map(int, arguments[:4])
    # This process must not outlive the server.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
    for inherited in (descriptor, incoming, outgoing):
        if inherited >= 0:
            os.set_inheritable(inherited, False)
    # Python has put this file's folder first, whose modules the model must not see. The package comes last: in a
    # model's own interpreter, its neighbours must not shadow the model's packages.
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    if arguments[4] not in sys.path:
        sys.path.append(arguments[4])
    from headrace.backends.python.child.main import main

    sys.argv[1:] = []
    main(socket.socket(fileno=descriptor), incoming, outgoing)


if __name__ == "__main__":
    _run(sys.argv[1:])
