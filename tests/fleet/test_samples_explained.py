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
RUNTIMES = {name_of(each): each for each in shipped_runtimes()}
NOTHING = ParsedFiles([], [])


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_alone_is_enough(path: Path) -> None:
    asked = prepare(read([path]), NOTHING)
    assert asked.errors == []
    [source] = asked.services
    told = explain(source, asked)
    assert told.errors == [] and told.warnings == []
    assert bool(told.objects) == (path.stem != "virtual")


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_a_runtime_that_is_named_works(name: str) -> None:
    runtime = RUNTIMES[name]
    entry = runtime["spec"]["supportedModelFormats"][0]
    least = runtime["spec"].get("modelSizeRange", {}).get("min", "1B")
    model: dict[str, Any] = {"modelFormat": dict(entry["modelFormat"]), "modelParameterSize": least}
    model |= {each: entry[each] for each in ("modelArchitecture", "quantization", "modelFramework") if each in entry}
    parts = {each: "{}" for each in ("engine", "decoder", "router") if f"{each}Config" in runtime["spec"]}
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
    asked = prepare(parse(text, "isvc.yaml"), NOTHING)
    [source] = asked.services
    told = explain(source, asked)
    assert told.errors == [] and told.warnings == []
    assert set(told.components) == set(parts)


def images(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = {value["image"]} if isinstance(value.get("image"), str) else set()
        return found.union(*map(images, value.values()))
    return set().union(*map(images, value)) if isinstance(value, list) else set()


def test_our_images_are_of_this_version() -> None:
    """After a release: put the new version into the files that are named."""
    ours = FleetSettings.image
    assert ours == f"headrace:{__version__}"
    found = {
        (path.name, image)
        for path in [*SAMPLES, *(SHIPPED / "runtimes").glob("*.yaml")]
        for each in read([path]).documents
        for image in images(dict(each))
        if image.startswith("headrace:")
    }
    assert found
    assert {each for each in found if each[1] not in (ours, f"{ours}-full")} == set()
    # No other has a tag that moves, either.
    others = {image for each in RUNTIMES.values() for image in images(dict(each))}
    assert {each for each in others if each.endswith(":latest") or ":" not in each} == set()


def test_runtimes_get_the_image_that_was_installed() -> None:
    before, after = shipped_runtimes(), with_image(shipped_runtimes(), "r.example/h:2", "r.example/torch:3")
    assert [name_of(each) for each in before] == [name_of(each) for each in after]
    changed = {name_of(each): images(each) for each, old in zip(after, before, strict=True) if each != old}
    torch = {"r.example/torch:3"}
    assert changed == {
        "headrace-cpu": {"r.example/h:2"},
        "headrace-cpu-formats": torch,
        "headrace-gpu": torch,
        "headrace-prefill-decode": {"r.example/h:2", *torch},
    }
    assert all(kind_of(each) == "ClusterServingRuntime" for each in after)


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
