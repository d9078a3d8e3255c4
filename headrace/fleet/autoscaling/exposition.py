# SPDX-License-Identifier: Apache-2.0
"""What a replica tells of itself: Prometheus' text as series. Written by `telemetry.exposition` and by many others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Labels = tuple[tuple[str, str], ...]
"""Sorted by name; the metric's own stands under `__name__`."""
Series = dict[Labels, float]

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+\S+)?(?: # .*)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"n": "\n"}


def read_series(text: str, wanted: Callable[[str], bool], target: Mapping[str, str]) -> Series:
    """The series whose names are `wanted`, with the labels of their replica. What cannot be read is left out."""
    found: Series = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if not name or name.startswith("#") or not wanted(name):
            continue
        parts = _LINE.fullmatch(line.rstrip())
        if parts is None:
            continue
        try:
            value = float(parts[3])
        except ValueError:
            continue
        labels = {each: _unescaped(said) for each, said in _LABEL.findall(parts[2] or "")}
        # As Prometheus does: what the target says of itself under a name of ours stands under another.
        own = {f"exported_{each}" if each in target else each: said for each, said in labels.items()}
        found[tuple(sorted({**own, **target, "__name__": name}.items()))] = value
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), text) if "\\" in text else text
