# SPDX-License-Identifier: Apache-2.0
"""One model straight from a path: which version, which configuration, and what comes later."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from headrace.cli.serve_settings import open_settings
from headrace.core.dtypes import FP32
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.telemetry.progress import silent
from headrace.core.tensors import Tensor
from headrace.engine.engine import Engine, open_engine
from headrace.models.staging import Staging, model_name, staged
from headrace.programs.configuration import sections as single_models
from headrace.programs.configuration.resolution import configure
from headrace.programs.configuration.sections import single_model
from support import llm_models


class Times(torch.nn.Module):
    """x [n, k] -> [n, k]."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = torch.nn.Parameter(torch.tensor(float(factor)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.linear


def save(path: Path, factor: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(Times(factor)), str(path))
    return path


def save_onnx(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))
    return path


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    for version, factor in (("v1.0.0", 1.0), ("v1.2.0", 2.0), ("v1.10.0", 3.0)):
        save(tmp_path / "production" / version / "model.pt", factor)
    return tmp_path / "production"


def asked(path: Path, splits: dict[str, Any] | None = None, **more: str) -> Any:
    """What the environment would ask for, with its variables as keywords."""
    environment = {f"INFERENCE_{name.upper()}": text for name, text in more.items()}
    values = configure({"model-path": str(path)}, (), environment)
    single = single_model(values, splits or {})
    assert single is not None
    return single


def config_of(staging: Staging) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((staging.repository / staging.name / "config.json").read_bytes())
    return config


def linked(staging: Staging) -> dict[str, str]:
    """The folder that each version comes from."""
    folder = staging.repository / staging.name
    return {each.parent.name: os.readlink(each) for each in folder.glob("*/*") if each.is_symlink()}


def test_the_newest_of_several(versions: Path) -> None:
    with staged(asked(versions)) as staging:
        assert linked(staging) == {"3": str(versions / "v1.10.0" / "model.pt")}
        config = config_of(staging)
        assert (config["name"], config["backend"], config["max_batch_size"]) == ("production", "pytorch", 32)
        assert config["parameters"]["version_labels"]["string_value"] == "3=v1.10.0"
        assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"]] == [
            ("INPUT__0", "TYPE_FP32", [-1])
        ]
        kept = staging.repository
    assert not kept.exists()
    assert (versions / "v1.10.0" / "model.pt").is_file()


@pytest.mark.parametrize("device", ["", "cuda"])
def test_a_sharded_model_is_one_instance_on_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(single_models, "visible_gpus", lambda: 2)
    folder = llm_models.tiny_llama(tmp_path / "writer")
    more = {"model_device": device} if device else {}
    with staged(asked(folder, model_tensor_parallel="2", **more)) as staging:
        config = config_of(staging)
        assert config["parameters"]["tensor_parallel"] == {"string_value": "2"}
        assert [(group["count"], group["kind"]) for group in config["instance_group"]] == [(1, "KIND_MODEL")]
    with staged(asked(folder, model_tensor_parallel="2", model_device="cpu")) as staging:
        assert [group["kind"] for group in config_of(staging)["instance_group"]] == ["KIND_CPU"]
    with staged(asked(folder, model_tensor_parallel="1", **more)) as staging:
        assert all(group.get("kind") != "KIND_MODEL" for group in config_of(staging)["instance_group"])


@pytest.mark.parametrize("version", ["v1.2.0", "1.2.0"])
def test_a_named_version(versions: Path, version: str) -> None:
    with staged(asked(versions, model_version=version)) as staging:
        assert linked(staging) == {"2": str(versions / "v1.2.0" / "model.pt")}


