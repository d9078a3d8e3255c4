# SPDX-License-Identifier: Apache-2.0
"""What `headrace bench` cannot do of what a BenchmarkJob asks. Called by `admission`, so that a webhook says it, too."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.core.errors import InvalidArgument
from headrace.fleet.benchmarks.places import place_of
from headrace.fleet.benchmarks.scenarios import TASKS, parse_scenario
from headrace.fleet.words import Document, Problem, items, namespace_of, part, text


def undoable(benchmark: Document) -> Iterator[Problem]:
    """Beside what the table says of each field."""
    spec, namespace = part(benchmark, "spec"), namespace_of(benchmark)
    for where in ("outputLocation", "dataset"):
        yield from place_of(part(spec, where), where, namespace).problems
    yield from _scenarios(spec)
    said = text(spec, "endpoint", "endpoint", "apiFormat")
    if said not in ("", "openai"):
        fix = "write openai, and an address that speaks it"
        yield Problem("spec.endpoint.endpoint.apiFormat", f"`headrace bench` does not speak {said[:40]}", fix)
    if any(each in ("..", ".") for each in text(spec, "resultFolderName").split("/")):
        yield Problem("spec.resultFolderName", "leads out of the place of results", "write a plain name")


def _scenarios(spec: Document) -> Iterator[Problem]:
    if text(spec, "task") not in TASKS:
        return  # the table says so
    for number, each in enumerate(items(spec, "trafficScenarios")):
        try:
            parse_scenario(str(each), text(spec, "task"))
        except InvalidArgument as error:
            said, _, fix = error.message.partition(": ")
            yield Problem(f"spec.trafficScenarios[{number}]", said, fix)
