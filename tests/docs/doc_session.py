# SPDX-License-Identifier: Apache-2.0
"""Does what a document tells its reader to do, in a folder of its own, and compares what comes out with what is shown.

- ```console: lines that begin with `$ ` are run by bash, one by one; the lines after a command must appear in its
  output, in that order. A line may have `...` for anything; a line of only `...` stands for any lines.
- A command that ends in ` &` stays running until the end of the document; `$!` is its process. What it writes counts as
  output of the command it appears after, as on a terminal.
- ```python is run as a script; a ```text block right after it is its output.
- A block with a name, as ```python NAME or ```yaml NAME, is saved as NAME instead, with its folders.
- Anything else, ```sh above all, is not run.

The ports of the documents are replaced: 8000 and 8001 by those of a server that runs, others by free ones.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from doc_blocks import Block, Step, blocks_of, steps_of

from support.ports import free_port
from support.programs import run
from support.waiting import eventually

COMMAND_SECONDS = 180.0
"""To export a PyTorch model takes ten seconds, and on a machine that others use as well a minute and more."""
WAIT_SECONDS = 180.0
_NEEDS_A_SHELL = re.compile(r"[$`*?~#{}<>|&;()\n]")
_PORT = re.compile(r"(localhost:|127\.0\.0\.1:|--http-port |--grpc-port |--metrics-port |--port )(\d{4,5})\b")


class Mismatch(AssertionError):
    """What a document shows is not what happens."""


class Session:
    """One reader of one document."""

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        self._folder = folder
        self._ports = dict(ports)
        self._log = folder / ".background.log"
        self._log.touch()
        self._background: list[subprocess.Popen[bytes]] = []
        self._environment = (
            {"HEADRACE_STATE_DIR": str(folder / ".fleet")}
            | os.environ
            | {
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONUNBUFFERED": "1",
                "NO_COLOR": "1",
                "GRPC_VERBOSITY": "ERROR",
            }
        )

    def follow(self, text: str) -> int:
        """Do everything a document says; returns how many commands and scripts that were."""
        done = 0
        blocks = blocks_of(text)
        for index, block in enumerate(blocks):
            if block.language == "console":
                for step in steps_of(block):
                    self._run_step(step)
                    done += 1
            elif block.name:
                file = self._folder / block.name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(self._real(block.text))
            elif block.language == "python":
                after = blocks[index + 1 : index + 2]
                shown = after[0].lines if after and after[0].language == "text" else []
                self._run_python(block, shown)
                done += 1
        return done

    def close(self) -> None:
        """End what still runs."""
        for process in self._background:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._background:
            try:
                process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _run_step(self, step: Step) -> None:
        command = self._real(step.command)
        if command.endswith(" &"):
            before = self._log.stat().st_size
            with self._log.open("ab") as log:
                self._background.append(
                    subprocess.Popen(
                        ["bash", "-c", f"exec {command[:-2]}"],
                        cwd=self._folder,
                        env=self._environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
            self._expect(step.shown, "", before, f"line {step.line}: {step.command}")
            return
        if self._background:
            command = command.replace("$!", str(self._background[-1].pid))
        if command.startswith("headrace ") and not _NEEDS_A_SHELL.search(command.replace("\\\n", " ")):
            self._run_here(shlex.split(command.replace("\\\n", " "))[1:], step)
        else:
            self._run(["bash", "-c", command], step.shown, f"line {step.line}: {step.command}")

    def _run_here(self, words: list[str], step: Step) -> None:
        """A plain `headrace` command, inside this process: a second of its own would be spent on imports."""
        before = self._log.stat().st_size
        done = run(*words, env=self._environment | {"COLUMNS": "80"}, cwd=self._folder, merged=True)
        self._compare(done.returncode, done.stdout, step.shown, before, f"line {step.line}: {step.command}")

    def _run_python(self, block: Block, shown: list[str]) -> None:
        script = self._folder / f"script_{block.line}.py"
        script.write_text(self._real(block.text))
        self._run([sys.executable, str(script)], shown, f"line {block.line}: the Python script")

    def _run(self, arguments: list[str], shown: list[str], what: str) -> None:
        before = self._log.stat().st_size
        done = subprocess.run(
            arguments,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        self._compare(done.returncode, done.stdout.decode(errors="replace"), shown, before, what)

    def _compare(self, status: int, output: str, shown: list[str], before: int, what: str) -> None:
        if status != 0:
            raise Mismatch(f"{what}\nended with status {status}:\n{output}")
        self._expect(shown, output, before, what)

    def _expect(self, shown: list[str], output: str, before: int, what: str) -> None:
        """Compare; what runs in the background may take its time."""
        wanted = [self._real(line) for line in shown]

        def complete() -> bool:
            background = self._log.read_bytes()[before:].decode(errors="replace")
            missing = first_missing(wanted, (output + "\n" + background).splitlines())
            if missing is not None:
                raise Mismatch(f"{what}\ndid not show:\n{missing}\nbut:\n{output}\n{background}")
            return True

        if self._background:
            eventually(complete, within=WAIT_SECONDS)
        else:
            complete()

    def _real(self, text: str) -> str:
        return _PORT.sub(lambda match: match[1] + str(self._port(match[2])), text)

    def _port(self, number: str) -> int:
        if number not in self._ports:
            self._ports[number] = free_port()
        return self._ports[number]


def first_missing(shown: list[str], output: list[str]) -> str | None:
    """The first shown line that does not appear in the output after the ones before it; None if all do."""
    position = 0
    for line in shown:
        text = line.strip()
        if text in ("", "..."):
            continue
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in text.split("...")))
        while position < len(output) and pattern.fullmatch(output[position].strip()) is None:
            position += 1
        if position == len(output):
            return line
        position += 1
    return None
