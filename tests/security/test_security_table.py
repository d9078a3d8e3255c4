# SPDX-License-Identifier: Apache-2.0
"""The tables of `README.md` and of the threat model name tests that are there, and leave none of the 26 out."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = Path(__file__).parent / "README.md"
MODEL = TESTS.parent / "docs/guides/threat-model.md"
_NAMED = re.compile(r"`(?:tests/)?(\w+/[\w/]+\.py)(?:::(\w+))?`")


def named(text: str) -> list[tuple[str, str]]:
    return [(path, name) for path, name in _NAMED.findall(text) if not path.startswith(("scripts/", "headrace/"))]


def test_every_test_that_is_named_exists() -> None:
    for document, least in ((TABLE, 90), (MODEL, 15)):
        found = named(document.read_text())
        assert len(found) >= least, document
        for path, name in found:
            file = TESTS / path
            assert file.exists(), path
            assert not name or re.search(rf"^\s*(async )?def {name}\(", file.read_text(), re.MULTILINE), (
                f"{path}::{name}"
            )


def test_all_26_are_there() -> None:
    numbers = {int(number) for number in re.findall(r"^\| (\d+) ", TABLE.read_text(), re.MULTILINE)}
    assert numbers == set(range(1, 27))


def test_every_file_of_this_folder_is_named() -> None:
    text = TABLE.read_text()
    for path in Path(__file__).parent.glob("test_*.py"):
        assert path.name in text, path.name
