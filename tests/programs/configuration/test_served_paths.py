# SPDX-License-Identifier: Apache-2.0
"""What `headrace serve` takes: repositories, model files, folders of one model, and models of the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import urlopen

import pytest

from headrace.cli.serve_settings import open_settings
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.progress import silent
from headrace.models.staging import SingleModel, is_single_model
from headrace.models.storage.locations import HubLocation
from headrace.programs.configuration.resolution import configure
from headrace.programs.configuration.sections import single_models
from support.servers import serve_in_thread

FUNCTION = "import numpy as np\n\ndef predict(x: np.ndarray) -> np.ndarray:\n    return x\n"


def put(path: Path, content: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def hub_folder(path: Path) -> Path:
    put(path / "config.json", json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    put(path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    "files",
    [
        ["model.onnx"],
        ["model.py"],
        ["saved_model.pb"],
        ["1/model.onnx"],
        ["3/model.py", "4/model.py"],
        ["config.pbtxt", "1/weights.bin"],
    ],
)
def test_a_folder_of_one_model(tmp_path: Path, files: list[str]) -> None:
    for file in files:
        put(tmp_path / "m" / file, "backend: 'python'" if file.endswith("pbtxt") else "x")
    assert is_single_model(tmp_path / "m")


@pytest.mark.parametrize(
    "files", [[], ["a/1/model.onnx"], ["1/1/model.onnx"], ["a/config.pbtxt", "b/1/model.py"], ["README.md"]]
)
def test_a_repository(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "models").mkdir()
    for file in files:
        put(tmp_path / "models" / file)
    assert not is_single_model(tmp_path / "models")


def test_hugging_face_folders_with_and_without_versions(tmp_path: Path) -> None:
    assert is_single_model(hub_folder(tmp_path / "qwen"))
    hub_folder(tmp_path / "versions" / "1")
    assert is_single_model(tmp_path / "versions")
    assert not is_single_model(tmp_path / "nothing")


def models_of(*paths: object, **options: str) -> list[SingleModel]:
    values = configure(
        {name.replace("_", "-"): text for name, text in options.items()}, [str(path) for path in paths], {}
    )
    downloaded: list[HubLocation] = []

    def download(location: HubLocation) -> Path:
        downloaded.append(location)
        return Path("/cache") / location.repository

    return list(single_models(values, {}, download))


def test_files_folders_and_repositories_are_served_together(tmp_path: Path) -> None:
    repository, file = tmp_path / "models", put(tmp_path / "double.py", FUNCTION)
    put(repository / "a" / "1" / "model.py", FUNCTION)
    folder = put(tmp_path / "half" / "1" / "model.py", FUNCTION).parent.parent
    values = configure({}, [str(repository), str(file), str(folder)], {})
    with open_settings(values, silent) as settings:
        repositories = settings.engine.repositories
        assert repositories[0] == str(repository)
        assert [next(Path(each).glob("[!.]*")).name for each in repositories[1:]] == ["double", "half"]
        assert settings.predict is not None and settings.predict.model == ""


def test_a_model_without_files_is_served_by_its_configuration(tmp_path: Path) -> None:
    tensor = '{ name: "X" data_type: TYPE_FP32 dims: [ 4 ] }'
    put(tmp_path / "echo" / "config.pbtxt", f'backend: "identity"\ninput {tensor}\noutput {tensor.replace("X", "Y")}')
    (tmp_path / "echo" / "1").mkdir()
    with serve_in_thread(tmp_path / "echo") as server:
        assert urlopen(f"{server.url}/v2/models/echo/ready").status == 200


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (
        "Qwen/Qwen2.5-0.5B-Instruct",
        "hf://Qwen/Qwen2.5-0.5B-Instruct",
        "hf_model://Qwen/Qwen2.5-0.5B-Instruct",
    ):
        (model,) = models_of(text)
        assert (model.name, model.path) == ("Qwen2.5-0.5B-Instruct", Path("/cache/Qwen/Qwen2.5-0.5B-Instruct"))
        assert model.fetched
    (tmp_path / "Qwen").mkdir()
    assert models_of("Qwen/Qwen2.5-0.5B-Instruct") == [], "below a folder that is here it is a path"


def test_downloaded_models_are_known_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = hub_folder(tmp_path / "cache" / "qwen"), put(tmp_path / "own.py", FUNCTION)
    monkeypatch.setattr("headrace.cli.serve_settings.fetch_location", lambda location, cache, progress: folder)
    with open_settings(configure({}, [str(file), "Qwen/qwen"], {}), silent) as settings:
        own, downloaded = settings.engine.repositories
        assert settings.engine.repository.fetched_repositories == (Path(downloaded),)
        assert [path.name for path in Path(own).glob("[!.]*")] == ["own"]


def test_several_models_need_different_names_and_no_option_for_one(tmp_path: Path) -> None:
    one, two = put(tmp_path / "a" / "m.py", FUNCTION), put(tmp_path / "b" / "m.py", FUNCTION)
    with pytest.raises(InvalidArgument, match="two models are named 'm'"):
        models_of(one, two)
    with pytest.raises(InvalidArgument, match="is for one model, and several are served"):
        models_of(one, put(tmp_path / "other.py", FUNCTION), model_name="x")