def test_a_version_that_is_not_there(versions: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'v9' is not in .*: there are v1.10.0, v1.2.0, v1.0.0"):
        with staged(asked(versions, model_version="v9")):
            pass


@pytest.mark.parametrize("how", ["said", "split"])
def test_all_versions(versions: Path, how: str) -> None:
    single = (
        asked(versions, model_serve_all_versions="true") if how == "said" else asked(versions, {"production": object()})
    )
    with staged(single) as staging:
        assert set(linked(staging)) == {"1", "2", "3"}
        labels = config_of(staging)["parameters"]["version_labels"]["string_value"]
        assert labels == "1=v1.0.0,2=v1.2.0,3=v1.10.0"


def test_versions_that_are_numbers_keep_them(tmp_path: Path) -> None:
    for version in ("4", "11"):
        save(tmp_path / "m" / version / "model.pt", 1)
    with staged(asked(tmp_path / "m", model_serve_all_versions="1")) as staging:
        assert set(linked(staging)) == {"4", "11"}
        assert "version_labels" not in config_of(staging).get("parameters", {})
    save(tmp_path / "m" / "v5" / "model.pt", 1)
    with pytest.raises(InvalidArgument, match="name all by numbers, or none"):
        with staged(asked(tmp_path / "m")):
            pass


def test_a_file_and_a_folder_without_versions(tmp_path: Path) -> None:
    file = save(tmp_path / "my model.pt", 1)
    with staged(asked(file)) as staging:
        assert (staging.name, linked(staging)) == ("my_model", {"1": str(file)})
        assert "version_labels" not in config_of(staging).get("parameters", {})
    folder = save(tmp_path / "production" / "model.pt", 1).parent
    save(folder / "weights.pt", 1)  # which is not meant
    with staged(asked(folder, model_version="v1.0.0")) as staging:
        assert (staging.name, linked(staging)) == ("production", {"1": str(folder / "model.pt")})
        assert config_of(staging)["parameters"]["version_labels"]["string_value"] == "1=v1.0.0"


def test_a_folder_whose_name_is_not_a_version(versions: Path) -> None:
    save(versions / "canary" / "model.pt", 1)
    with staged(asked(versions, model_version="canary")) as staging:
        assert linked(staging) == {"1": str(versions / "canary" / "model.pt")}


def test_the_configuration_contains_that_of_the_model(versions: Path) -> None:
    single = asked(
        versions,
        model_name="scorer",
        model_device="cpu",
        model_precision="bf16",
        model_inputs='[{"name": "a", "dtype": "INT64", "shape": [3, -1]}]',
        model_outputs='[{"name": "b"}]',
        model_parameters='{"INFERENCE_MODE": false}',
        performance_max_batch_size="64",
        performance_batch_timeout_ms="50",
        performance_instances="2",
        performance_queue_timeout_ms="1000",
        performance_max_queue_size="9",
        cache_enabled="true",
    )
    with staged(single) as staging:
        config = config_of(staging)
    assert (config["name"], config["max_batch_size"]) == ("scorer", 64)
    batching = config["dynamic_batching"]
    assert int(batching["max_queue_delay_microseconds"]) == 50_000
    policy = batching["default_queue_policy"]
    assert (int(policy["default_timeout_microseconds"]), policy["max_queue_size"]) == (1_000_000, 9)
    (group,) = config["instance_group"]
    assert (group["kind"], group["count"]) == ("KIND_CPU", 2)
    assert config["response_cache"]["enable"] is True
    values = {name: value["string_value"] for name, value in config["parameters"].items()}
    assert values == {"precision": "bf16", "INFERENCE_MODE": "false", "version_labels": "3=v1.10.0"}
    assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"]] == [
        ("a", "TYPE_INT64", [3, -1])
    ]
    assert [(each["name"], each["data_type"], each["dims"]) for each in config["output"]] == [("b", "TYPE_FP32", [-1])]


def test_no_batches(versions: Path) -> None:
    with staged(asked(versions, max_batch_size="0")) as staging:
        config = config_of(staging)
        assert config["max_batch_size"] == 0 and "dynamic_batching" not in config


