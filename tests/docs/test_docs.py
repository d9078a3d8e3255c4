# SPDX-License-Identifier: Apache-2.0
"""The documents are true: what they tell the reader to type works, and what they point to is there."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from doc_blocks import ROOT, anchors_of, blocks_of, code_spans_of, documents, links_of, name_of, steps_of
from limits_table import GUIDE, TABLES, limits_table, table_in

from headrace.api.metrics.collector import _own_names
from headrace.backends.table import BACKENDS
from headrace.cli.commands import SECTIONS
from headrace.cli.root import load_command
from headrace.cli.serve_arguments import IGNORED
from support.programs import run

DOCUMENTS = documents()
WITH_EXAMPLES = [*DOCUMENTS, *sorted(ROOT.glob("examples/*/README.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for link in links_of(document.read_text()):
        if "://" in link:
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors_of(target.read_text()), f"{link}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_named_in_the_text_exist(document: Path) -> None:
    roots = (ROOT, ROOT / "headrace", ROOT / "headrace/net", document.parent)
    printed = {block.name for block in blocks_of(document.read_text())}
    for span in code_spans_of(document.read_text()):
        if re.fullmatch(r"[\w./-]+\.(py|md|toml|proto|binpb|sh)", span) and "/" in span and span not in printed:
            assert any((root / span).exists() for root in roots), f"`{span}` does not exist"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_are_applied_are_printed(document: Path) -> None:
    """A guide is complete: what it gives to `-f` it prints as a file, or shows or makes by a command."""
    blocks = blocks_of(document.read_text())
    typed = "\n".join(block.text for block in blocks if block.language in ("console", "sh"))
    there = {block.name for block in blocks} | set(re.findall(r"(?:> |^\$ cat )([\w./-]+\.yaml)", typed, re.MULTILINE))
    applied = set(re.findall(r"headrace (?:apply|explain|delete) .*?-f ([\w./-]+\.yaml)", typed))
    applied |= set(re.findall(r"kubectl apply -f ([\w./-]+\.yaml)", typed))
    assert applied <= there


@cache
def command_options() -> dict[tuple[str, ...], set[str]]:
    """The options of each command, by its words: `("models", "load")`."""
    document: dict[tuple[str, ...], set[str]] = {}

    def add(path: tuple[str, ...], command: Any) -> None:
        document[path] = {
            option for parameter in command.params for option in parameter.opts + parameter.secondary_opts
        }
        document[path] |= {"--help"}
        for name, below in getattr(command, "commands", {}).items():
            add((*path, name), below)

    for verbs in SECTIONS.values():
        for verb in verbs:
            add((verb.name,), load_command(verb))
    return document


def shown_options(verb: str) -> set[str]:
    """The options that the help of a verb names, which are also those of before."""
    shown = run(verb, "--help", env={"COLUMNS": "200"})
    assert shown.returncode == 0, shown.stderr
    return set(re.findall(r"--[a-z][a-z-]+", shown.stdout))


@pytest.fixture(scope="module")
def serve_options() -> set[str]:
    options = shown_options("serve")
    assert "--http-port" in options
    return options


@pytest.fixture(scope="module")
def all_options(serve_options: set[str]) -> set[str]:
    return serve_options.union(*command_options().values())


def alone_in(text: str) -> set[str]:
    """Options that stand alone `--like-this` in the prose."""
    text = text.replace(table_in(text), "")  # the table of limits names an option of another server
    return options_in(span for span in code_spans_of(text) if span.startswith("--"))


def options_in(commands: Iterable[str]) -> set[str]:
    return {option for command in commands for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", command)}


def options_to_serve_in(text: str) -> set[str]:
    """Options in commands with `headrace serve`."""
    commands = [span for span in code_spans_of(text) if span.startswith("headrace serve")]
    for block in blocks_of(text):
        if block.language in ("console", "sh"):
            lines = block.text.replace("\\\n", " ").splitlines()
            # `|| true` shows how something is refused.
            commands += [line for line in lines if "headrace serve" in line and not line.endswith("|| true")]
    return options_in(commands)


@pytest.mark.parametrize(
    "document", [document for document in DOCUMENTS if document.name != "commands.md"], ids=name_of
)
def test_options_exist(document: Path, serve_options: set[str], all_options: set[str]) -> None:
    text = document.read_text()
    taken = {f"--{option.flag}" for option in IGNORED}
    assert options_to_serve_in(text) <= serve_options | taken
    assert alone_in(text) <= all_options | taken


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each `headrace` command that the blocks of a document tell to type, up to a pipe or the like."""
    for block in blocks_of(text):
        if block.language in ("console", "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if not line.endswith("|| true"):  # which shows how something is refused
                    for command in re.findall(r"(?:^|[$(|;&] ?)headrace (.*)", line):
                        yield words_of(command)


def words_of(command: str) -> list[str]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("();<>|&"):
            break
        words.append(word)
    return words


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=name_of)
def test_commands_exist(document: Path) -> None:
    """Each verb that a block tells to type is there, and has the options that stand behind it."""
    for words in commands_in(document.read_text()):
        if words[0].startswith("-"):  # of `headrace` itself
            continue
        path = tuple(words[:1])
        assert path in command_options(), words
        if (*path, *words[1:2]) in command_options():
            path = tuple(words[:2])
        given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        taken = {f"--{option.flag}" for option in IGNORED} if path == ("serve",) else set()
        assert given <= command_options()[path] | taken, words


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=name_of)
def test_code_can_be_read(document: Path) -> None:
    """Python is Python, and what is typed is a command line."""
    commands = []
    for block in blocks_of(document.read_text()):
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "console":
            commands += [step.command for step in steps_of(block)]
    if commands:
        script = "\n".join(commands) + "\n"
        read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert read.returncode == 0, read.stderr


