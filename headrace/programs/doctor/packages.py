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
_LEAST_PYTHON = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_NOT_FOR_USERS = frozenset({"all", "formats", "microservice", "test", "check", "gpu"})
"""Extras of extras, those for developers, and one that is checked with the GPUs."""
_SHARED = frozenset({"numpy", "protobuf"})
"""Packages that many others need, in conflicting versions."""
_BOTH = (
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
    found = sys.version_info[:3]
    text = ".".join(map(str, found))
    if found < _LEAST_PYTHON:
        yield problem("Python", f"{text}; Headrace needs 3.11 or newer", "python3.12 -m venv .venv")
    else:
        yield ok("Python", f"{text}, {sys.executable}")
    for name in _FAST:
        try:
            importlib.import_module(name)
        except ImportError as error:
            told = f"cannot be imported ({error}): the server does not start without"
            yield problem(name, told, f"pip install --force-reinstall {name}")
        else:
            yield ok(name, f"{installed(name)} is there")


def check_packages() -> Iterator[Finding]:
    """Check Headrace's requirements, by extra."""
    try:
        lines = requires("headrace") or []
    except PackageNotFoundError:
        yield warning("packages", "Headrace is not installed, only run: what it needs is not known", "pip install -e .")
        return
    wanted = [each for each in map(read_requirement, lines) if each is not None]
    yield _needed([each for each in wanted if not each.extra])
    extras: dict[str, list[Requirement]] = {}
    for each in wanted:
        if each.extra and each.extra not in _NOT_FOR_USERS and each.name != "headrace":
            extras.setdefault(each.extra, []).append(each)
    for extra, of_it in extras.items():
        yield _extra(extra, of_it)
    yield from check_pairs(sorted({each.name for of_it in extras.values() for each in of_it}))


def _needed(wanted: list[Requirement]) -> Finding:
    wrong = [_trouble(each) for each in wanted]
    told = [each for each in wrong if each]
    if told:
        return problem("packages", "; ".join(told), "pip install --upgrade headrace")
    return ok("packages", f"the {len(wanted)} that are always needed are there")


def _extra(extra: str, wanted: list[Requirement]) -> Finding:
    name, fix = f"extra {extra}", f"pip install --upgrade 'headrace[{extra}]'"
    missing = [each.name for each in wanted if not installed(each.name)]
    if missing:
        return ok(name, f"not installed: {', '.join(missing)}", fix.replace("--upgrade ", ""))
    old = [told for told in map(_trouble, wanted) if told]
    if old:
        return warning(name, "; ".join(old), fix)
    return ok(name, ", ".join(f"{each.name} {installed(each.name)}" for each in wanted))


def _trouble(wanted: Requirement) -> str:
    found = installed(wanted.name)
    if not found:
        return f"{wanted.name} is missing"
    return (
        "" if within(found, wanted.bounds) else f"{wanted.name} {found} is here, and {wanted.bounds.strip()} is wanted"
    )


def check_pairs(names: list[str]) -> Iterator[Finding]:
    """Check for conflicting packages."""
    wrong = 0
    for one, other in _BOTH:
        if installed(one) and installed(other):
            wrong += 1
            told = f"{one} and {other} are both installed, and write to the same folder"
            fix = f"pip uninstall -y {one} {other} && pip install {other}"
            yield problem(f"{one} and {other}", told, fix)
    for name in names:
        for each in _requirements(name) if installed(name) else ():
            found = installed(each.name) if each.name in _SHARED and not each.conditional and not each.extra else ""
            if found and not within(found, each.bounds):
                wrong += 1
                told = f"{name} {installed(name)} wants {each.name}{each.bounds.strip()}, and {found} is installed"
                yield warning(f"{name} and {each.name}", told, f"pip install '{each.name}{each.bounds.strip()}' {name}")
    if not wrong:
        yield ok("packages together", "no pair is known not to work")


def _requirements(name: str) -> list[Requirement]:
    return [each for each in map(read_requirement, requires(name) or ()) if each is not None]


def read_requirement(line: str) -> Requirement | None:
    """Parse a requirement; None for a form that is not supported, such as a URL."""
    found = _REQUIREMENT.fullmatch(line.strip())
    if found is None or "@" in found[3]:
        return None
    condition = found[4] or ""
    extra = _EXTRA.search(condition)
    conditional = bool(_EXTRA.sub("", condition).strip(" ()"))
    return Requirement(
        found[1].lower().replace("_", "-"), found[3].strip(" ()"), extra[1] if extra else "", conditional
    )


def within(found: str, bounds: str) -> bool:
    """Return whether a version is within bounds such as `>=1.20,<3`; True for bounds that are not supported."""
    have = _numbers(found)
    for bound in filter(None, (part.strip() for part in bounds.split(","))):
        sign = re.match(r"[<>=!~]+", bound)
        if sign is None or "*" in bound:
            continue
        limit = _numbers(bound[sign.end() :])
        longest = max(len(have), len(limit))
        mine, theirs = (each + (0,) * (longest - len(each)) for each in (have, limit))
        fits = {
            ">=": mine >= theirs,
            ">": mine > theirs,
            "<": mine < theirs,
            "<=": mine <= theirs,
            "==": mine == theirs,
            "!=": mine != theirs,
            "~=": mine >= theirs and mine[: len(limit) - 1] == limit[:-1],
        }
        if not fits.get(sign[0], True):
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
    found = re.match(r"\s*v?([0-9]+(?:\.[0-9]+)*)", text)
    return tuple(map(int, found[1].split("."))) if found else ()
