# SPDX-License-Identifier: Apache-2.0
"""Refuse calls that have cost other model servers a CVE: no allow-list, no exceptions.

Run by `make check` over every Python file that git knows or would add. Reads the syntax tree, so that a comment or a
docstring may name what is forbidden.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "telnetlib"}
"""Modules nobody may import."""

CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "torch.load", "tempfile.mktemp"}
"""Functions nobody may call."""

METHODS = {"extractall"}
"""Methods nobody may call, on anything."""


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What is forbidden in a file, with the line it is on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"import {a.name}") for a in node.names if a.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in MODULES:
            yield node.lineno, f"from {node.module} import"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or (isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
                yield node.lineno, f"{name}()"
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield node.lineno, f"{name}(shell=...)"


def product_findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What is forbidden in the product alone: `assert` disappears under `python -O`, so it guards nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert"


def main() -> int:
    """Check every file."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    bad = []
    paths = [path for path in sorted(listed.stdout.splitlines()) if (ROOT / path).exists()]
    for path in paths:
        text = (ROOT / path).read_text()
        tree = ast.parse(text, path)
        calls = list(findings(tree))
        if path.startswith("headrace/"):
            calls += product_findings(tree)
        if not text.startswith("# SPDX-License-Identifier: Apache-2.0\n"):
            calls.append((1, "no SPDX line at the top"))
        bad += [f"{path}:{line}: {call}" for line, call in calls]
    print("\n".join(bad) if bad else f"{len(paths)} files, nothing forbidden")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
