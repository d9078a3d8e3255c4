# SPDX-License-Identifier: Apache-2.0
"""Lock the dependencies: `requirements/NAME.lock` has every package with its version and hashes.

    python scripts/lock.py                 write them again, with the newest versions that fit (asks PyPI)
    python scripts/lock.py --keep          add what is missing and leave the other versions as they are (asks PyPI)
    python scripts/lock.py --check         whether they still fit pyproject.toml (asks nobody)
    python scripts/lock.py --constraints FILE
                                           the versions of test.lock as a constraints file for pip, without hashes, so that
                                           a local build of a package (PyTorch for CPUs) satisfies them

One file is for x86-64 and aarch64: where they differ, a line has a marker. `pip install --require-hashes -r FILE` installs
exactly that and refuses a file of another content.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tool_venvs import ROOT, tool

BUILD_SYSTEM = "build-system"
LOCKS = {
    "image": ("onnx", "cloud", "kubernetes", "redis"), "all": ("all",), "test": ("all", "test", "check"),
    "build": (BUILD_SYSTEM,),
}  # fmt: skip
"""Each file and the extras of pyproject.toml that are in it; or what the package is built with, and nothing else."""
FOLDER = ROOT / "requirements"
UV = "uv==0.13.7"
_OLDEST_PYTHON = "3.11"
_MACHINES = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)(?: ; (.*?))?(?: \\)?$", re.MULTILINE)


def main() -> int:
    """Write, or check. 0: they fit; 1: they do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--keep", action="store_true", help="upgrade nothing that is locked already")
    parser.add_argument("--constraints", type=Path, metavar="FILE", help="write the versions of test.lock there")
    arguments = parser.parse_args()
    if arguments.constraints:
        arguments.constraints.write_text(constraints((FOLDER / "test.lock").read_text()))
        return 0
    if not arguments.check:
        for name, extras in LOCKS.items():
            _write(name, extras, keep=arguments.keep)
    problems = [problem for name in LOCKS for problem in problems_of(name)]
    for each in problems:
        print(each, file=sys.stderr)
    return 1 if problems else 0


def problems_of(name: str) -> list[str]:
    """Where a lock and pyproject.toml do not go together."""
    file = FOLDER / f"{name}.lock"
    if not file.exists():
        return [f"{file.name} is missing: make lock"]
    text = file.read_text()
    locked = pinned(text)
    problems = [
        f"{file.name}: {wanted} is locked as {found}: make lock"
        for wanted in wanted_by(LOCKS[name])
        if not any(wanted.specifier.contains(version, prereleases=True) for version in locked.get(_name(wanted), []))
        for found in [" ".join(map(str, locked.get(_name(wanted), []))) or "nothing"]
    ]
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)
    problems += [
        f"{file.name}: {entry.split()[0]} has no hash" for entry in entries if "==" in entry and "sha256:" not in entry
    ]
    return problems


def pinned(text: str) -> dict[str, list[Version]]:
    """The versions of each package; two where machines differ."""
    versions: dict[str, list[Version]] = {}
    for name, version, _ in _PINNED.findall(text):
        versions.setdefault(canonicalize_name(name), []).append(Version(version))
    return versions


def constraints(text: str) -> str:
    """The lines of a lock without their hashes."""
    lines = [
        f"{name}=={version}{f' ; {marker}' if marker else ''}\n" for name, version, marker in _PINNED.findall(text)
    ]
    return "".join(lines)


def wanted_by(extras: tuple[str, ...]) -> list[Requirement]:
    """What pyproject.toml asks for with these extras, and with the extras that those name."""
    project_file: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if extras == (BUILD_SYSTEM,):
        return [Requirement(requirement) for requirement in project_file[BUILD_SYSTEM]["requires"]]
    project = project_file["project"]
    wanted = [Requirement(dependency) for dependency in project["dependencies"]]
    ahead, seen = list(extras), set[str]()
    while ahead:
        extra = ahead.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == project["name"]:
                ahead += requirement.extras
            else:
                wanted.append(requirement)
    return wanted


def _write(name: str, extras: tuple[str, ...], *, keep: bool) -> None:
    uv, file = tool(UV, "uv"), FOLDER / f"{name}.lock"
    new = file.with_suffix(".new")
    FOLDER.mkdir(exist_ok=True)
    said = ["pyproject.toml", *(word for extra in extras for word in ("--extra", extra))]
    constraints = b""
    if extras == (BUILD_SYSTEM,):
        said, constraints = ["-"], "\n".join(map(str, wanted_by(extras))).encode()
    how = [
        "--universal",
        "--generate-hashes",
        "--no-header",
        "--python-version",
        _OLDEST_PYTHON,
        "--quiet",
        *(() if keep else ("--upgrade",)),
    ]
    if keep and file.exists():
        new.write_text(file.read_text())  # uv prefers the versions that it finds in its output
    arguments = [uv, "pip", "compile", *said, *how, "--output-file", new]
    subprocess.run(arguments, cwd=ROOT, input=constraints, check=True)
    for machine in _MACHINES if name in ("image", "build") else ():
        # The image is made without a compiler: there must be a wheel of everything, for both kinds of machines.
        where = [
            "--python-platform",
            machine,
            "--python-version",
            _OLDEST_PYTHON,
            "--target",
            str(ROOT / "build" / "none"),
        ]
        how = ["--dry-run", "--quiet", "--require-hashes", "--only-binary", ":all:"]
        subprocess.run([uv, "pip", "install", *how, *where, "--requirements", new], cwd=ROOT, check=True)
    # The Dockerfile reads this line.
    subject = "what headrace is built with" if extras == (BUILD_SYSTEM,) else f"headrace[{','.join(extras)}]"
    head = f"# Written by scripts/lock.py: {subject}, Python {_OLDEST_PYTHON} and newer.\n"
    new.write_text(head + new.read_text())
    new.replace(file)
    print(f"{file.relative_to(ROOT)}: {len(pinned(file.read_text()))} packages")


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


if __name__ == "__main__":
    sys.exit(main())
