# SPDX-License-Identifier: Apache-2.0
"""docs/licences.md lists every locked package with its licence."""

from __future__ import annotations

import pytest
from list_licences import PAGE, describe, problems_of

FORBIDDEN = ("AGPL", "GPL-2.0", "GPL-3.0", "SSPL", "BUSL")
"""Licences that a package which Headrace is distributed with must not have."""


def test_the_page_lists_every_locked_package() -> None:
    assert problems_of(PAGE.read_text()) == []


def test_a_missing_an_old_and_an_unknown_package_are_reported() -> None:
    page = PAGE.read_text()
    row = next(line for line in page.splitlines() if line.startswith("| [numpy]"))
    version = row.split(" | ")[1]
    assert f"numpy {version} is not on the page: run scripts/list_licences.py" in problems_of(page.replace(row, ""))
    more = "| [left-pad](https://pypi.org/project/left-pad/) | 1.0 | MIT |\n"
    assert problems_of(page + more) == ["left-pad 1.0 is locked no more: run scripts/list_licences.py"]
    unknown = " | ".join([*row.split(" | ")[:2], "unknown |"])
    assert problems_of(page.replace(row, unknown)) == [f"numpy {version} has no known licence"]


def test_what_is_installed_with_headrace_has_a_permissive_licence() -> None:
    shipped = PAGE.read_text().partition("## To build")[0]
    rows = [line.split(" | ") for line in shipped.splitlines() if line.startswith("| [")]
    copyleft = {name: licence for name, _, licence in rows if licence.removesuffix(" |").startswith(FORBIDDEN)}
    assert len(rows) > 40 and copyleft == {}


@pytest.mark.parametrize(
    ("said", "licence"),
    [
        ({"license_expression": "MIT", "license": "other"}, "MIT"),
        ({"classifiers": ["License :: OSI Approved :: Apache Software License"]}, "Apache-2.0"),
        ({"classifiers": ["License :: OSI Approved :: BSD License"], "license": "BSD-3-Clause"}, "BSD-3-Clause"),
        ({"classifiers": ["License :: OSI Approved :: BSD License"]}, "BSD"),
        ({"license": "Copyright (c) 2020\n\nApache License, Version 2.0"}, "Apache-2.0"),
        ({"license": None}, "unknown"),
    ],
)
def test_the_licence_is_read_from_the_metadata_of_a_package(said: dict[str, object], licence: str) -> None:
    assert describe(said) == licence
