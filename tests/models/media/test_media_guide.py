# SPDX-License-Identifier: Apache-2.0
"""The guide names every setting of media."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from headrace.models.media.settings import MediaSettings


def test_every_setting_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/media-and-storage.md").read_text()
    rows = [line.split("`")[1] for line in guide.splitlines() if line.startswith("| `")]
    names = [field.name for field in fields(MediaSettings)]
    assert [row for row in rows if row in names] == names