def test_a_self_describing_file_needs_no_options(tmp_path: Path) -> None:
    with staged(asked(save_onnx(tmp_path / "neg.onnx"))) as staging:
        config = config_of(staging)
        assert not config.get("input") and not config.get("max_batch_size")
    with pytest.raises(InvalidArgument, match="converts PyTorch models, and .* is an ONNX model"):
        with staged(asked(tmp_path / "neg.onnx", model_precision="fp16")):
            pass


def test_a_configuration_beside_the_versions_counts(versions: Path) -> None:
    (versions / "labels.txt").write_text("a\n")
    (versions / "config.pbtxt").write_text(
        'backend: "pytorch" max_batch_size: 4\n'
        'input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }\n'
        'output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }\n'
    )
    with staged(asked(versions, performance_batch_timeout_ms="2")) as staging:
        config = config_of(staging)
        assert (config["max_batch_size"], config["input"][0]["name"]) == (4, "X")
        assert int(config["dynamic_batching"]["max_queue_delay_microseconds"]) == 2000
        assert (staging.repository / staging.name / "labels.txt").read_text() == "a\n"


def test_other_formats_among_the_versions_are_left_out(versions: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_onnx(versions / "v0.1" / "model.onnx")
    (versions / "v0.2").mkdir()
    (versions / "v0.2" / "notes.md").write_text("nothing yet")
    with caplog.at_level(logging.WARNING), staged(asked(versions, model_serve_all_versions="1")) as staging:
        assert len(linked(staging)) == 3
    assert "version v0.1 is left out: it is an ONNX model" in caplog.text
    assert "version v0.2 is left out" in caplog.text


@pytest.mark.parametrize(
    ("gpus", "device", "kind"), [(2, "cuda", "KIND_GPU"), (2, "cuda:1", "KIND_GPU"), (0, "auto", "")]
)
def test_devices(versions: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, kind: str) -> None:
    monkeypatch.setattr(single_models, "visible_gpus", lambda: gpus)
    with staged(asked(versions, model_device=device)) as staging:
        (group,) = config_of(staging)["instance_group"]
    assert group.get("kind", "KIND_AUTO") == (kind or "KIND_AUTO")
    assert group.get("gpus", []) == ([1] if device == "cuda:1" else [])


@pytest.mark.parametrize(
    ("gpus", "device", "told"), [(0, "cuda", "write device: cpu"), (1, "cuda:1", "cuda:0 to cuda:0")]
)
def test_a_gpu_that_is_not_there(
    versions: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, told: str
) -> None:
    monkeypatch.setattr(single_models, "visible_gpus", lambda: gpus)
    with pytest.raises(InvalidArgument, match=told):
        asked(versions, model_device=device)


def test_mistakes_are_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"--model-path: '.*none' does not exist"):
        asked(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="INFERENCE_MODEL_NAME: '../x' is not a model name"):
        asked(tmp_path, model_name="../x")
    values = configure({"max-batch-size": "3"}, (), {})
    with pytest.raises(InvalidArgument, match="--max-batch-size: is for the model at model.path, which is not given"):
        single_model(values, {})
    file = save(tmp_path / "m.pt", 1)
    with pytest.raises(InvalidArgument, match="use BOOL, UINT8"):
        with staged(asked(file, model_inputs='[{"name": "x", "dtype": "FP31"}]')):
            pass
    assert model_name(Path("/x/..")) == "model"


def test_a_variable_without_a_path_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    values = configure({}, (), {"INFERENCE_MODEL_VERSION": "v1"})
    with caplog.at_level(logging.WARNING):
        assert single_model(values, {}) is None
    assert "INFERENCE_MODEL_VERSION is for the model at model.path" in caplog.text


@pytest.mark.parametrize(
    ("version", "everything", "preferred"), [("1.2.0", "1", "v1.2.0"), ("latest", "1", ""), ("v1.2.0", "0", "")]
)
def test_who_names_no_version_gets_the_one_that_was_named(
    versions: Path, version: str, everything: str, preferred: str
) -> None:
    environment = {"INFERENCE_MODEL_VERSION": version, "INFERENCE_MODEL_SERVE_ALL_VERSIONS": everything}
    values = configure({"model-path": str(versions)}, (), environment)
    with open_settings(values, silent) as settings:
        weights = {name: dict(split.weights) for name, split in settings.traffic.splits.items()}
    assert weights == ({"production": {preferred: 1.0}} if preferred else {})


