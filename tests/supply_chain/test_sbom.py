# SPDX-License-Identifier: Apache-2.0
"""The SBOMs are valid CycloneDX by its own library, name everything that is locked, and are made again alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lock
import make_sbom
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

LARGE = ("test", "all")
"""Seconds of validation."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in lock.LOCKS]
)
def test_it_is_valid_and_whole(name: str) -> None:
    text = make_sbom.text_of(name)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    locked = {(item, str(version)) for item, versions in lock.pinned(_lock(name)).items() for version in versions}
    assert {(item["name"], item["version"]) for item in document["components"]} == locked
    for component in document["components"]:
        purl = PackageURL.from_string(component["purl"])
        assert (purl.type, purl.name, purl.version) == ("pypi", component["name"], component["version"])
        assert component["externalReferences"][0]["hashes"]


def test_a_wrong_document_is_not_valid() -> None:
    """That the validator says nothing means something."""
    document = make_sbom.document_of("image") | {"specVersion": 16}
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document)) is not None


def test_it_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    script = Path(make_sbom.__file__)
    subprocess.run([sys.executable, script, "image", tmp_path / "sbom.json"], check=True)
    assert (tmp_path / "sbom.json").read_text() == make_sbom.text_of("image")
    wrong = subprocess.run([sys.executable, script, "nothing"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, "usage" in wrong.stderr) == (2, True)


def _lock(name: str) -> str:
    return (lock.FOLDER / f"{name}.lock").read_text()
