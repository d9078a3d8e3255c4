# SPDX-License-Identifier: Apache-2.0
"""Cross-encoders: compared with transformers' own classifiers, pair by pair."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.contract import Placement
from headrace.backends.llm.cross_encoder import CrossEncoderModel, complete_config
from headrace.backends.llm.embedding.config import model_task
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unimplemented
from headrace.models.config.messages import new_config, typed_config
from headrace.models.config.types import ModelConfig
from support.llm_models import tiny_encoder

CLASSIFIER = "ForSequenceClassification"
PAIRS = [
    ("what turns the mill", "the river runs to the sea"),
    ("what turns the mill", "the quick brown fox jumps over the lazy dog " * 2),
    ("x", "naïve café 日本語"),
    ("a mill grinds corn", "x"),
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("bert") / "model", "Bert", CLASSIFIER)


@pytest.fixture
def folder(bert: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(bert, tmp_path / "model"))


def configured(folder: Path, **parameters: str) -> ModelConfig:
    message = new_config(name="ranker", backend="llm")
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    message.MergeFrom(complete_config(typed_config(message, "llm"), folder))
    return typed_config(message, "llm")


def opened(folder: Path, **parameters: str) -> Any:
    return CrossEncoderModel.load(configured(folder, **parameters), folder).open(Placement("ranker_0_cpu"))


def scored(instance: Any, pairs: list[tuple[str, str]]) -> Any:
    columns = [np.array([[text.encode()] for text in column], object) for column in zip(*pairs, strict=True)]
    return instance.compute({"query": columns[0], "document": columns[1]}, ("score", "token_count"))


def expected(folder: Path, pairs: list[tuple[str, str]]) -> tuple[list[float], list[int]]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = [tokenizer(*pair, return_tensors="pt") for pair in pairs]
    with torch.inference_mode():
        return [float(model(**one).logits) for one in inputs], [one["input_ids"].shape[1] for one in inputs]


@pytest.mark.parametrize("kind", ["Bert", "XLMRoberta", "ModernBert"])
def test_a_batch_has_the_scores_of_its_pairs_alone(tmp_path: Path, kind: str) -> None:
    folder = tiny_encoder(tmp_path / "model", kind, CLASSIFIER)
    logits, counts = expected(folder, PAIRS)
    assert len(set(logits)) == len(PAIRS)
    instance = opened(folder)
    found = scored(instance, PAIRS)
    assert found["score"].shape == (4, 1)
    assert found["score"].dtype == np.float32
    assert found["score"].ravel() == pytest.approx(torch.tensor(logits).sigmoid().numpy(), abs=1e-5)
    assert found["token_count"].ravel().tolist() == counts
    for index, pair in enumerate(PAIRS):
        assert scored(instance, [pair])["score"].item() == pytest.approx(found["score"][index, 0], abs=1e-5)


@pytest.mark.parametrize(
    "members",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_the_folder_names_the_activation(folder: Path, members: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))
    assert scored(opened(folder), PAIRS)["score"].ravel() == pytest.approx(expected(folder, PAIRS)[0], abs=1e-4)
    path.write_text(path.read_text().replace("linear.Identity", "activation.Tanh"))
    with pytest.raises(Unimplemented, match="Tanh"):
        opened(folder)


def test_long_pairs_are_refused_or_truncated(folder: Path) -> None:
    long = ("what turns the mill", "the river runs " * 60)
    for document in (long[1], "x" * 10_000):
        with pytest.raises(InvalidArgument, match="at most 96"):
            scored(opened(folder), [("q", document)])
    found = scored(opened(folder, truncate="true"), [long, PAIRS[0], ("q", "x" * 10_000)])
    assert found["token_count"].ravel().tolist() == [96, expected(folder, PAIRS[:1])[1][0], 96]
    with pytest.raises(InvalidArgument, match="lower it"):
        opened(folder, max_model_len="97")


def test_the_configuration_is_completed(folder: Path) -> None:
    config = configured(folder)
    assert (config.max_batch_size, config.scheduling is not None) == (32, True)
    assert {spec.name for spec in config.inputs} == {"query", "document"}
    assert {spec.name for spec in config.outputs} == {"score", "token_count"}


def test_which_folders_rank(bert: Path, folder: Path, tmp_path: Path) -> None:
    assert model_task(bert) == "rank"
    assert model_task(bert, "embed") == "embed"
    more = tiny_encoder(tmp_path / "more", "Bert", CLASSIFIER, num_labels=3)
    assert model_task(more) == "embed"
    with pytest.raises(Unimplemented, match="3 labels"):
        opened(more)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FailedPrecondition, match=r"no \*\.safetensors"):
        CrossEncoderModel.load(configured(bert), folder)


def test_weights_without_a_head_are_refused(folder: Path, tmp_path: Path) -> None:
    bare = tiny_encoder(tmp_path / "bare", "Bert")
    shutil.copy(bare / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(FailedPrecondition, match="lack"):
        opened(folder)


def test_text_that_is_not_utf8_and_a_closed_instance(bert: Path) -> None:
    instance = opened(bert)
    raw = np.array([[b"\xff"]], object)
    with pytest.raises(InvalidArgument, match="'document'"):
        instance.compute({"query": np.array([[b"x"]], object), "document": raw}, ("score",))
    instance.close()
    with pytest.raises(FailedPrecondition):
        scored(instance, PAIRS)


def test_it_sleeps_and_scores_as_before(folder: Path) -> None:
    model = CrossEncoderModel.load(configured(folder), folder)
    instances = [model.open(Placement(f"ranker_{number}_cpu")) for number in range(2)]
    before = [scored(instance, PAIRS)["score"].tolist() for instance in instances]
    size = sum(tensor.nbytes for tensor in {id(t): t for t in instances[0]._loaded.model.parameters()}.values())
    assert model.sleep(1) == {}
    model.wake()
    assert model.sleep(2) == {"host": pytest.approx(size, rel=0.1)}
    assert not sum(tensor.nbytes for tensor in instances[0]._loaded.model.parameters())
    model.wake()
    assert [scored(instance, PAIRS)["score"].tolist() for instance in instances] == before
    model.sleep(2)
    (folder / "model.safetensors").rename(folder / "kept")
    with pytest.raises(FailedPrecondition, match=r"'model\.safetensors' of model 'ranker' has changed"):
        model.wake()
    (folder / "kept").rename(folder / "model.safetensors")
    model.wake()
    assert scored(instances[0], PAIRS)["score"].tolist() == before[0]
    model.sleep(2)
    model.close()


def test_a_batch_that_is_computed_ends_before_it_sleeps(folder: Path) -> None:
    model = CrossEncoderModel.load(configured(folder), folder)
    model.open(Placement("ranker_0_cpu"))
    with model._weights.used():
        sleeping = threading.Thread(target=model.sleep, args=(2,))
        sleeping.start()
        sleeping.join(0.2)
        assert sleeping.is_alive()
    sleeping.join(30)
    assert not sleeping.is_alive()
    model.close()
