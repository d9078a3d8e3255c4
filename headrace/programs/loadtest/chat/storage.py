# SPDX-License-Identifier: Apache-2.0
"""Write benchmark results to a folder or an object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import InvalidArgument
from headrace.models.storage.locations import LocalLocation, ObjectLocation, parse_location
from headrace.models.storage.object_stores import upload

_PROBE = ".headrace-bench"


def check_output(output: str) -> None:
    """Write a small file before a long measurement, so that errors show early. In an object store it stays."""
    location = _parse_output(output)
    if isinstance(location, ObjectLocation):
        upload(_below(location, _PROBE), b"", None)
        return
    try:
        location.path.mkdir(parents=True, exist_ok=True)
        probe = location.path / _PROBE
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InvalidArgument(f"--output {output}: cannot be written ({error.strerror})") from None


def write_results(output: str, files: Mapping[str, bytes]) -> None:
    """Write files; existing ones are replaced."""
    location = _parse_output(output)
    for name, content in files.items():
        if isinstance(location, ObjectLocation):
            upload(_below(location, name), content, None)
            continue
        try:
            (location.path / name).write_bytes(content)
        except OSError as error:
            raise InvalidArgument(f"--output {Path(output) / name}: {error.strerror}") from None


def _parse_output(output: str) -> LocalLocation | ObjectLocation:
    location = parse_location(output)
    if isinstance(location, LocalLocation | ObjectLocation):
        return location
    raise InvalidArgument(f"--output {location}: cannot be written; give a folder, s3://, gs:// or az://")


def _below(location: ObjectLocation, name: str) -> ObjectLocation:
    return replace(location, key=f"{location.key}/{name}" if location.key else name)
