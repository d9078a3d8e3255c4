# SPDX-License-Identifier: Apache-2.0
"""Check packages: required ones, those of extras, and conflicting pairs.

Imports nothing large: versions are from pip's metadata, requirements from Headrace's own.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

from headrace.programs.doctor.finding import Finding, ok, problem, warning

_FAST = ("uvloop", "httptools")
_MIN_PYTHON = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_NOT_FOR_USERS = frozenset({"all", "formats", "microservice", "test", "check", "gpu"})
"""Extras of extras, those for developers, and one that is checked with the GPUs."""
_SHARED = frozenset({"numpy", "protobuf"})
"""Packages that many others need, in conflicting versions."""
_CONFLICTS = (
    ("onnxruntime", "onnxruntime-gpu"),
    ("opencv-python", "opencv-python-headless"),
    ("psycopg2", "psycopg2-binary"),
)
"""Pairs that install the same files: the one installed last overwrites the other."""


class Requirement(NamedTuple):
    """One requirement of a package's metadata."""

    name: str
    bounds: str
    extra: str
    conditional: bool
    """Whether it depends on the platform or on Python's version."""


def check_python() -> Iterator[Finding]:
    """Check the interpreter, and the two libraries that make it fast."""
    release = sys.version_info[:3]
    text = ".".join(map(str, release))
    if release < _MIN_PYTHON:
        yield problem("Python", f"{text}; Headrace needs 3.11 or newer", "python3.12 -m venv .venv")
    else:
        yield ok("Python", f"{text}, {sys.executable}")
    for name in _FAST:
        try:
            importlib.import_module(name)
        except ImportError as error:
            message = f"cannot be imported ({error}): the server cannot start without it"
            yield problem(name, message, f"pip install --force-reinstall {name}")
        else:
            yield ok(name, f"{installed(name)} is installed")


def check_packages() -> Iterator[Finding]:
    """Check Headrace's requirements, by extra."""
    try:
        lines = requires("headrace") or []
    except PackageNotFoundError:
        yield warning("packages", "Headrace is not installed, so its requirements are unknown", "pip install -e .")
        return
    wanted = [requirement for requirement in map(parse_requirement, lines) if requirement is not None]
    yield _check_required([requirement for requirement in wanted if not requirement.extra])
    extras: dict[str, list[Requirement]] = {}
    for requirement in wanted:
        if requirement.extra and requirement.extra not in _NOT_FOR_USERS and requirement.name != "headrace":
            extras.setdefault(requirement.extra, []).append(requirement)
    for extra, requirements in extras.items():
        yield _check_extra(extra, requirements)
    yield from check_pairs(
        sorted({requirement.name for requirements in extras.values() for requirement in requirements})
    )


def _check_required(requirements: list[Requirement]) -> Finding:
    texts = [_problem_of(requirement) for requirement in requirements]
    problems = [text for text in texts if text]
    if problems:
        return problem("packages", "; ".join(problems), "pip install --upgrade headrace")
    return ok("packages", f"the {len(requirements)} required packages are installed")


def _check_extra(extra: str, requirements: list[Requirement]) -> Finding:
    name, fix = f"extra {extra}", f"pip install --upgrade 'headrace[{extra}]'"
    missing = [requirement.name for requirement in requirements if not installed(requirement.name)]
    if missing:
        return ok(name, f"not installed: {', '.join(missing)}", fix.replace("--upgrade ", ""))
    old = [text for text in map(_problem_of, requirements) if text]
    if old:
        return warning(name, "; ".join(old), fix)
    return ok(name, ", ".join(f"{requirement.name} {installed(requirement.name)}" for requirement in requirements))


def _problem_of(requirement: Requirement) -> str:
    current = installed(requirement.name)
    if not current:
        return f"{requirement.name} is missing"
    return (
        ""
        if satisfies(current, requirement.bounds)
        else f"{requirement.name} {current} is installed, but {requirement.bounds.strip()} is needed"
    )


def check_pairs(names: list[str]) -> Iterator[Finding]:
    """Check for conflicting packages."""
    wrong = 0
    for first, second in _CONFLICTS:
        if installed(first) and installed(second):
            wrong += 1
            message = f"{first} and {second} are both installed, and overwrite each other's files"
            fix = f"pip uninstall -y {first} {second} && pip install {second}"
            yield problem(f"{first} and {second}", message, fix)
    for name in names:
        for requirement in _requirements(name) if installed(name) else ():
            if requirement.name not in _SHARED or requirement.conditional or requirement.extra:
                continue
            current, needed = installed(requirement.name), f"{requirement.name}{requirement.bounds.strip()}"
            if current and not satisfies(current, requirement.bounds):
                wrong += 1
                message = f"{name} {installed(name)} needs {needed}, but {current} is installed"
                yield warning(f"{name} and {requirement.name}", message, f"pip install '{needed}' {name}")
    if not wrong:
        yield ok("packages together", "no conflicting packages")


def _requirements(name: str) -> list[Requirement]:
    return [requirement for requirement in map(parse_requirement, requires(name) or ()) if requirement is not None]


def parse_requirement(line: str) -> Requirement | None:
    """Parse a requirement; None for a form that is not supported, such as a URL."""
    match = _REQUIREMENT.fullmatch(line.strip())
    if match is None or "@" in match[3]:
        return None
    condition = match[4] or ""
    extra = _EXTRA.search(condition)
    conditional = bool(_EXTRA.sub("", condition).strip(" ()"))
    return Requirement(
        match[1].lower().replace("_", "-"), match[3].strip(" ()"), extra[1] if extra else "", conditional
    )


def satisfies(current: str, bounds: str) -> bool:
    """Return whether a version is within bounds such as `>=1.20,<3`; True for bounds that are not supported."""
    have = _numbers(current)
    for bound in filter(None, (part.strip() for part in bounds.split(","))):
        sign = re.match(r"[<>=!~]+", bound)
        if sign is None or "*" in bound:
            continue
        limit = _numbers(bound[sign.end() :])
        longest = max(len(have), len(limit))
        own, bound_numbers = (numbers + (0,) * (longest - len(numbers)) for numbers in (have, limit))
        comparisons = {
            ">=": own >= bound_numbers,
            ">": own > bound_numbers,
            "<": own < bound_numbers,
            "<=": own <= bound_numbers,
            "==": own == bound_numbers,
            "!=": own != bound_numbers,
            "~=": own >= bound_numbers and own[: len(limit) - 1] == limit[:-1],
        }
        if not comparisons.get(sign[0], True):
            return False
    return True


def installed(name: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """Return the release: 2.13.0 of 2.13.0+cpu."""
    match = re.match(r"\s*v?([0-9]+(?:\.[0-9]+)*)", text)
    return tuple(map(int, match[1].split("."))) if match else ()
