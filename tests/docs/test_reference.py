# SPDX-License-Identifier: Apache-2.0
"""What is made from the code is as the code is: the reference's pages, and the pictures of the architecture."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow  # `make check` runs the same scripts
@pytest.mark.parametrize("script", ["generate_code_reference.py", "draw_architecture.py"])
def test_nothing_is_out_of_date(script: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_route_is_described() -> None:
    text = (ROOT / "docs/reference/routes.md").read_text()
    assert "Not described" not in text
    assert "`POST /v2/models/{model}/infer` | infer |" in text
    assert "`POST /console/api/requests` | admin |" in text


def test_every_metric_has_a_description() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .+ \| (.+) \|$", (ROOT / "docs/reference/metrics.md").read_text(), re.M)
    assert len(rows) > 60
    assert {kind for _, kind, _ in rows} <= {"counter", "gauge", "histogram", "summary"}
    assert len({name for name, _, _ in rows}) == len(rows)
    assert {"nv_inference_count", "headrace_llm_generated_tokens_total"} <= {name for name, _, _ in rows}


def test_the_picture_is_for_light_and_dark_and_for_screen_readers() -> None:
    file = ROOT / "docs/pictures/packages.svg"
    picture = ET.parse(file).getroot()
    assert picture.find(f"{SVG}title") is not None and picture.find(f"{SVG}desc") is not None
    assert "prefers-color-scheme: dark" in file.read_text()
    box = [float(number) for number in picture.attrib["viewBox"].split()]
    for rect in picture.iter(f"{SVG}rect"):
        right = float(rect.attrib.get("x", 0)) + float(rect.attrib["width"])
        assert right <= box[2] and float(rect.attrib.get("y", 0)) + float(rect.attrib["height"]) <= box[3]


@pytest.mark.parametrize("document", ["architecture.md", "internals.md"])
def test_the_files_that_a_document_names_exist(document: str) -> None:
    files = re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)`", (ROOT / "docs" / document).read_text())
    assert len(files) > 10
    assert [file for file in files if not (ROOT / "headrace" / file).is_file() and not (ROOT / file).is_file()] == []
