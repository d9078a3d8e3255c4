# SPDX-License-Identifier: Apache-2.0
"""The words that people type for kinds: `isvc`, `models`, `inferenceservices.ome.io`, `BenchmarkJob`. Pure."""

from __future__ import annotations

from difflib import get_close_matches

from headrace.core.errors import InvalidArgument
from headrace.fleet.names import GROUP
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import KINDS, find_kind

SERVICE = "InferenceService"

_TOGETHER = {
    "services": (SERVICE,),
    "runtimes": ("ServingRuntime", "ClusterServingRuntime"),
    "models": ("BaseModel", "ClusterBaseModel"),
    "weights": ("FineTunedWeight",),
    "accelerators": ("AcceleratorClass",),
    "benchmarks": ("BenchmarkJob",),
}
"""Words for what belongs together, whatever namespace it is in."""

SHOWN = ("isvc", "runtimes", "models", "weights", "accelerators", "benchmarkjobs")
"""For help and messages."""


def kinds_of(word: str) -> tuple[Kind, ...]:
    """The kinds that a word stands for. Raises InvalidArgument."""
    asked = word.lower().removesuffix(f".{GROUP}")
    together = _TOGETHER.get(asked) or _TOGETHER.get(f"{asked}s")
    if together is not None:
        return tuple(kind_named(each) for each in together)
    for kind in KINDS:
        if asked in (kind.plural, kind.name.lower()) or asked.removesuffix("s") in kind.short:
            return (kind,)
    names = [*SHOWN, *_TOGETHER, *(each.plural for each in KINDS)]
    near = get_close_matches(asked, names, 1, 0.7)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise InvalidArgument(f"{word[:64]!a} is no kind that a fleet has: there are {', '.join(SHOWN)}{meant}")


def kind_named(name: str) -> Kind:
    """One of our kinds by its own name."""
    found = find_kind(name)
    if found is None:
        raise InvalidArgument(f"{name[:64]!a} is not a kind of {GROUP}")
    return found


def split(words: list[str]) -> tuple[tuple[Kind, ...], list[str]]:
    """Kinds and names of `isvc`, `isvc a b` and `isvc/a`. Raises InvalidArgument."""
    if not words:
        return kinds_of("isvc"), []
    if all("/" in each for each in words):
        pairs = [each.partition("/") for each in words]
        if len({kinds_of(kind) for kind, _, _ in pairs}) > 1:
            raise InvalidArgument("name one kind at a time")
        names = [name for _, _, name in pairs]
        if not all(names):
            raise InvalidArgument("write KIND/NAME, such as isvc/llama")
        return kinds_of(pairs[0][0]), names
    return kinds_of(words[0]), words[1:]
