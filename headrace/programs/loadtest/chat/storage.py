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


def check_place(said: str) -> None:
    """Refuse before a long measurement what would fail after it: a small file is written, and stays in an object store."""
    place = _place(said)
    if isinstance(place, ObjectLocation):
        upload(_below(place, _PROBE), b"", None)
        return
    try:
        place.path.mkdir(parents=True, exist_ok=True)
        probe = place.path / _PROBE
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InvalidArgument(f"--output {said}: nothing can be written there ({error.strerror})") from None


def keep(said: str, files: Mapping[str, bytes]) -> None:
    """Write files, in place of those that are there."""
    place = _place(said)
    for name, content in files.items():
        if isinstance(place, ObjectLocation):
            upload(_below(place, name), content, None)
            continue
        try:
            (place.path / name).write_bytes(content)
        except OSError as error:
            raise InvalidArgument(f"--output {Path(said) / name}: {error.strerror}") from None


def _place(said: str) -> LocalLocation | ObjectLocation:
    place = parse_location(said)
    if isinstance(place, LocalLocation | ObjectLocation):
        return place
    raise InvalidArgument(f"--output {place}: nothing can be written there; give a folder, s3://, gs:// or az://")


def _below(place: ObjectLocation, name: str) -> ObjectLocation:
    return replace(place, key=f"{place.key}/{name}" if place.key else name)
