# SPDX-License-Identifier: Apache-2.0
"""Finds the cases, and writes them as a repository."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from case import Case

from support.model_cache import copy_of

_FOLDER = Path(__file__).parent / "cases"
MODULES = sorted(path.stem for path in _FOLDER.glob("[!_]*.py"))
"""The modules of `cases/`. They are imported by the tests that need them: all frameworks together take half a minute."""


def cases_of(module: str) -> list[Case]:
    """The cases of a module. A framework that is missing here is an error: the tests' environment has all of them."""
    # Frameworks warn of each other, of Python and of themselves when they are imported; that is not ours to mend.
    with warnings.catch_warnings(action="ignore"):
        cases: list[Case] = import_module(f"cases.{module}").CASES
    assert cases, f"cases/{module}.py has no case"
    return cases


def write_cases(repository: Path, module: str) -> None:
    """Write a repository with a model for each case of a module; exporting and compiling them is done once per machine."""
    copy_of(
        repository, write_repository, module, sources=(_FOLDER / f"{module}.py", *_FOLDER.parent.glob(f"{module}_*.py"))
    )


def write_repository(repository: Path, module: str) -> None:
    """Make the models of a module: `write_cases`, without the cache."""
    for case in cases_of(module):
        folder = repository / case.name
        folder.mkdir()
        case.write(folder)


def for_each(cases: Sequence[Case], work: Callable[[Case], None]) -> None:
    """Do something with each case, also after one has failed, and tell all failures together."""
    failures: list[Exception] = []
    for case in cases:
        try:
            work(case)
        except Exception as error:
            error.add_note(f"in case {case.name}")
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases", failures)
