# SPDX-License-Identifier: Apache-2.0
"""Write an SBOM of an installation (CycloneDX 1.6): `python scripts/make_sbom.py image sbom.json`.

Made from a lock, so it is the same on every machine and at any time: every package with its version, its package URL and the
hashes of the files that may be installed. Called by `release`, too.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

from lock import FOLDER, LOCKS
from packaging.utils import canonicalize_name
from tool_venvs import ROOT

_ENTRY = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?: ; (?P<marker>.*?))? \\\n(?P<rest>(?:    .*\n?)+)", re.MULTILINE
)
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_OURS = uuid.UUID("3d1b7f43-4c6f-5f0e-9b0c-6f1f3a0d9a11")
"""A fixed place of names, so that the document's number is made of its content."""


def main() -> int:
    """Write the document of a lock to a file."""
    match sys.argv[1:]:
        case [name, path] if name in LOCKS:
            Path(path).write_text(text_of(name))
            return 0
    print(f"usage: make_sbom.py {'|'.join(LOCKS)} FILE", file=sys.stderr)
    return 2


def text_of(name: str) -> str:
    """The document of a lock as JSON; the same for the same lock."""
    return json.dumps(document_of(name), indent=1) + "\n"


def document_of(name: str) -> dict[str, Any]:
    """The document of a lock."""
    lock = (FOLDER / f"{name}.lock").read_text()
    version = _version()
    main = {
        "type": "application",
        "bom-ref": f"pkg:pypi/headrace@{version}",
        "name": "headrace",
        "version": version,
        "purl": f"pkg:pypi/headrace@{version}",
        "licenses": [{"license": {"id": _project()["license"]}}],
    }
    parts = [_component(entry) for entry in _ENTRY.finditer(lock)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_OURS, version + lock)}",
        "version": 1,
        "metadata": {"component": main, "properties": [{"name": "headrace:extras", "value": ",".join(LOCKS[name])}]},
        "components": parts,
        "dependencies": [{"ref": main["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def _component(entry: re.Match[str]) -> dict[str, Any]:
    name, version = canonicalize_name(entry["name"]), entry["version"]
    purl = f"pkg:pypi/{name}@{version}"
    hashes = [{"alg": "SHA-256", "content": digest} for digest in _HASH.findall(entry["rest"])]
    # One for each file that the index has of this version; which of them is installed depends on the machine.
    files = [{"type": "distribution", "url": f"https://pypi.org/project/{name}/{version}/", "hashes": hashes}]
    marker = [{"name": "headrace:marker", "value": entry["marker"]}] if entry["marker"] else []
    properties = {"properties": marker} if marker else {}
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "externalReferences": files,
        **properties,
    }


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _version() -> str:
    match = re.search(r'__version__ = "([^"]+)"', (ROOT / "headrace" / "version.py").read_text())
    return match[1] if match else "0"


if __name__ == "__main__":
    sys.exit(main())
