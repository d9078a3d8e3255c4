# SPDX-License-Identifier: Apache-2.0
"""`headrace completion`: the script in a real bash, and with the Tab key of a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest
from cli_programs import CONFIG, HEADRACE, PLAIN, make_models, run, serve
from support.ports import free_port

ENVIRON = PLAIN | {"PATH": f"{HEADRACE.parent}:{os.environ['PATH']}"}
TRY = """
source <(headrace completion bash)
try() { COMP_LINE="$1" COMP_POINT=${#1} COMPREPLY=(); _headrace_completion headrace; echo "${COMPREPLY[*]}"; }
"""


def completed(*lines: str) -> list[list[str]]:
    """What bash is offered at the end of each line."""
    script = TRY + "".join(f"try '{line}'\n" for line in lines)
    words = ["bash", "--norc", "-c", script]
    done = subprocess.run(words, env=ENVIRON, capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_verbs_options_and_values() -> None:
    verbs, options, policies, platforms, modes, nothing = completed(
        "headrace do",
        "headrace top --i",
        "headrace router --policy=ro",
        "headrace service start --platform k",
        "headrace serve --model-control-mode ",
        "headrace serve mod",
    )
    assert verbs == ["doctor"] and options == ["--interval"] and policies == ["round-robin"]
    assert platforms == ["kubernetes"] and modes == ["none", "poll", "explicit"] and nothing == []


def test_names_of_models(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", resnet50=CONFIG, resnet18=CONFIG, other=CONFIG)
    with serve(tmp_path / "log", models) as server:
        found, chosen = completed(
            f"headrace models show --url {server.url} re", f"headrace infer --url {server.url} other"
        )
    assert found == ["resnet18", "resnet50"] and chosen == ["other"]
    (none,) = completed(f"headrace models show --url http://127.0.0.1:{free_port()} ")
    assert none == []


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
