# SPDX-License-Identifier: Apache-2.0
"""Labels and annotations that end up on objects: what the API server would refuse there is told where it was written."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.fleet.names import COMPONENTS, LONGEST_LABEL
from headrace.fleet.words import Document, Problem, part

_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"|[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def label_problems(service: Document) -> Iterator[Problem]:
    """What is wrong with the labels and annotations of a service and its components."""
    for path in (("metadata",), *(("spec", name) for name in COMPONENTS)):
        place = ".".join(path)
        for name, value in part(service, *path, "labels").items():
            yield from _name(f"{place}.labels[{str(name)[:80]}]", name)
            if isinstance(value, str) and _VALUE.fullmatch(value) is None:
                said = f"{value[:40]!a} is not the value of a label"
                fix = f"use at most {LONGEST_LABEL} letters, digits, '-', '_' and '.', with a letter or digit at both ends"
                yield Problem(f"{place}.labels[{str(name)[:80]}]", said, fix)
        for name in part(service, *path, "annotations"):
            yield from _name(f"{place}.annotations[{str(name)[:80]}]", name)


def _name(place: str, name: object) -> Iterator[Problem]:
    if not isinstance(name, str):
        return
    prefix, slash, last = name.rpartition("/")
    if _NAME.fullmatch(last) is None or (slash and _PREFIX.fullmatch(prefix) is None):
        fix = f"write name or domain/name, with at most {LONGEST_LABEL} letters, digits, '-', '_' and '.' in the name"
        yield Problem(place, f"{name[:40]!a} is not a name that Kubernetes takes here", fix)
