# SPDX-License-Identifier: Apache-2.0
"""What the contract suite brings along: the stand-in service's line, hostile texts, a watch for secrets."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
PROGRAM = HERE / "contract_program.py"
NOTHING: Mapping[str, str] = {}


def command(program: str = "serve", words: Sequence[str] = (), *, port: int = 8080, python: str = "python3") -> str:
    """The stand-in service as one line for a shell: nothing has to lie in the image but Python."""
    argv = [python, "-c", PROGRAM.read_text(), program, "--port", str(port), *words]
    return "umask 0 && exec " + shlex.join(argv)


def hostile(canary: Path) -> list[str]:
    """Texts that do something wherever they are not taken as they are."""
    touch = f"touch {canary}"
    return [
        f"$({touch})",
        f"`{touch}`",
        f"; {touch};",
        f"'; {touch}; '",
        f'"; {touch}; "',
        f"'\"'\"'; {touch} #",
        f"&& {touch} ||",
        f"| {touch}",
        f"\\'; {touch}",
        f"a\n{touch}\n",
        f"a\r\n{touch}",
        f"EOF\n{touch}\nEOF\n",
        "# not a comment",
        "$HOME ${PATH} $$ $(id) %PATH% %j %x {port} {{x}} !! ~ *",
        "back\\slash \\n \\\\ \\",
        "tab\tand  two  spaces ",
        " leading",
        "--flag=x",
        "-e",
        'json {"a": "b\'c", "d": [1, null]}',
        "key: [yaml, {a: b}] # & * ! | > ' \" % @",
        "größe 你好 🚀",
        "a,b;c:d=e",
        "",
        "null",
        "yes",
        "007",
    ]


class Watch:
    """Looks at the command lines of all processes of this machine, again and again, for a text that must not be there."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.seen: list[str] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *told: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.005):
            for name in os.listdir("/proc"):
                if name.isdigit():
                    with contextlib.suppress(OSError):
                        arguments = Path("/proc", name, "cmdline").read_bytes()
                        if self._text in arguments:
                            self.seen.append(arguments.replace(b"\0", b" ").decode(errors="replace")[:200])
