# SPDX-License-Identifier: Apache-2.0
"""What replicas tell of themselves, with the labels that a Prometheus in a cluster would give them. For `autoscaling`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

from headrace.fleet.autoscaling.exposition import Series, read_series
from headrace.fleet.local.asking import page
from headrace.fleet.local.commands import ADDRESS
from headrace.fleet.local.replica import Replica
from headrace.fleet.planning.pods import main_container
from headrace.fleet.words import annotations_of, items, labels_of, name_of, part, text, whole

_PORT, _PATH = "prometheus.io/port", "prometheus.io/path"
_PATH_FORM = re.compile(r"/[\x21-\x7e]*")


async def told_by(pods: Sequence[Replica], wanted: Callable[[str], bool]) -> Series:
    """The series of all pods together. Who does not answer tells nothing."""
    found = await asyncio.gather(*(_told(each, wanted) for each in pods))
    return {labels: value for each in found for labels, value in each.items()}


async def _told(pod: Replica, wanted: Callable[[str], bool]) -> Series:
    port, path = _place(pod)
    answer = await page(port, path) if port else None
    if answer is None:
        return {}
    document = pod.record.document
    labels = {re.sub(r"[^a-zA-Z0-9_]", "_", name): value for name, value in labels_of(document).items()}
    target = {"namespace": text(document, "metadata", "namespace"), "pod": name_of(document)}
    return read_series(answer.decode("utf-8", "replace"), wanted, {**labels, **target, "instance": f"{ADDRESS}:{port}"})


def _place(pod: Replica) -> tuple[int | None, str]:
    """Where its metrics are: as its annotations say, else at its first port."""
    notes = annotations_of(pod.record.document)
    said, path = notes.get(_PORT, ""), notes.get(_PATH, "")
    container = main_container(part(pod.record.document, "spec"))
    number = int(said) if said.isdecimal() and said.isascii() and len(said) < 6 else None
    if number is None:
        number = next((port for each in items(container, "ports") if (port := whole(each, "containerPort"))), None)
    return pod.port(number) if number else None, path if _PATH_FORM.fullmatch(path) else "/metrics"
