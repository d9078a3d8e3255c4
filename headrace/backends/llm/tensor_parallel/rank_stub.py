# SPDX-License-Identifier: Apache-2.0
"""The entry script of a rank's process. Run by its path; never imported.

    python rank_stub.py SOCKET PARENT ROOT TITLE

SOCKET is an inherited descriptor, PARENT the server's process id, ROOT the folder that contains the package. TITLE only
shows up in the list of processes.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading

_POLL_MILLISECONDS = 500


def _run(descriptor: int, parent: int, root: str) -> None:
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # what libraries print belongs in the log
    # Python has put this file's folder first, whose modules no library must see.
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    if root not in sys.path:
        sys.path.insert(0, root)
    loaded = threading.Event()
    threading.Thread(target=_exit_with_server, args=(descriptor, loaded), daemon=True).start()
    from headrace.backends.llm.tensor_parallel.rank import main

    loaded.set()
    main(socket.socket(fileno=descriptor), parent)


def _exit_with_server(descriptor: int, loaded: threading.Event) -> None:
    """End this process if the server ends while it imports, which takes a minute on a busy machine. In a thread."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    while not loaded.is_set():
        if poll.poll(_POLL_MILLISECONDS) and not loaded.is_set():
            os._exit(1)


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
