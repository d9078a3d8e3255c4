# SPDX-License-Identifier: Apache-2.0
"""Every container of ours that an installation starts has no rights, and writes nowhere but in its volumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.fleet.explain import shipped_runtimes
from headrace.fleet.install.manifests import agent_objects, operator_objects
from headrace.fleet.install.settings import ManifestSettings

_SETTINGS = ManifestSettings()
INSTALLED = [*operator_objects(_SETTINGS), *agent_objects(_SETTINGS), *shipped_runtimes()]


def containers_of(value: Any, around: tuple[Any, ...] = ()) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Everything with an image of ours, however deep, and what stands around it."""
    if isinstance(value, dict):
        if "headrace" in str(value.get("image", "")):
            yield value, around
        for item in value.values():
            yield from containers_of(item, (*around, value))
    elif isinstance(value, list):
        for item in value:
            yield from containers_of(item, around)


OURS = [
    pytest.param(
        document, container, around, id=f"{document['kind']}-{document['metadata']['name']}-{container['name']}"
    )
    for document in INSTALLED
    for container, around in containers_of(document)
]


def test_there_are_some_of_each() -> None:
    kinds = {item.values[0]["kind"] for item in OURS}  # type: ignore[index,call-overload]
    assert kinds == {"Deployment", "DaemonSet", "ClusterServingRuntime"}


@pytest.mark.parametrize(("document", "container", "around"), OURS)
def test_every_container_of_ours_is_confined(
    document: dict[str, Any], container: dict[str, Any], around: tuple[Any, ...]
) -> None:
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert "ALL" in own["capabilities"]["drop"]
    outputs = [own, *(item["securityContext"] for item in around if "securityContext" in item)]
    # The folder of models on a node is root's: the agent is root, without root's powers.
    assert any(output.get("runAsNonRoot") for output in outputs) == (document["kind"] != "DaemonSet")
    assert not any(output.get("privileged") for output in outputs)
