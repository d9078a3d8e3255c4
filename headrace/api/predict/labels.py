# SPDX-License-Identifier: Apache-2.0
"""Versions as people call them: `v1.2.0` for the engine's 2.

Read from a model's configuration, where the parameter `version_labels` has `1=v1.0.0,2=v1.2.0`. A version without a label
goes by its number; so does one whose entry cannot be read, since a model that serves must not stop over its names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headrace.core.errors import HeadraceError
from headrace.core.names import check_name, parse_version

log = logging.getLogger("headrace.api")

PARAMETER = "version_labels"
LATEST = "latest"


class VersionLabels:
    """Both ways, for one model."""

    __slots__ = ("_labels", "_numbers")

    def __init__(self, by_number: Mapping[str, str]) -> None:
        self._labels = dict(by_number)
        self._numbers = {label: number for number, label in by_number.items()}

    def label(self, number: str) -> str:
        """What clients are told."""
        return self._labels.get(number, number)

    def number(self, text: str) -> str:
        """What the engine knows: the number of a label, any other text as it is."""
        return self._numbers.get(text, text)


def parse_labels(text: str, model: str) -> VersionLabels:
    """Read the parameter. What is wrong in it is logged and left out."""
    found: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        number, _, label = (part.strip() for part in entry.partition("="))
        try:
            number = str(parse_version(number))
            check_name(label, "version label")
            if label == LATEST or label in found.values():
                raise ValueError
        except (HeadraceError, ValueError):
            log.warning(
                "a version label is ignored: write %s as 1=v1.0.0,2=v1.2.0, each label once and none 'latest'",
                PARAMETER,
                extra={"model": model, "entry": entry[:64]},
            )
            continue
        found[number] = label
    return VersionLabels(found)
