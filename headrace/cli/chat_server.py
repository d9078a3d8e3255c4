# SPDX-License-Identifier: Apache-2.0
"""The server that `headrace chat` starts for a folder: a child process on a free loopback port.

It has its own session, so that Ctrl-C stops an answer and not the server. It ends with the chat, even if that is killed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from headrace.cli.chat_client import ChatClient
from headrace.core import child_stub
from headrace.core.errors import FailedPrecondition

_PROGRAM = "from headrace.cli.main import main; main()"
_OPTIONS = (
    "--http-address", "127.0.0.1", "--http-port", "0", "--allow-grpc=false", "--allow-metrics=false",
    "--exit-on-error=true", "--log-format", "text",
)  # fmt: skip
_LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
_ERROR = re.compile(r"^\S+ ERROR +\S+: (.*)$", re.MULTILINE)
_LOG_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_STOP_SECONDS = 15.0


@contextmanager
def serve_for_chat(models: str) -> Iterator[str]:
    """Start `headrace serve MODELS`, yield its URL when it is ready, and stop it at the end. Raises FailedPrecondition."""
    stub = [sys.executable, "-I", child_stub.__file__, str(os.getpid())]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603 - our own command, without a shell
            [*stub, sys.executable, "-c", _PROGRAM, "serve", *_OPTIONS, "--", models],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield _wait_until_ready(process, log.fileno(), models)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: int, models: str) -> str:
    """Return the server's URL. Loading has no time limit: Ctrl-C stops it."""
    progress = _ProgressLine(f"Starting a server for {models}")
    client: ChatClient | None = None
    try:
        while True:
            if client is None and (match := _LISTENING.search(_read(log))) is not None:
                client = ChatClient(f"http://127.0.0.1:{match[1]}")
            if client is not None and client.is_ready():
                return client.url
            if process.poll() is not None:
                raise FailedPrecondition(f"the server for {models} did not start: {_reason(_read(log))}")
            progress.update()
            time.sleep(_POLL_SECONDS)
    finally:
        progress.close()


def _read(log: int) -> str:
    # With pread: the server writes at the file's shared position.
    size = os.fstat(log).st_size
    return os.pread(log, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace")


def _reason(log: str) -> str:
    """Return the last error of a log, else its last line."""
    errors = _ERROR.findall(log) or log.splitlines() or ["it wrote no log"]
    return " ".join(errors[-1].replace("\\n", " ").split()).removeprefix("error: ")  # the log escapes line breaks


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _ProgressLine:
    """A line on standard error with the seconds so far; on a terminal it is updated in place and removed at the end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._started_at = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._shown = ""
        if not self._terminal:
            typer.echo(f"{text} ...", err=True)

    def update(self) -> None:
        """Show the seconds."""
        line = f"{self._text} ... {time.monotonic() - self._started_at:.0f} s (Ctrl-C stops it)"
        line = line[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be removed
        if self._terminal and line != self._shown:
            self._shown = line
            typer.echo(f"\r{line}", nl=False, err=True)

    def close(self) -> None:
        """Remove the line."""
        if self._shown:
            typer.echo(f"\r{' ' * len(self._shown)}\r", nl=False, err=True)
