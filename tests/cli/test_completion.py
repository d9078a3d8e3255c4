# SPDX-License-Identifier: Apache-2.0
"""`headrace completion`: the script in a real bash, and with the Tab key of a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from support.ports import free_port
from support.programs import HEADRACE, PLAIN, run
from support.servers import serve_in_thread
from support.tiny_models import CONFIG, make_models

ENVIRON = {**os.environ, **PLAIN, "PATH": f"{HEADRACE.parent}:{os.environ['PATH']}"}
TRY = """
source <(headrace completion bash)
try() { COMP_LINE="$1" COMP_POINT=${#1} COMPREPLY=(); _headrace_completion headrace; echo "${COMPREPLY[*]}"; }
"""
LINES = {
    "headrace do": ["doctor"],
    "headrace top --i": ["--interval"],
    "headrace router --policy=ro": ["round-robin"],
    "headrace service start --platform k": ["kubernetes"],
    "headrace serve --model-control-mode ": ["none", "poll", "explicit", "on-demand"],
    "headrace serve mod": [],
}


def completed(line: str) -> list[str]:
    """What the program offers at the end of a line, as the script asks it."""
    words = line.split()
    index = len(words) - (not line.endswith(" "))
    body = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(index)}
    return run(env=body).stdout.split()


@pytest.mark.parametrize("line", LINES)
def test_verbs_options_and_values(line: str) -> None:
    assert completed(line) == LINES[line]


@pytest.mark.slow
def test_the_script_in_a_real_bash() -> None:
    script = TRY + "".join(f"try '{line}'\n" for line in LINES)
    arguments = ["bash", "--norc", "-c", script]
    done = subprocess.run(arguments, env=ENVIRON, capture_output=True, text=True, timeout=240, check=True)
    assert not done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == list(LINES.values())


def test_names_of_models(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", resnet50=CONFIG, resnet18=CONFIG, other=CONFIG)
    with serve_in_thread(models) as server:
        assert completed(f"headrace models show --url {server.url} re") == ["resnet18", "resnet50"]
        assert completed(f"headrace infer --url {server.url} other") == ["other"]
    assert completed(f"headrace models show --url http://127.0.0.1:{free_port()} ") == []


def test_the_tab_key(tmp_path: Path) -> None:
    """A word with = in it is cut by bash, and must come out whole."""
    terminal, inner = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        env=ENVIRON | {"PS1": "> ", "HISTFILE": ""},
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    os.close(inner)
    try:
        os.write(terminal, b"source <(headrace completion bash); echo rea''dy\n")
        _read_until(terminal, "ready")
        os.write(terminal, b"headrace router --policy=rou\t")
        _read_until(terminal, "--policy=round-robin")
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def _read_until(terminal: int, text: str) -> None:
    """The test's own time-out is the limit."""
    shown = ""
    while text not in shown:
        shown += os.read(terminal, 65536).decode(errors="replace")


@pytest.mark.parametrize(("shell", "words"), [("zsh", "#compdef headrace"), ("fish", "complete --command headrace")])
def test_other_shells(shell: str, words: str) -> None:
    done = run("completion", shell)
    assert done.returncode == 0 and words in done.stdout and "_HEADRACE_COMPLETE" in done.stdout


def test_a_shell_that_is_not_known() -> None:
    done = run("completion", "tcsh")
    assert done.returncode == 2 and "bash" in done.stderr
