# SPDX-License-Identifier: Apache-2.0
"""Images by TAO's rules, and ours when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound
from headrace.platforms.catalogue import Architecture, load
from headrace.platforms.images import Image, choose_image, find_versions, resolve_image
from headrace.version import __version__


@pytest.fixture
def arch() -> Architecture:
    return load()["cosmos-rl"]


def _versions(path: Path, image: str = "registry.example/a:1") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"images:\n  tao_toolkit:\n    cosmos_rl: {image}\n    empty: ''\n    list: [a]\n")
    return path


def test_without_any_file_the_public_images_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert {name: resolve_image(item, {}) for name, item in load().items()} == {
        "cosmos-rl": "nvcr.io/nvidia/tao/tao-toolkit:7.0.1-cosmos-rl",
        "cosmos-predict2.5": "nvcr.io/nvidia/tao/tao-toolkit:7.0.1-cosmos-predict",
        "tao-dataservices": "nvcr.io/nvidia/tao/tao-toolkit:7.0.1-data-services",
    }


def test_versions_files_are_searched_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    bank, named, given = (_versions(tmp_path / name / "versions.yaml") for name in ("bank", "named", "given"))
    environ = {"TAO_SKILL_BANK_PATH": str(bank.parent)}
    assert find_versions(environ) == bank
    _versions(here / "versions.yaml")
    assert find_versions(environ).resolve() == here / "versions.yaml"
    environ["TAO_VERSIONS_FILE"] = str(named)
    assert find_versions(environ) == named
    assert find_versions(environ, given) == given


def test_a_named_versions_file_must_be_there(arch: Architecture, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="name the versions.yaml"):
        resolve_image(arch, {"TAO_VERSIONS_FILE": str(tmp_path / "none.yaml")})
    with pytest.raises(NotFound, match="name the versions.yaml"):
        resolve_image(arch, {}, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "key", ["tao_toolkit.none", "tao_toolkit.empty", "tao_toolkit.list", "other.cosmos_rl", "a.b.c"]
)
def test_a_key_that_names_no_image_is_reported(arch: Architecture, tmp_path: Path, key: str) -> None:
    versions = _versions(tmp_path / "versions.yaml")
    with pytest.raises(NotFound, match=f"has no image images.{key}, which IMAGE_COSMOS_RL needs"):
        resolve_image(arch, {"IMAGE_COSMOS_RL": key}, versions)


def test_a_variable_wins_as_a_key_or_as_an_image(arch: Architecture, tmp_path: Path) -> None:
    versions = _versions(tmp_path / "versions.yaml", "registry.example/b:2")
    assert resolve_image(arch, {"IMAGE_COSMOS_RL": "tao_toolkit.cosmos_rl"}, versions) == "registry.example/b:2"
    for image in (
        "nvcr.io/a/b:c",
        "name",
        "name:1.2",
        "/shared/x.sqsh",
        "docker://nvcr.io#a/b:c",
        "a@sha256:" + "0" * 64,
    ):
        assert resolve_image(arch, {"IMAGE_COSMOS_RL": image}) == image
    assert resolve_image(arch, {"IMAGE_OTHER": "name", "IMAGE_COSMOS_RL": ""}, versions) == "registry.example/b:2"


@pytest.mark.parametrize(
    "name", ["a b", "a;b", "$(touch x)", "-v", "a\nb", "a'b", 'a"b', "a`b`", "a|b", "a&b", "é", "a" * 600]
)
def test_hostile_names_are_refused(arch: Architecture, tmp_path: Path, name: str) -> None:
    for ask in (
        lambda: resolve_image(arch, {"IMAGE_COSMOS_RL": name}),
        lambda: choose_image(arch, {}, name),
        lambda: choose_image(arch, {"HEADRACE_IMAGE": name}),
    ):
        with pytest.raises(InvalidArgument, match="is not the name of an image"):
            ask()
    versions = tmp_path / "versions.yaml"
    versions.write_text(f"images: {{tao_toolkit: {{cosmos_rl: {__import__('json').dumps(name)}}}}}")
    with pytest.raises(HeadraceError):
        resolve_image(arch, {}, versions)


def test_a_broken_versions_file_is_reported_with_its_line(arch: Architecture, tmp_path: Path) -> None:
    versions = tmp_path / "versions.yaml"
    versions.write_text("images:\n  a: [\n")
    with pytest.raises(InvalidArgument, match=r"versions\.yaml, line 3: not valid YAML"):
        resolve_image(arch, {}, versions)


def test_an_architecture_without_a_default_names_the_variable_to_set(arch: Architecture) -> None:
    with pytest.raises(FailedPrecondition, match="set IMAGE_MINE"):
        resolve_image(replace(arch, image_key="MINE", image_default=""), {})


def test_our_image_is_used_when_requested(arch: Architecture) -> None:
    own = f"headrace:{__version__}"
    assert choose_image(arch, {}, "headrace") == Image(own, True)
    environ = {"HEADRACE_IMAGE": "registry.example/team/mine:2", "IMAGE_COSMOS_RL": "registry.example/x:1"}
    mine = Image("registry.example/team/mine:2", True)
    assert choose_image(arch, environ) == mine
    assert choose_image(arch, environ, "headrace") == mine
    assert choose_image(arch, environ, "registry.example/team/mine:2") == mine
    assert choose_image(arch, {}, "registry.example:5000/team/headrace:2") == Image(
        "registry.example:5000/team/headrace:2", True
    )
    assert choose_image(arch, environ, "registry.example/y:1") == Image("registry.example/y:1", False)
    assert choose_image(arch, {"IMAGE_COSMOS_RL": "registry.example/x:1"}) == Image("registry.example/x:1", False)


def test_an_image_may_be_named_by_a_key(arch: Architecture, tmp_path: Path) -> None:
    assert choose_image(arch, {}, "tao_toolkit.cosmos_rl", _versions(tmp_path / "versions.yaml")) == Image(
        "registry.example/a:1", False
    )
