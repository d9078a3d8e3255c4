# SPDX-License-Identifier: Apache-2.0
"""List the licence of every locked dependency in docs/licences.md.

python scripts/list_licences.py            write the page again (asks PyPI for packages of other machines)
python scripts/list_licences.py --check    whether the page has every locked package (asks nobody)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

from lock import FOLDER
from packaging.utils import canonicalize_name
from tool_venvs import ROOT

PAGE = ROOT / "docs" / "licences.md"
_PARTS = {
    "image": "In the image",
    "all": "With `pip install 'headrace[all]'`",
    "build": "To build a release",
    "test": "For tests and checks only",
}
"""The locks in the order of the page, and their headings. A package is listed once, in the first that has it."""
_HEAD = """# Licences of the dependencies

Written by `python scripts/list_licences.py` from the lock files, with what each package says of itself. Headrace itself is
Apache-2.0. Frameworks that you install yourself (PyTorch, TensorFlow, ...) are in the last part, in the tests' versions.
"""
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "GNU General Public License v2 (GPLv2)": "GPL-2.0-only",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "GNU Lesser General Public License v3 or later (LGPLv3+)": "LGPL-3.0-or-later",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "Other/Proprietary License": "proprietary",
}
_FIRST_LINES = (
    (re.compile(r"apache", re.I), "Apache-2.0"),
    (re.compile(r"\bMIT\b"), "MIT"),
    (re.compile(r"NVIDIA", re.I), "NVIDIA's licence"),
    (re.compile(r"BSD.?3|3.Clause", re.I), "BSD-3-Clause"),
    (re.compile(r"BSD", re.I), "BSD"),
)
_VENDORED = {("uplot", "1.6.32"): "MIT"}
"""Packages of npm whose files are in the package: `headrace/programs/console/assets`."""
_KNOWN = {
    "cuda-toolkit": "NVIDIA's licence",
    "namex": "Apache-2.0",
    "nvidia-cudnn-cu13": "NVIDIA's licence",
    "nvidia-nccl-cu13": "BSD-3-Clause",
    "nvidia-nvshmem-cu13": "NVIDIA's licence",
    "skops": "MIT",
}
"""Packages whose metadata name none, and what the licence file of their wheel or their site says."""
_ROW = re.compile(r"^\| \[([^]]+)\]\([^)]*\) \| (\S+) \| (.+) \|$", re.MULTILINE)


def main() -> int:
    """Write the page, or check it. 0: it is complete; 1: it is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    problems = problems_of(PAGE.read_text() if PAGE.exists() else "")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def page() -> str:
    """Return the page, with answers of PyPI."""
    text = _HEAD
    with ThreadPoolExecutor(8) as pool:
        for heading, packages in _parts().items():
            licences = pool.map(licence_of, (name for name, _ in packages))
            text += f"\n## {heading}\n\n| package | version | licence |\n| --- | --- | --- |\n"
            text += "".join(
                f"| [{name}](https://pypi.org/project/{name}/) | {version} | {licence} |\n"
                for (name, version), licence in zip(packages, licences, strict=True)
            )
    text += "\n## In the package itself, from npm\n\n| package | version | licence |\n| --- | --- | --- |\n"
    for (name, version), licence in _VENDORED.items():
        text += f"| [{name}](https://www.npmjs.com/package/{name}) | {version} | {licence} |\n"
    return text


def problems_of(text: str) -> list[str]:
    """Return where the page and the locks differ, and packages without a licence."""
    rows = {(name, version): licence for name, version, licence in _ROW.findall(text)}
    wanted = {package for packages in _parts().values() for package in packages} | _VENDORED.keys()
    problems = [
        f"{name} {version} is not on the page: run scripts/list_licences.py" for name, version in wanted - rows.keys()
    ]
    problems += [
        f"{name} {version} is locked no more: run scripts/list_licences.py" for name, version in rows.keys() - wanted
    ]
    problems += [
        f"{name} {version} has no known licence" for (name, version), licence in rows.items() if licence == "unknown"
    ]
    return sorted(problems)


def licence_of(name: str) -> str:
    """Return the licence of a package as an SPDX expression where possible."""
    if name in _KNOWN:
        return _KNOWN[name]
    try:
        fields = metadata.metadata(name).json
    except metadata.PackageNotFoundError:  # for another kind of machine
        with urllib.request.urlopen(f"https://pypi.org/pypi/{name}/json", timeout=60) as answer:
            return describe(json.load(answer)["info"])
    return describe({**fields, "classifiers": fields.get("classifier")})


def describe(fields: dict[str, Any]) -> str:
    """Return the licence that a package's metadata names."""
    expression = fields.get("license_expression")
    text = (fields.get("license") or "").strip()
    if expression:
        return str(expression)
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in fields.get("classifiers") or ()
        if classifier.startswith("License ::")
    ]
    known = [_CLASSIFIERS.get(classifier, classifier) for classifier in classifiers if classifier != "OSI Approved"]
    if known and known != ["BSD"]:
        return " or ".join(sorted(known))
    first = next(iter(text.splitlines()), "").strip()
    if re.fullmatch(r"[A-Za-z0-9.+()-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+()-]+)*", first):
        return first
    return next(
        (name for pattern, name in _FIRST_LINES if pattern.search(text[:300])), known[0] if known else "unknown"
    )


def _parts() -> dict[str, list[tuple[str, str]]]:
    seen: set[tuple[str, str]] = set()
    parts = {}
    for lock, heading in _PARTS.items():
        text = (FOLDER / f"{lock}.lock").read_text()
        packages = {(canonicalize_name(name), version) for name, version in _versions(text)} - seen
        parts[heading] = sorted(packages)
        seen |= packages
    return parts


def _versions(lock: str) -> list[tuple[str, str]]:
    return re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", lock, re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
