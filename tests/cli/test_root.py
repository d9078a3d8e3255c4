# SPDX-License-Identifier: Apache-2.0
"""The root command: its help, its imports, and what every command has in common."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from headrace.cli.checks import print_error
from headrace.cli.commands import SECTIONS, CommandSpec
from headrace.cli.main import app
from headrace.cli.root import load_command
from headrace.cli.serve_arguments import parse_arguments
from support.programs import PLAIN, run

VERBS = [verb for verbs in SECTIONS.values() for verb in verbs]
OWN = {"headrace.cli.main", "headrace.cli.root", "headrace.cli.commands", "headrace.cli.checks"}
SLOW = {"rich", "markdown_it", "pygments", "asyncio", "ssl", "numpy", "orjson", "yaml", "uvloop", "http"}
MOST_MODULES = 150
"""Beside those of Python's own start: Typer's, and some of the standard library. 90 when this was written."""
PROGRAM = """
import json, sys
before = set(sys.modules)
from headrace.cli.main import main
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(set(sys.modules) - before)]), file=sys.stderr)
"""
PROGRAMS = {
    ("serve",), ("microservice",), ("gateway",), ("router",), ("up",), ("model-agent",), ("operator", "run"),
    ("operator", "activator"),
}  # fmt: skip
"""They run until they are ended, and log."""
FOR_OTHERS = {("completion",), ("operator", "manifests"), ("gateway", "manifests")}
"""What they print is a script for a shell, or documents for kubectl."""


def imported(*words: str) -> tuple[str, set[str]]:
    """What is printed, and the modules that are imported for it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**os.environ, **PLAIN},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    code, modules = json.loads(done.stderr)
    assert not code, done.stderr
    return done.stdout, set(modules)


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("headrace.cli.")}


def top_packages(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("headrace.")}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_help_imports_no_verb_and_nothing_slow(option: str) -> None:
    said, modules = imported(option)
    assert "headrace" in said
    assert ours(modules) == OWN
    assert top_packages(modules) == {"cli", "core", "version"}
    assert not SLOW & {name.split(".")[0] for name in modules}
    assert len(modules) <= MOST_MODULES


@pytest.mark.parametrize("name", ["infer", "models", "apply", "rollout"])
def test_the_help_of_a_verb_imports_only_that_verb(name: str) -> None:
    target = next(verb.target for verb in VERBS if verb.name == name).partition(":")[0]
    modules = imported(name, "--help")[1]
    assert ours(modules) & {verb.target.partition(":")[0] for verb in VERBS} == {target}
    assert top_packages(modules) == {"cli", "core", "version"}
    assert not {"numpy", "orjson", "yaml", "httpx", "lightkube"} & {module.split(".")[0] for module in modules}


def test_the_package_is_the_command() -> None:
    done = subprocess.run((sys.executable, "-m", "headrace", "nothing"), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "No such command 'nothing'" in done.stderr


def test_the_help_names_every_verb_under_its_heading() -> None:
    stdout = run("--help").stdout
    parts = stdout.split("\n\n")
    for heading, verbs in SECTIONS.items():
        (part,) = (part for part in parts if part.startswith(f"{heading}:\n"))
        for verb in verbs:
            assert f"\n  {verb.name} " in part
            assert verb.help in " ".join(part.split())
    assert "--version" in stdout and "--install-completion" in stdout


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_table_has_the_summary_of_each_verb(verb: CommandSpec) -> None:
    command = load_command(verb)
    assert command.name == verb.name
    assert " ".join(command.help.split("\n\n")[0].split()) == verb.help


def test_without_a_command_the_help_is_shown() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == run("--help").stdout


def test_a_verb_that_is_not_there() -> None:
    done = run("serv")
    assert done.returncode == 2 and "Did you mean 'serve'" in done.stderr


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A verb, and those below it."""
    below = getattr(command, "commands", {})
    if not below or command.invoke_without_command:
        yield path, command
    for name, item in below.items():
        yield from commands(item, (*path, name))


def test_every_verb_with_a_result_has_json() -> None:
    every = {path: command for verb in VERBS for path, command in commands(load_command(verb), (verb.name,))}
    without = {
        path for path, command in every.items() if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == PROGRAMS | FOR_OTHERS


def test_an_error_is_a_line_also_with_json() -> None:
    done = run("models", "list", "--url", "http://127.0.0.1:1", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no server answers at http://127.0.0.1:1 ")


def test_names_in_an_error_can_be_copied_from_a_separate_line(tmp_path: Path) -> None:
    done = run("logs", "digits", "--state-dir", tmp_path)
    said, line = done.stderr.splitlines()
    assert said.startswith("error: no fleet runs on this machine: start one with `headrace up`")
    assert (done.returncode, line) == (1, "  try: headrace up")
    assert len(run("models", "list", "--url", "http://127.0.0.1:x").stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said", "path"),
    [
        (("serv",), "No such command 'serv'. Did you mean", "headrace"),
        (("models", "chek"), "No such command 'chek'. Did you mean 'check'?", "headrace models"),
        (("models", "check"), "Missing argument 'PATH'.", "headrace models check"),
        (("models", "check", "m", "--gpu", "1"), "No such option: --gpu", "headrace models check"),
        (("models", "check", "m", "--gpus", "one"), "Invalid value for '--gpus'", "headrace models check"),
    ],
)
def test_an_unknown_command_is_an_error_like_any_other(words: tuple[str, ...], said: str, path: str) -> None:
    done = run(*words)
    error, hint = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith(f"error: {said}") and hint == f"  try: {path} --help"


@pytest.mark.parametrize(("no_colour", "begin"), [("", "\x1b[31merror: "), ("1", "error: ")])
def test_errors_are_red_on_a_terminal_unless_no_color_is_set(no_colour: str, begin: str) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stderr = Terminal()
    with (
        contextlib.redirect_stderr(stderr),
        patch.dict(os.environ, {"NO_COLOR": no_colour, "TERM": "xterm"}),
        patch.object(sys, "stderr", stderr),
    ):
        print_error("no")
    assert stderr.getvalue().startswith(begin)


def test_every_verb_with_a_port_takes_both_names() -> None:
    every = {path: command for verb in VERBS for path, command in commands(load_command(verb), (verb.name,))}
    both = {"--port", "--http-port"}
    names = {
        path: both & {name for parameter in command.params for name in parameter.opts}
        for path, command in every.items()
    }
    one = {path for path, found in names.items() if found and found != both}
    # `serve` reads its arguments itself.
    assert one <= {("serve",), "serve"} and set(parse_arguments(["--port", "9"]).texts) == {"http-port"}
    assert sum(name == both for name in names.values()) >= 5


def test_every_verb_shows_examples() -> None:
    every = {path: command for verb in VERBS for path, command in commands(load_command(verb), (verb.name,))}
    for path, command in every.items():
        (_, examples) = re.split(r"\bExamples?:\n", f"{command.help}\n{command.epilog}")
        assert f"headrace {' '.join(path)}" in examples, path


def test_logs_of_pods_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fleet:
        namespace = "default"

        async def logs(self, *told: object, **more: object) -> list[tuple[str, str]]:
            return [("digits-0", "one\ntwo"), ("digits-1", "")]

    monkeypatch.setattr("headrace.fleet.local.api_client.open_local", lambda folder: Fleet())
    document = json.loads(CliRunner().invoke(app, ["logs", "digits", "--json"]).stdout)
    assert document == [{"pod": "digits-0", "log": "one\ntwo"}, {"pod": "digits-1", "log": ""}]
    assert "==> digits-0 <==\none\ntwo" in CliRunner().invoke(app, ["logs", "digits"]).stdout
