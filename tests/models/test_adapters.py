# SPDX-License-Identifier: Apache-2.0
"""Where adapters are found: a client's name never leaves the folder, and only allowed repositories of the Hub are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.models.adapters import CONFIG, AdapterCatalog, AdapterPlaces, ModelAdapters, adapter_places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Adapters `good` and `more/deep`, `empty` without a configuration, and `outside` beside the folder."""
    for name in ("adapters/good", "adapters/more/deep", "outside", "adapters/.hidden", "adapters/no name"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / CONFIG).write_text("{}")
    (tmp_path / "adapters" / "empty").mkdir()
    (tmp_path / "adapters" / "file").write_text("")
    return tmp_path / "adapters"


def of(folder: Path | None, *hub: str) -> ModelAdapters:
    return ModelAdapters("llama", AdapterPlaces(folder, hub))


def test_adapters_are_subfolders_with_a_configuration(folder: Path) -> None:
    adapters = of(folder)
    assert adapters.names() == ["good"]
    found = adapters.find("good")
    assert found is not None and (found.name, found.folder, found.hub) == ("good", folder / "good", "")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../outside", "good/../../outside", "/outside", "more/deep", ".hidden", "empty", "file", "no name",
     "good\0", "go*", "a" * 256, "good/", "~", "\udc80"],
)  # fmt: skip
def test_other_names_are_none(folder: Path, name: str) -> None:
    assert of(folder).find(name) is None
    assert of(None).find(name) is None
    assert of(folder / "nowhere").find("good") is None


@given(st.text(alphabet="./\\~ago0*?[]\0-_", max_size=12))
def test_no_name_leaves_the_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "property" / "adapters"
    for path in (folder, folder / "a", folder.parent, folder.parent / "g", folder / "a" / "o"):
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG).write_text("{}")
    found = of(folder, "ag/*").find(name)
    if found is not None and found.folder is not None:
        assert found.folder.resolve() == folder / "a"
    elif found is not None:
        assert found.hub == name and name.startswith("ag/") and ".." not in name


def test_only_allowed_repositories_are_found() -> None:
    adapters = of(None, "org/one", "team/*@v2", "org/a?c")
    assert adapters.names() == ["org/one"]
    found = {name: adapters.find(name) for name in ("org/one", "team/x", "org/abc")}
    assert {name: source and source.hub for name, source in found.items()} == {
        "org/one": "org/one",
        "team/x": "team/x@v2",
        "org/abc": "org/abc",
    }
    for name in (
        "org/two",
        "team",
        "team/",
        "other/x",
        "team/x/y",
        "team/../x",
        "team/x@v1",
        "team/a--b",
        "TEAM/x",
        "team/..",
    ):
        assert adapters.find(name) is None, name


@pytest.mark.parametrize(
    "entry", ["*", "*/*", "*/x", "org", "org/", "/x", "org/x/y", "org/x@", "org/x@..", "a b/c", "[o]rg/x"]
)
def test_entries_that_would_allow_too_much(entry: str) -> None:
    with pytest.raises(InvalidArgument):
        adapter_places({"adapters_hub": f"good/one,{entry}"}, Path("/models/llama/1"))


def test_paths_are_relative_to_the_folder_of_the_version() -> None:
    given_ = {"adapters_folder": "../adapters", "adapters_hub": " org/one , team/* "}
    places = adapter_places(given_, Path("/models/llama/1"))
    assert places == AdapterPlaces(Path("/models/llama/1/../adapters"), ("org/one", "team/*"))
    assert adapter_places({}, Path("/models/llama/1")) == AdapterPlaces()


def test_an_operator_names_a_folder_below_or_an_allowed_repository(folder: Path) -> None:
    adapters = of(folder, "org/*")
    assert adapters.source("mine", "more/deep").folder == folder / "more" / "deep"
    assert adapters.source("mine", str(folder / "good")).folder == folder / "good"
    assert adapters.source("mine", "org/x").hub == "org/x"
    assert adapters.source("org/x", "good").name == "org/x"
    (folder / "link").symlink_to(folder.parent / "outside")
    for path in ("", ".", "..", "../outside", str(folder.parent), "/etc", "file", "nowhere", "link", "other/x", "a\0b"):
        with pytest.raises(InvalidArgument, match="lora_path .* is neither"):
            adapters.source("mine", path)
    with pytest.raises(InvalidArgument, match="adapter name '../x' is not allowed"):
        adapters.source("../x", "good")


def test_what_was_registered_stays_when_the_model_is_loaded_again(folder: Path) -> None:
    catalog, places = AdapterCatalog(), AdapterPlaces(folder)
    adapters = catalog.open("llama", places)
    assert adapters is not None
    adapters.register(adapters.source("mine", "more/deep"))
    assert catalog.open("llama", AdapterPlaces(folder, ("org/one",))) is adapters
    assert adapters.names() == ["good", "mine", "org/one"]
    assert adapters.is_registered("mine")
    adapters.remove("mine")
    assert adapters.find("mine") is None
    assert catalog.open("llama", None) is None and catalog.of("llama") is None


def test_a_model_that_is_not_loaded_has_no_loader(folder: Path) -> None:
    with pytest.raises(FailedPrecondition, match="model 'llama' is not loaded"):
        of(folder).require_loader()
    assert issubclass(FailedPrecondition, HeadraceError)
