# SPDX-License-Identifier: Apache-2.0
"""The tables of `README.md` and of the threat model name tests that are there, and leave none of the 26 out.

Nor any surface of any of them: each has a test, or a reason why not.
"""

from __future__ import annotations

import re
from pathlib import Path

from matrix import README as TABLE
from matrix import SURFACES, cells, drawn

TESTS = Path(__file__).parents[1]
MODEL = TESTS.parent / "docs/guides/threat-model.md"
_NAMED = re.compile(r"`(?:tests/)?(\w+/[\w/]+\.py)(?:::(\w+))?`")


def named(text: str) -> list[tuple[str, str]]:
    return [(path, name) for path, name in _NAMED.findall(text) if not path.startswith(("scripts/", "headrace/"))]


def test_every_test_that_is_named_exists() -> None:
    for document, least in ((TABLE, 200), (MODEL, 20)):
        result = named(document.read_text())
        assert len(result) >= least, document
        for path, name in result:
            file = TESTS / path
            assert file.exists(), path
            assert not name or re.search(rf"^\s*(async )?def {name}\(", file.read_text(), re.MULTILINE), (
                f"{path}::{name}"
            )


def test_each_of_the_26_attack_classes_names_every_surface() -> None:
    result = cells(TABLE.read_text())
    assert list(result) == list(range(1, 27))
    assert not {
        number: left
        for number, row in result.items()
        if (left := [surface for surface in SURFACES if surface not in row])
    }


def test_the_matrix_is_drawn_from_the_tables() -> None:
    assert TABLE.read_text() == drawn(TABLE.read_text()), "run: python tests/security/matrix.py"


def test_every_file_of_this_folder_is_named() -> None:
    text = TABLE.read_text()
    for path in Path(__file__).parent.glob("test_*.py"):
        assert path.name in text, path.name
