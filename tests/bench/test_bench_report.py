# SPDX-License-Identifier: Apache-2.0
"""The summary of the last full run is put into docs/performance.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import __main__ as program
from bench.errors import BenchError
from bench.report import END_MARKER, START_MARKER, put_into_page, summary_in
from bench.runs import Plan

RUN = "# Headrace beside its peers\n\nThe tables.\n\n## All figures\n\nThe details.\n"
DOCUMENT = {"date": "2026-11-18", "machine": {"architecture": "a", "cpu_model": "b", "cpu_count": 2}}


@pytest.fixture
def latest(tmp_path: Path) -> Path:
    file = tmp_path / "latest.md"
    file.write_text(RUN)
    return file


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "docs/performance.md"
    file.parent.mkdir()
    file.write_text(f"before\n{START_MARKER}\nold\n{END_MARKER}\nafter\n")
    return file


def test_the_text_between_the_markers_is_replaced(page: Path, latest: Path) -> None:
    put_into_page(page, latest)
    assert page.read_text() == f"before\n{START_MARKER}\nThe tables.\n{END_MARKER}\nafter\n"


def test_a_page_without_markers_is_an_error(page: Path, latest: Path) -> None:
    page.write_text(f"before\n{START_MARKER}\nold\n")
    with pytest.raises(BenchError, match="has no"):
        put_into_page(page, latest)


def test_nothing_to_publish_is_an_error(page: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="does not exist yet"):
        put_into_page(page, tmp_path / "none.md")


def test_publish_writes_the_last_full_run(page: Path, latest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PAGE", page)
    monkeypatch.setattr(program, "LATEST", latest)
    monkeypatch.setattr(sys, "argv", ["bench", "--publish"])
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    assert program.main() == 0
    assert "The tables." in page.read_text()


@pytest.mark.parametrize("is_full", [True, False])
def test_only_a_full_run_is_published(
    is_full: bool, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"REPOSITORY": tmp_path, "RESULTS": tmp_path, "LATEST": tmp_path / "l.md", "PAGE": page}.items():
        monkeypatch.setattr(program, name, value)
    plan = Plan(servers=(), workloads=(), rounds=1, seconds=1, keep_going=False, is_full=is_full)
    program._write(plan, DOCUMENT, RUN, Console(quiet=True))
    assert ("The tables." in page.read_text()) is is_full


def test_the_page_shows_the_last_full_run() -> None:
    shown = program.PAGE.read_text().partition(START_MARKER)[2].partition(END_MARKER)[0]
    assert shown.strip() == summary_in(program.LATEST.read_text()), "run `python -m bench --publish`"
