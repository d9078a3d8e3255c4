# SPDX-License-Identifier: Apache-2.0
"""Samples and runtimes as a reader tries them: explained without a word of complaint, with images that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace.fleet
from headrace.fleet.documents import FleetSettings
from headrace.fleet.explain import explain, prepare, shipped_runtimes
from headrace.fleet.install.samples import full_image_of, with_image
from headrace.fleet.yaml_documents import ParsedFiles, parse, read
from headrace.platforms.kubernetes_client.objects import kind_of, name_of
from headrace.version import __version__

SHIPPED = Path(headrace.fleet.__file__).parent
SAMPLES = sorted((SHIPPED / "samples").glob("*.yaml"))
RUNTIMES = {name_of(shipped_runtime): shipped_runtime for shipped_runtime in shipped_runtimes()}
NOTHING = ParsedFiles([], [])


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_alone_is_enough(path: Path) -> None:
    request = prepare(read([path]), NOTHING)
    assert request.errors == []
    [source] = request.services
    explanation = explain(source, request)
    assert explanation.errors == [] and explanation.warnings == []
    assert bool(explanation.objects) == (path.stem != "virtual")


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_a_runtime_that_is_named_works(name: str) -> None:
    runtime = RUNTIMES[name]
    entry = runtime["spec"]["supportedModelFormats"][0]
    least = runtime["spec"].get("modelSizeRange", {}).get("min", "1B")
    model: dict[str, Any] = {"modelFormat": dict(entry["modelFormat"]), "modelParameterSize": least}
    model |= {
        field: entry[field] for field in ("modelArchitecture", "quantization", "modelFramework") if field in entry
    }
    parts = {
        component: "{}" for component in ("engine", "decoder", "router") if f"{component}Config" in runtime["spec"]
    }
    mode = "MultiNodeRayVLLM" if name == "vllm-ray" else ""
    text = (
        f"""
apiVersion: ome.io/v1beta1
kind: ClusterBaseModel
metadata: {{name: m}}
spec: {{...}}
---
apiVersion: ome.io/v1beta1
kind: InferenceService
metadata: {{name: s, annotations: {{{f"ome.io/deploymentMode: {mode}" if mode else ""}}}}}
spec:
  model: {{name: m}}
  runtime: {{name: {name}}}
""".replace("{...}", str(model | {"storage": {"storageUri": "hf://a/b", "path": "/mnt/models/m"}}))
        + "".join(f"  {part}: {said}\n" for part, said in parts.items())
    )
    request = prepare(parse(text, "isvc.yaml"), NOTHING)
    [source] = request.services
    explanation = explain(source, request)
    assert explanation.errors == [] and explanation.warnings == []
    assert set(explanation.components) == set(parts)


def images(value: Any) -> set[str]:
    if isinstance(value, dict):
        result = {value["image"]} if isinstance(value.get("image"), str) else set()
        return result.union(*map(images, value.values()))
    return set().union(*map(images, value)) if isinstance(value, list) else set()


def test_our_images_are_of_this_version() -> None:
    """After a release: put the new version into the files that are named."""
    ours = FleetSettings.image
    assert ours == f"headrace:{__version__}"
    results = {
        (path.name, image)
        for path in [*SAMPLES, *(SHIPPED / "runtimes").glob("*.yaml")]
        for document in read([path]).documents
        for image in images(dict(document))
        if image.startswith("headrace:")
    }
    assert results
    assert {result for result in results if result[1] not in (ours, f"{ours}-full")} == set()
    # No other has a tag that moves, either.
    others = {image for runtime in RUNTIMES.values() for image in images(dict(runtime))}
    assert {other for other in others if other.endswith(":latest") or ":" not in other} == set()


def test_runtimes_get_the_image_that_was_installed() -> None:
    before, after = shipped_runtimes(), with_image(shipped_runtimes(), "r.example/h:2", "r.example/torch:3")
    assert [name_of(process) for process in before] == [name_of(item) for item in after]
    changed = {name_of(item): images(item) for item, old in zip(after, before, strict=True) if item != old}
    torch = {"r.example/torch:3"}
    assert changed == {
        "headrace-cpu": {"r.example/h:2"},
        "headrace-cpu-formats": torch,
        "headrace-gpu": torch,
        "headrace-multi-node": torch,
        "headrace-prefill-decode": {"r.example/h:2", *torch},
    }
    assert all(kind_of(item) == "ClusterServingRuntime" for item in after)


@pytest.mark.parametrize(
    ("image", "full"),
    [
        ("headrace:1", "headrace:1-full"),
        ("r.example:5000/h:1", "r.example:5000/h:1-full"),
        ("r.example:5000/h", "r.example:5000/h:latest-full"),
        ("h@sha256:00", "h@sha256:00"),
    ],
)
def test_the_image_beside_it(image: str, full: str) -> None:
    assert full_image_of(image) == full
