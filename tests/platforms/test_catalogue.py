# SPDX-License-Identifier: Apache-2.0
"""Architectures are data: ours, a user's, and what TAO's own config files change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.core.errors import InvalidArgument, NotFound
from headrace.jobs.microservice.profiles import PROFILES
from headrace.platforms.catalogue import configured, find, load


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_three_of_tao_are_there() -> None:
    catalogue = load()
    assert list(catalogue) == ["cosmos-predict2.5", "cosmos-rl", "tao-dataservices"]
    assert [architecture.image_key for architecture in catalogue.values()] == [
        "COSMOS_PREDICT2_5",
        "COSMOS_RL",
        "TAO_DATASERVICES",
    ]
    assert all(architecture.folder for architecture in catalogue.values())
    assert [architecture.media.required for architecture in catalogue.values()] == [False, True, False]


def test_fields_have_the_defaults_of_the_skill() -> None:
    defaults = {name: {field.name: field.default for field in item.fields} for name, item in load().items()}
    sampling = {"max_tokens": 1024, "top_p": 0.8, "temperature": 0.7}
    assert defaults == {
        "cosmos-rl": sampling,
        "tao-dataservices": sampling,
        "cosmos-predict2.5": {
            "max_tokens": 77,
            "guidance": 7,
            "num_steps": 35,
            "seed": 0,
            "negative_prompt": None,
        },
    }


def test_what_is_offered_is_what_our_own_services_take() -> None:
    for name, arch in load().items():
        chat = {item: parameter for parameter in PROFILES[name].chat for item in (parameter.name, *parameter.aliases)}
        for field in arch.fields:
            assert field.name in chat
            assert field.default == chat[field.name].default
        assert set(arch.media.images) == PROFILES[name].media.images
        assert set(arch.media.videos) == PROFILES[name].media.videos


def test_a_folder_adds_and_replaces(tmp_path: Path) -> None:
    _write(tmp_path, "mine.yaml", "name: my-arch\nimage: {default: registry.example/mine:1}\n")
    _write(
        tmp_path, "other.json", json.dumps({"name": "bare", "request": {"fields": {"k": {"type": "int"}}}}, indent="\t")
    )
    _write(tmp_path, "ours.yml", "name: cosmos-rl\ncommand: {program: [mine]}\n")
    _write(tmp_path, "versions.yaml", "images: {}\n")
    _write(tmp_path, "cosmos-rl.config.json", "{}")
    _write(tmp_path, "notes.txt", "no architecture")
    catalogue = load(tmp_path)
    assert sorted(catalogue) == ["bare", "cosmos-predict2.5", "cosmos-rl", "my-arch", "tao-dataservices"]
    mine = catalogue["my-arch"]
    assert (mine.image_key, mine.image_default) == ("MY_ARCH", "registry.example/mine:1")
    assert mine.program == ("my-arch-inference-microservice",)
    assert catalogue["cosmos-rl"].program == ("mine",)


def test_an_architecture_without_an_image_has_that_of_cosmos_rl(tmp_path: Path) -> None:
    _write(tmp_path, "bare.yaml", "name: bare\n")
    bare = load(tmp_path)["bare"]
    assert (bare.image_key, bare.image_default) == ("COSMOS_RL", "tao_toolkit.cosmos_rl")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: [\n", "line 2: not valid YAML"),
        ("- a\n", "line 1: the document is not a mapping"),
        ("image: {}\n", "line 1: name is missing"),
        ("name: Bad Name\n", "line 1: name is not a name of lower-case"),
        ("name: a\nimages: {}\n", "line 2: images is unknown here: use name, image"),
        ("name: a\nimage:\n  key: lower\n", "line 3: image.key is not a key of capitals"),
        ("name: a\nimage: text\n", "line 2: image is not a mapping"),
        ("name: a\nmodel_path:\n  forms: [s3]\n", "line 3: model_path.forms is not a list of hub, path, bare"),
        ("name: a\ncommand:\n\n  shape: magic\n", "line 4: command.shape is none of job, flags"),
        ("name: a\ncommand: {program: x}\n", "line 2: command.program is not a list"),
        ("name: a\ncommand:\n  options:\n    o: {flag: rm}\n", "line 4: command.options.o.flag is not a flag"),
        ('name: a\ncommand: {output_dir: "x\\ny"}\n', "line 2: command.output_dir has a control character"),
        ("name: a\nrequest:\n  fields:\n    f: {type: bool}\n", "line 4: request.fields.f.type is none of int"),
        (
            "name: a\nrequest:\n  fields:\n    f: {type: int, default: x}\n",
            "request.fields.f.default is not of the type",
        ),
        ("name: a\nrequest:\n  fields:\n    f: {least: x}\n", "line 4: request.fields.f.least is not a number"),
        ("name: a\nmedia: {required: maybe}\n", "line 2: media.required is neither"),
        ("name: a\nmedia:\n  images:\n    .png: image/png\n", "line 4: media.images..png is not an extension"),
        ("name: a\nmedia:\n  images:\n    png: text/html\n", "line 4: media.images.png is not a MIME type"),
    ],
)
def test_a_bad_file_is_reported_with_its_line_and_key(tmp_path: Path, text: str, told: str) -> None:
    path = _write(tmp_path, "bad.yaml", text)
    with pytest.raises(InvalidArgument) as caught:
        load(tmp_path)
    assert str(path) in caught.value.message
    assert told in caught.value.message


def test_two_files_of_the_same_name_and_no_folder(tmp_path: Path) -> None:
    _write(tmp_path, "a.yaml", "name: same\n")
    _write(tmp_path, "b.yaml", "name: same\n")
    with pytest.raises(InvalidArgument, match=r"a\.yaml is named same as well"):
        load(tmp_path)
    with pytest.raises(NotFound, match="is not a folder"):
        load(tmp_path / "none")


def test_an_unknown_one_is_refused_with_those_there_are() -> None:
    assert find(load(), "Cosmos-RL").name == "cosmos-rl"
    with pytest.raises(InvalidArgument, match="use one of cosmos-predict2.5, cosmos-rl, tao-dataservices"):
        find(load(), "resnet\n$(x)")


def test_a_config_file_of_tao_counts(tmp_path: Path) -> None:
    catalogue = load()
    arch = catalogue["cosmos-rl"]
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert configured(arch, [first, second], catalogue) is arch
    config = {"api_params": {"image": "TAO_DATASERVICES"}, "spec_params": {"inference": {"model_path": "parent_model"}}}
    _write(second, "cosmos-rl.config.json", json.dumps(config))
    changed = configured(arch, [first, second], catalogue)
    assert (changed.image_key, changed.image_default) == ("TAO_DATASERVICES", "tao_toolkit.data_services")
    assert arch.folder
    assert not changed.folder
    _write(first, "cosmos-rl.config.json", '{"api_params": {"image": ""}}')
    assert configured(arch, [first, second], catalogue).image_key == "COSMOS_RL"


def test_a_config_file_without_an_image_means_the_fallback_key(tmp_path: Path) -> None:
    catalogue = load()
    _write(tmp_path, "tao-dataservices.config.json", "{}")
    changed = configured(catalogue["tao-dataservices"], [tmp_path], catalogue)
    assert (changed.image_key, changed.image_default) == ("COSMOS_RL", "tao_toolkit.cosmos_rl")
    assert changed.model_path_form == "huggingface_model_or_folder"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a":\n', "line 2: not valid JSON"),
        ("[]", "the document is not an object"),
        ('{"api_params": 3}', "api_params is not an object"),
        ('{"api_params": {"image": 3}}', "api_params.image is not a string"),
        ('{"api_params": {"image": "a; rm -rf /"}}', "api_params.image is 'a; rm -rf /'"),
    ],
)
def test_a_bad_config_file_is_reported(tmp_path: Path, text: str, told: str) -> None:
    _write(tmp_path, "cosmos-rl.config.json", text)
    with pytest.raises(InvalidArgument) as caught:
        configured(load()["cosmos-rl"], [tmp_path])
    assert told in caught.value.message
