# SPDX-License-Identifier: Apache-2.0
"""Which file of a training job is its model."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_stub import StoreStub

from headrace.core.errors import InvalidArgument, NotFound
from headrace.jobs.checkpoints import CheckpointChoice, choose, find_local, find_stored
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectLocation

EPOCHS = ["train/model_epoch_000.pth", "train/model_epoch_009.pth", "train/model_epoch_010.pth", "status.json"]
COSMOS = ["config.toml", "step_50/safetensors/model.safetensors", "step_100/safetensors/model.safetensors"]


@pytest.mark.parametrize(
    ("names", "choice", "chosen"),
    [
        (EPOCHS, CheckpointChoice(method="latest_model"), EPOCHS[2]),
        (EPOCHS, CheckpointChoice(method="best_model", epoch=9), EPOCHS[1]),
        (EPOCHS, CheckpointChoice(), EPOCHS[0]),
        (EPOCHS, CheckpointChoice(method="from_epoch_number", epoch=10), EPOCHS[2]),
        (EPOCHS, CheckpointChoice(method="from_epoch_number", epoch=77), EPOCHS[2]),
        (["m_009_step_500.pth", "m_010_step_550.pth"], CheckpointChoice(epoch=9), "m_009_step_500.pth"),
        (["m_009_step_500.pth", "m_010_step_550.pth"], CheckpointChoice(method="latest_model"), "m_010_step_550.pth"),
        (["m_100.tlt", "m_9.tlt"], CheckpointChoice(method="latest_model"), "m_100.tlt"),
        (["lightning_logs/x_999.pth", "y_001.pth"], CheckpointChoice(method="latest_model"), "y_001.pth"),
        (["weights.hdf5"], CheckpointChoice(), "weights.hdf5"),
        (COSMOS, CheckpointChoice("cosmos-rl"), "step_100/safetensors"),
        (
            [*COSMOS, "step_100/merged/model.safetensors"],
            CheckpointChoice("cosmos-rl", "latest_model"),
            "step_100/merged",
        ),
        (["config.json", "model.safetensors"], CheckpointChoice("cosmos-rl"), ""),
        (["a_b/x.safetensors", "c/y.safetensors"], CheckpointChoice("vila", vila_modes="a_b"), "a_b"),
        (["model.onnx", "labels.txt"], CheckpointChoice(), ""),
        (["m_001.onnx", "m_002.onnx"], CheckpointChoice(method="latest_model"), "m_002.onnx"),
        (["config.pbtxt", "1/model.onnx"], CheckpointChoice(), ""),
        (["1/model.onnx"], CheckpointChoice(), ""),
        (["out/model.onnx", "log.txt"], CheckpointChoice(), "out"),
        (["config.json", "model.safetensors", "tokenizer.json"], CheckpointChoice("tao-dataservices"), ""),
        (["notes.txt", "lightning_logs/x.pth"], CheckpointChoice(), None),
        ([], CheckpointChoice(), None),
    ],
)
def test_choice(names: list[str], choice: CheckpointChoice, chosen: str | None) -> None:
    assert choose(names, choice) == chosen
    assert choose(list(reversed(names)), choice) == chosen


def test_the_checkpoint_of_an_experiment() -> None:
    claims = {"checkpoint_choose_method": "from_epoch_number", "checkpoint_epoch_number": {"from_epoch_number_J": 3}}
    assert CheckpointChoice.of("Vila", "J", claims, {"vision_mode": "v", "llm_mode": "l"}) == CheckpointChoice(
        "vila", claims["checkpoint_choose_method"], 3, "v_l"
    )  # type: ignore[arg-type]
    assert CheckpointChoice.of("x", "other", claims, {}).epoch == 0
    for bad in ({"checkpoint_choose_method": "x"}, {"checkpoint_epoch_number": {"best_model_J": "../x"}}):
        with pytest.raises(InvalidArgument):
            CheckpointChoice.of("x", "J", bad, {})


def test_on_this_machine(tmp_path: Path) -> None:
    for name in EPOCHS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_local(tmp_path, CheckpointChoice(method="latest_model")) == str(tmp_path / EPOCHS[2])
    assert find_local(tmp_path / EPOCHS[0], CheckpointChoice()) == str(tmp_path / EPOCHS[0])
    with pytest.raises(NotFound):
        find_local(tmp_path / "nowhere", CheckpointChoice())


def test_in_a_bucket() -> None:
    objects = {f"results/J/{name}": b"x" for name in EPOCHS} | {"results/J2/model_epoch_099.pth": b"x"}
    with StoreStub({"bkt": objects}) as store:
        credentials = CloudCredentials.from_metadata(store.metadata("bkt"))
        place = ObjectLocation("aws", "bkt", "results/J")
        result = find_stored(place, "aws", credentials, CheckpointChoice(method="latest_model"))
        assert result == f"aws://bkt/results/J/{EPOCHS[2]}"
        whole = ObjectLocation("aws", "bkt", "results/J2/model_epoch_099.pth")
        assert find_stored(whole, "aws", credentials, CheckpointChoice()) == "aws://bkt/results/J2/model_epoch_099.pth"
        with pytest.raises(NotFound):
            find_stored(ObjectLocation("aws", "bkt", "results/none"), "aws", credentials, CheckpointChoice())
