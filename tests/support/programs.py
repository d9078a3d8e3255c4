# SPDX-License-Identifier: Apache-2.0
"""Run the `headrace` command: as a process of its own (`Program`), or inside this process (`run`).

with Program("serve", folder, "--http-port", "0", log=tmp_path / "log") as server:
    requests to server.url
done = run("models", "check", folder)
assert done.returncode == 0, done.stderr

`run` is 20 times quicker than a process, so it is used wherever the process itself is not what is tested.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.waiting import eventually

HEADRACE = Path(sys.executable).parent / "headrace"
PLAIN = {"NO_COLOR": "1", "TERM": "dumb"}
"""The environment of a command whose output is read: no colours, no terminal."""
LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
_STOP_SECONDS = 100.0


BOTH_WORKERS_READY = re.compile(r"(?s)model\(s\).*model\(s\)")
"""In the log of a server of two workers, each of which loads its models by itself."""


class Program:
    """A process that a test starts: its log, its ports, and a clean end.

    `args` are those of `headrace`, or a whole command if `command` is given. Standard output and error go to `log`.
    Leaving the `with` block sends SIGTERM and expects exit code 0, unless the process has ended before.
    """

    def __init__(
        self,
        *args: str | Path,
        log: Path,
        command: tuple[str | Path, ...] = (HEADRACE,),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ready: str | re.Pattern[str] | None = None,
        new_session: bool = False,
    ) -> None:
        self.args = [str(argument) for argument in (*command, *args)]
        self._log = log
        self._env = {**os.environ, **PLAIN, **(env or {})}
        self._cwd = cwd
        self._ready = ready
        self._new_session = new_session
        self._read_from = 0
        self.process: subprocess.Popen[bytes]

    def start(self) -> Program:
        """Start it, and wait for the text that says it is ready."""
        self._read_from = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                self.args,
                env=self._env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=self._new_session,
            )
        if self._ready is not None:
            self.wait_for(self._ready)
        return self

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has written since it was started last."""
        with self._log.open("rb") as reader:
            reader.seek(self._read_from)
            return reader.read().decode(errors="replace")

    @property
    def ports(self) -> list[int]:
        """The ports it says that it listens on, in its order."""
        return [int(port) for port in LISTENING.findall(self.log)]

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def grpc_url(self) -> str:
        """The port of a server that it tells last."""
        return f"grpc://127.0.0.1:{self.ports[-1]}"

    def wait_for(self, text: str | re.Pattern[str]) -> re.Match[str]:
        """Return when the log has a text; fail at once if the process ends before."""
        pattern = text if isinstance(text, re.Pattern) else re.compile(re.escape(text))

        def found() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            match = pattern.search(self.log)
            if match is None and ended:
                raise RuntimeError(f"{self.args[:4]} ended with {self.process.returncode}:\n{self.log}")
            return match

        match: re.Match[str] = eventually(found, within=240, message=f"{text!r} in the log of {self.args[:4]}")
        return match

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, within: float = _STOP_SECONDS) -> int:
        """Its exit code, when it has ended."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.args[:4]} did not end within {within:g} s:\n{self.log}") from None

    def stop(self, within: float = _STOP_SECONDS) -> int:
        """Ask it to end, and return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait(within)

    def kill(self) -> None:
        """End it at once, as `kill -9` does."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Program:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        ended_before = self.process.poll() is not None
        code = self.stop()
        if kind is None and not ended_before:
            assert code == 0, self.log


@dataclass(frozen=True)
class Finished:
    """A command that has ended; named as in `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def run(
    *args: str | Path,
    env: Mapping[str, str] | None = None,
    input: str = "",
    cwd: Path | None = None,
    merged: bool = False,
) -> Finished:
    """Run a `headrace` command to its end inside this process. `merged`: standard error goes to standard output."""
    from headrace.cli.main import app

    out = _Text()
    err = out if merged else _Text()
    words = [str(argument) for argument in args]
    with (
        patch.dict(os.environ, {**PLAIN, "COLUMNS": "120", **(env or {})}),
        patch.object(sys, "argv", ["headrace", *words]),
        patch.object(sys, "stdin", _Text(input)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or Path.cwd()),
        _logging_kept(),
        _process_kept(*words[:1]),
    ):
        try:
            code = app(args=words, prog_name="headrace", standalone_mode=True)
        except SystemExit as end:
            code = end.code
    out.flush()
    err.flush()
    if isinstance(code, str):
        err.write(code + "\n")
        code = 1
    return Finished(code or 0, out.text(), "" if merged else err.text())


def run_process(
    *args: str | Path, env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a `headrace` command to its end in a process of its own: for what only a process shows (signals, start, exit)."""
    environ = {**os.environ, **PLAIN, **(env or {})}
    arguments = [HEADRACE, *args]
    return subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=240, check=False, **more)


def run_script(path: Path, *args: str) -> Finished:
    """Run a Python script to its end inside this process, which has imported most of what it needs."""
    out, err = _Text(), _Text()
    with (
        patch.object(sys, "argv", [str(path), *args]),
        patch.object(sys, "path", [str(path.parent), *sys.path]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
        else:
            code = 0
    return Finished(code if isinstance(code, int) else int(code is not None), out.text(), err.text())


class _Text(io.TextIOWrapper):
    """Text that may also be written as bytes to `.buffer`, as standard output may."""

    def __init__(self, text: str = "") -> None:
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8", newline="\n", write_through=True)

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        return buffer.getvalue().decode() if isinstance(buffer, io.BytesIO) else ""


@contextlib.contextmanager
def _process_kept(verb: str = "") -> Iterator[None]:
    """Some verbs see to it that their process ends soon, whatever still runs in it: this process is to live on."""
    if verb not in ("batch", "microservice"):
        yield
        return
    with patch("headrace.programs.microservice.end_process", lambda code: None):
        yield


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """Commands set levels and handlers; the test after this one must not have them."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