def test_every_option_is_explained_somewhere(serve_options: set[str]) -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    named = {option for text in texts for option in alone_in(text) | options_to_serve_in(text)}
    assert serve_options - {"--help"} <= named


@pytest.mark.parametrize("kind", TABLES)
def test_the_tables_of_limits_are_those_of_the_code(kind: str) -> None:
    assert table_in(GUIDE.read_text(), kind) == limits_table(kind), "run `python tests/docs/limits_table.py`"


def test_the_guide_to_metrics_names_what_a_scrape_has() -> None:
    """All of them, and none that is not there."""
    named = {
        span.partition("_bucket")[0]
        for span in code_spans_of((ROOT / "docs/guides/metrics.md").read_text())
        if re.fullmatch(r"(nv|process|python)_\w+", span)
    }
    received = {name for _, name in _own_names()}
    assert named == received


def test_the_table_of_formats_names_every_backend_and_real_tests() -> None:
    text = (ROOT / "docs/formats.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| .*\|$", line) and "test_" in line]
    named = {backend for row in rows for backend in re.findall(r"`(\w+)`", "|".join(row.split("|")[1:3]))}
    assert named >= set(BACKENDS)
    for row in rows:
        tests = re.findall(r"`(test_\w+|cases/\w+)`", row)
        assert tests, row
        for test in tests:
            assert list((ROOT / "tests").glob(f"**/{test}.py")), f"{test}: {row}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_changelog_begins_with_what_is_not_released() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"


# The tests above would be worth nothing if they could not fail.


def test_commands_are_found_with_their_arguments() -> None:
    text = (
        "```console\n$ KEY=$(headrace keys create 'a b' --json) \\\n  x\n$ env A=1 headrace serve m | cat\n```\n"
        "```sh\nheadrace up\n```\n"
    )
    assert list(commands_in(text)) == [["keys", "create", "a b", "--json"], ["up"]]


def test_options_are_found_in_commands_and_prose() -> None:
    text = (
        "see `--one` and `curl --two`\n```console\n$ headrace serve --three \\\n  --four 4\n$ curl --five\n"
        "$ headrace serve --six || true\n```\n"
    )
    assert alone_in(text) | options_to_serve_in(text) == {"--one", "--three", "--four"}


def test_links_and_headings_are_found() -> None:
    assert list(links_of("[a](b.md#c) `[d](e)`\n```sh\n[f](g)\n```\n")) == ["b.md#c"]
    assert anchors_of("# Two words, `and` code\n") == {"two-words-and-code"}
