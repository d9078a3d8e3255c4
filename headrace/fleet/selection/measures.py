# SPDX-License-Identifier: Apache-2.0
"""Numbers that documents write as text: sizes of models, quantities of Kubernetes, versions.

Used by the rest of the room and by merging. What cannot be read counts as nothing; `schema.check` has said so before.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

_SIZE_UNITS = {"T": 1e12, "B": 1e9, "M": 1e6}
_QUANTITY = re.compile(r"([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,3})?)(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?")
_UNITS = {
    **{unit: 1000.0**power for power, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)},
    **{unit: 1024.0**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
_GIGABYTE = 1024.0**3
_VERSION = re.compile(r"([vV]?)([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,9}))?(.*)", re.DOTALL)


@lru_cache(maxsize=4096)
def parameters(size: str) -> float:
    """`7B` in parameters; 0 for what is no size."""
    unit = _SIZE_UNITS.get(size[-1:])
    try:
        number = float(size[:-1] if unit else size)
    except ValueError:
        return 0.0
    return number * (unit or 1.0)


def quantity(value: Any) -> float | None:
    """A quantity as a number: `500m` is 0.5, `2Gi` 2147483648. None for what is none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    found = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    return float(found[1]) * _UNITS.get(found[2] or "", 1.0) if found else None


def gigabytes(value: Any, *, upstream: bool = False) -> float | None:
    """Memory in GB. `80` under a field named `memoryGB` means 80 GB; OME reads 80 bytes."""
    number = quantity(value)
    if number is None:
        return None
    bare = not (isinstance(value, str) and value.strip()[-1:].isalpha())
    return number if bare and not upstream else number / _GIGABYTE


class Version(NamedTuple):
    """`v1.2.3-rc1` taken apart."""

    prefix: str
    numbers: tuple[int, ...]
    suffix: str

    @property
    def padded(self) -> tuple[int, ...]:
        """The numbers, three of them: 1, 1.0 and 1.0.0 are the same version to most people."""
        return (*self.numbers, 0, 0)[:3]


@lru_cache(maxsize=4096)
def version(written: str) -> Version | None:
    """A version, if the text is one."""
    found = _VERSION.fullmatch(written.strip())
    if found is None:
        return None
    return Version(found[1].lower(), tuple(int(each) for each in found.groups()[1:4] if each), found[5])


def fits(theirs: str, ours: str, operator: str, *, upstream: bool) -> bool:
    """Whether a runtime made for version `ours` takes a model of version `theirs`.

    GreaterThan means that the runtime's is the greater one: a ceiling for models, not a floor.
    """
    model, runtime = version(theirs), version(ours)
    if model is None or runtime is None:
        return theirs == ours and not upstream
    alike = model.prefix == runtime.prefix and len(model.numbers) == len(runtime.numbers)
    if upstream and not alike:
        return False
    if model.suffix or runtime.suffix or operator not in ("GreaterThan", "GreaterThanOrEqual"):
        return (runtime.padded, runtime.suffix) == (model.padded, model.suffix)
    if operator == "GreaterThan":
        return runtime.padded > model.padded
    return runtime.padded >= model.padded


def at_least(have: str, wanted: str, *, upstream: bool) -> bool:
    """Whether one architecture version is another or above it. As texts "10.0" stands below "9.0", which OME follows."""
    a, b = version(have), version(wanted)
    return have >= wanted if upstream or a is None or b is None else a.padded >= b.padded