# Later.


def test_versions_that_are_added_and_removed(versions: Path) -> None:
    with staged(asked(versions)) as staging:
        before = (staging.repository / staging.name / "config.json").stat().st_mtime_ns
        staging.refresh()
        assert (staging.repository / staging.name / "config.json").stat().st_mtime_ns == before
        save(versions / "v2.0.0" / "model.pt", 5)
        staging.refresh()
        assert linked(staging) == {"4": str(versions / "v2.0.0" / "model.pt")}
        shutil.rmtree(versions / "v2.0.0")
        staging.refresh()
        assert linked(staging) == {"3": str(versions / "v1.10.0" / "model.pt")}


def test_what_is_half_copied_leaves_everything_as_it_is(versions: Path, caplog: pytest.LogCaptureFixture) -> None:
    with staged(asked(versions)) as staging, caplog.at_level(logging.WARNING):
        whole = (versions / "v1.10.0" / "model.pt").read_bytes()
        (versions / "v3").mkdir()
        (versions / "v3" / "model.pt").write_bytes(whole[: len(whole) // 2])
        for _ in range(3):
            staging.refresh()
        assert linked(staging) == {"3": str(versions / "v1.10.0" / "model.pt")}
        assert len(caplog.records) == 1 and "cut off or damaged" in caplog.text
        shutil.rmtree(versions)
        staging.refresh()
        assert set(linked(staging)) == {"3"}


async def answer(engine: Engine, *numbers: float) -> InferResponse:
    waiting: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

    def done(result: InferResponse | BaseException) -> None:
        if isinstance(result, BaseException):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)

    request = InferRequest("production", [Tensor("INPUT__0", FP32, np.array([numbers], np.float32))])
    engine.plane.infer(request, done)
    return await waiting


def test_it_is_served_and_a_new_version_takes_over(versions: Path) -> None:
    async def main() -> None:
        values = configure({"model-path": str(versions), "device": "cpu"}, (), {})
        with open_settings(values, silent) as settings:
            assert settings.predict is not None and settings.predict.model == "production"
            engine = open_engine(settings.engine)
            await engine.start()
            try:
                assert engine.control is not None and engine.plane.ready
                response = await answer(engine, 1, 2)
                assert response.outputs[0].array.tolist() == [[3, 6]]
                save(versions / "v2.0.0" / "model.pt", 7)
                while response.model_version != "4":
                    await engine.control.poll_once()
                    await engine.control.settled()
                    response = await answer(engine, 1, 2)
                assert response.outputs[0].array.tolist() == [[7, 14]]
            finally:
                await engine.close(5)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["none", "explicit"])
def test_other_modes_serve_it_too(versions: Path, mode: str) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"model-path": str(versions), "device": "cpu", "model-control-mode": mode}
        with open_settings(configure(options, (), {}), silent) as settings:
            engine = open_engine(settings.engine)
            await engine.start()
            try:
                response = await answer(engine, 1)
                assert response.outputs[0].array.tolist() == [[3]]
            finally:
                await engine.close(5)

    asyncio.run(main())


def test_errors_are_ours(tmp_path: Path) -> None:
    looks: list[Callable[[], Any]] = [
        lambda: (tmp_path / "m.pt").write_bytes(b""),
        lambda: (tmp_path / "m.pt").write_bytes(b"PK\x03\x04" + b"\0" * 100),
        lambda: (tmp_path / "m.pt").write_bytes(os.urandom(1000)),
    ]
    for make in looks:
        make()
        with pytest.raises(HeadraceError), staged(asked(tmp_path / "m.pt")):
            pass
