# SPDX-License-Identifier: Apache-2.0
"""A `headrace` command in a terminal of its own (a pseudo-terminal), and someone who types into it.

with Terminal("chat", "--url", server.url) as terminal:
    terminal.read_until("> ")
    terminal.type("hello\n")
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from support.programs import HEADRACE, PLAIN

CTRL_C, CTRL_D = "\x03", "\x04"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROGRAM = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal that Ctrl-C comes from
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A process and its terminal. Leaving the block kills the process if it still runs."""

    def __init__(self, *words: str | Path, cwd: Path | None = None) -> None:
        self._terminal, inner = pty.openpty()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(HEADRACE), *map(str, words)],
                env={**os.environ, **PLAIN},
                cwd=cwd,
                stdin=inner,
                stdout=inner,
                stderr=inner,
                start_new_session=True,
            )
        finally:
            os.close(inner)
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def waits(self) -> bool:
        """Whether the program waits for input, or for something else that a signal interrupts.

        Python's `readline` has a gap: it learns of a Ctrl-C between a key and its next wait only from the next key.
        """
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

    def read_until(self, text: str) -> str:
        """Return what is shown up to and with a text. The test's own time-out is the limit."""
        while text not in self._unread:
            try:
                piece = os.read(self._terminal, 65536)
            except OSError:  # the process has ended
                piece = b""
            if not piece:
                raise AssertionError(f"{text!r} was not shown before the end: {self._unread!r}")
            self._unread = _COLOUR.sub("", self._unread + piece.decode(errors="replace").replace("\r\n", "\n"))
        shown, found, self._unread = self._unread.partition(text)
        return shown + found

    def wait(self) -> int:
        """Read to the end and return the exit code."""
        try:
            while os.read(self._terminal, 65536):
                pass
        except OSError:
            pass
        return self.process.wait(60)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *details: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)
