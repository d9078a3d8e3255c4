# SPDX-License-Identifier: Apache-2.0
"""Which file of a training job is its model."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_stub import StoreStub

from headrace.core.errors import InvalidArgument, NotFound
from headrace.jobs.checkpoints import Choice, choose, find_local, find_stored
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectPlace

EPOCHS = ["train/model_epoch_000.pth", "train/model_epoch_009.pth", "train/model_epoch_010.pth", "status.json"]
COSMOS = ["config.toml", "step_50/safetensors/model.safetensors", "step_100/safetensors/model.safetensors"]


@pytest.mark.parametrize(
    ("names", "choice", "chosen"),
    [
        (EPOCHS, Choice(method="latest_model"), EPOCHS[2]),
        (EPOCHS, Choice(method="best_model", epoch=9), EPOCHS[1]),
        (EPOCHS, Choice(), EPOCHS[0]),
        (EPOCHS, Choice(method="from_epoch_number", epoch=10), EPOCHS[2]),
        (EPOCHS, Choice(method="from_epoch_number", epoch=77), EPOCHS[2]),
        (["m_009_step_500.pth", "m_010_step_550.pth"], Choice(epoch=9), "m_009_step_500.pth"),
        (["m_009_step_500.pth", "m_010_step_550.pth"], Choice(method="latest_model"), "m_010_step_550.pth"),
        (["m_100.tlt", "m_9.tlt"], Choice(method="latest_model"), "m_100.tlt"),
        (["lightning_logs/x_999.pth", "y_001.pth"], Choice(method="latest_model"), "y_001.pth"),
        (["weights.hdf5"], Choice(), "weights.hdf5"),
        (COSMOS, Choice("cosmos-rl"), "step_100/safetensors"),
        ([*COSMOS, "step_100/merged/model.safetensors"], Choice("cosmos-rl", "latest_model"), "step_100/merged"),
        (["config.json", "model.safetensors"], Choice("cosmos-rl"), ""),
        (["a_b/x.safetensors", "c/y.safetensors"], Choice("vila", vila_modes="a_b"), "a_b"),
        (["model.onnx", "labels.txt"], Choice(), ""),
        (["m_001.onnx", "m_002.onnx"], Choice(method="latest_model"), "m_002.onnx"),
        (["config.pbtxt", "1/model.onnx"], Choice(), ""),
        (["1/model.onnx"], Choice(), ""),
        (["out/model.onnx", "log.txt"], Choice(), "out"),
        (["config.json", "model.safetensors", "tokenizer.json"], Choice("tao-dataservices"), ""),
        (["notes.txt", "lightning_logs/x.pth"], Choice(), None),
        ([], Choice(), None),
    ],
)
def test_choice(names: list[str], choice: Choice, chosen: str | None) -> None:
    assert choose(names, choice) == chosen
    assert choose(list(reversed(names)), choice) == chosen


def test_what_an_experiment_says() -> None:
    said = {"checkpoint_choose_method": "from_epoch_number", "checkpoint_epoch_number": {"from_epoch_number_J": 3}}
    assert Choice.of("Vila", "J", said, {"vision_mode": "v", "llm_mode": "l"}) == Choice(
        "vila", said["checkpoint_choose_method"], 3, "v_l"
    )  # type: ignore[arg-type]
    assert Choice.of("x", "other", said, {}).epoch == 0
    for bad in ({"checkpoint_choose_method": "x"}, {"checkpoint_epoch_number": {"best_model_J": "../x"}}):
        with pytest.raises(InvalidArgument):
            Choice.of("x", "J", bad, {})


def test_on_this_machine(tmp_path: Path) -> None:
    for name in EPOCHS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_local(tmp_path, Choice(method="latest_model")) == str(tmp_path / EPOCHS[2])
    assert find_local(tmp_path / EPOCHS[0], Choice()) == str(tmp_path / EPOCHS[0])
    with pytest.raises(NotFound):
        find_local(tmp_path / "nowhere", Choice())


def test_in_a_bucket() -> None:
    objects = {f"results/J/{name}": b"x" for name in EPOCHS} | {"results/J2/model_epoch_099.pth": b"x"}
    with StoreStub({"bkt": objects}) as store:
        credentials = CloudCredentials.from_metadata(store.metadata("bkt"))
        place = ObjectPlace("aws", "bkt", "results/J")
        found = find_stored(place, "aws", credentials, Choice(method="latest_model"))
        assert found == f"aws://bkt/results/J/{EPOCHS[2]}"
        whole = ObjectPlace("aws", "bkt", "results/J2/model_epoch_099.pth")
        assert find_stored(whole, "aws", credentials, Choice()) == "aws://bkt/results/J2/model_epoch_099.pth"
        with pytest.raises(NotFound):
            find_stored(ObjectPlace("aws", "bkt", "results/none"), "aws", credentials, Choice())
