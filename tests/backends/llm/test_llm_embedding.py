# SPDX-License-Identifier: Apache-2.0
"""Embedding models: compared with transformers, text by text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.backends.contract import Placement, SleepLevel
from headrace.backends.llm.embedding import model as computing
from headrace.backends.llm.embedding.config import model_task
from headrace.backends.llm.embedding.model import EmbeddingModel, complete_config
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unimplemented
from headrace.models.config.messages import new_config, typed_config
from headrace.models.config.types import ModelConfig
from support.llm_models import tiny_llama, tiny_tokenizer
from support.quantized_checkpoints import quantized_llama

TEXTS = [
    "a mill grinds corn",
    "the quick brown fox jumps over the lazy dog " * 4,
    "naïve café 日本語",
    "x",
    "to the sea",
]


def tiny_bert(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = BertConfig(
            vocab_size=512,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=96,
            initializer_range=0.3,
            pad_token_id=2,
        )
        BertModel(config).save_pretrained(folder)
    tiny_tokenizer(folder, chat=False)
    return folder


def sentence_steps(folder: Path, pooling: dict[str, Any], *kinds: str) -> Path:
    """What sentence-transformers writes beside the model."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for place, kind in enumerate(("Pooling", *kinds), 1):
        path = f"{place}_{kind}"
        (folder / path).mkdir(exist_ok=True)
        modules.append({"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 80, "do_lower_case": False}))
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def folder(bert: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(bert, tmp_path / "model"))


def configured(folder: Path, **parameters: str) -> ModelConfig:
    message = new_config(name="embedder", backend="llm")
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    message.MergeFrom(complete_config(typed_config(message, "llm"), folder))
    return typed_config(message, "llm")


def opened(folder: Path, **parameters: str) -> Any:
    return EmbeddingModel.load(configured(folder, **parameters), folder).open(Placement("embedder_0_cpu"))


def embedded(instance: Any, texts: list[str]) -> Any:
    rows = np.array([[text.encode()] for text in texts], object)
    return instance.compute({"text_input": rows}, ("embedding", "token_count"))


def reference(folder: Path, text: str, pooling: str, *, normalize: bool) -> Any:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0), "lasttoken": hidden[-1]}[pooling]
    return (vector / vector.norm() if normalize else vector).numpy()


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_batch_has_the_vectors_of_its_texts_alone(folder: Path, pooling: str, normalize: bool) -> None:
    flag = {"cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}.get(pooling)
    sentence_steps(folder, {flag or f"pooling_mode_{pooling}_tokens": True}, *(["Normalize"] if normalize else []))
    found = embedded(opened(folder), TEXTS)
    assert found["embedding"].dtype == np.float32
    expected = [reference(folder, text, pooling, normalize=normalize) for text in TEXTS]
    np.testing.assert_allclose(found["embedding"], expected, atol=2e-5)


def test_a_folder_of_transformers_alone_is_averaged_and_has_length_one(bert: Path) -> None:
    found = embedded(opened(bert), TEXTS)["embedding"]
    np.testing.assert_allclose(found, [reference(bert, text, "mean", normalize=True) for text in TEXTS], atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_parameters_take_precedence_over_the_folder(folder: Path) -> None:
    sentence_steps(folder, {"pooling_mode": "mean"}, "Normalize")
    found = embedded(opened(folder, pooling="max", normalize="false"), TEXTS[:1])["embedding"][0]
    np.testing.assert_allclose(found, reference(folder, TEXTS[0], "max", normalize=False), atol=2e-5)


def test_a_causal_model_embeds_by_its_last_token(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "llama")
    assert model_task(folder) == "generate"
    assert model_task(folder, "embed") == "embed"
    found = embedded(opened(folder, task="embed"), TEXTS)["embedding"]
    np.testing.assert_allclose(
        found, [reference(folder, text, "lasttoken", normalize=True) for text in TEXTS], atol=2e-5
    )


def test_texts_of_different_length_are_computed_separately_and_returned_in_order(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "_SHORT_TOKENS", 1)
    instance = opened(bert)
    shapes: list[tuple[int, ...]] = []
    instance._pipeline.model.register_forward_pre_hook(
        lambda module, given, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    found = embedded(instance, TEXTS)
    assert len(shapes) > 1
    assert sum(rows * width for rows, width in shapes) < len(TEXTS) * max(width for _, width in shapes)
    np.testing.assert_allclose(
        found["embedding"], [reference(bert, text, "mean", normalize=True) for text in TEXTS], atol=2e-5
    )
    instance.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        embedded(instance, ["a"])


def test_a_layer_behind_the_pooling(folder: Path) -> None:
    sentence_steps(folder, {"pooling_mode_mean_tokens": True}, "Dense")
    weight, bias = torch.randn(8, 32), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    told = {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "2_Dense" / "config.json").write_text(json.dumps(told))
    assert configured(folder).outputs[0].dims == (8,)
    pooled = torch.from_numpy(reference(folder, TEXTS[0], "mean", normalize=False))
    found = embedded(opened(folder), TEXTS[:1])["embedding"][0]
    np.testing.assert_allclose(found, torch.tanh(weight @ pooled + bias).numpy(), atol=2e-5)


def test_a_prompt_precedes_each_text(folder: Path) -> None:
    told = {"prompts": {"query": "the quick ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
    found = embedded(opened(folder, prompt_name="query"), ["fox"])["embedding"][0]
    np.testing.assert_allclose(found, reference(folder, "the quick fox", "mean", normalize=True), atol=2e-5)
    with pytest.raises(InvalidArgument, match="prompt_name is 'x', and the model knows query, document"):
        opened(folder, prompt_name="x")


def test_the_folder_determines_the_configuration(bert: Path) -> None:
    config = configured(bert)
    assert config.max_batch_size == 32
    assert [(spec.name, spec.dtype.name, spec.dims) for spec in config.inputs] == [("text_input", "BYTES", (1,))]
    assert [(spec.name, spec.dtype.name, spec.dims) for spec in config.outputs] == [
        ("embedding", "FP32", (32,)),
        ("token_count", "INT32", (1,)),
    ]


def test_tokens_are_counted(bert: Path) -> None:
    from transformers import AutoTokenizer

    instance = opened(bert)
    found = embedded(instance, TEXTS)["token_count"]
    assert found.dtype == np.int32
    tokenizer = AutoTokenizer.from_pretrained(bert)
    assert found.tolist() == [[len(tokenizer(text)["input_ids"])] for text in TEXTS]
    rows = np.array([[b"a mill"]], object)
    assert set(instance.compute({"text_input": rows}, ("token_count",))) == {"token_count"}


def test_a_text_that_is_too_long_is_refused_or_cut(folder: Path) -> None:
    sentence_steps(folder, {"pooling_mode_mean_tokens": True})
    text = "the sea " * 100
    with pytest.raises(InvalidArgument, match=r"has a text of \d{3} tokens, and model 'embedder' reads at most 80"):
        embedded(opened(folder), ["short", text])
    cut = opened(folder, truncate="true", max_model_len="20")
    assert embedded(cut, [text])["token_count"].tolist() == [[20]]
    with pytest.raises(InvalidArgument, match="has a text of 8000000 characters"):
        embedded(opened(folder), ["the sea " * 1_000_000])
    assert embedded(cut, ["the sea " * 1_000_000])["token_count"].tolist() == [[20]]
    with pytest.raises(InvalidArgument, match="max_model_len is 81, and the model reads at most 80"):
        opened(folder, max_model_len="81")


def test_bad_texts_are_refused(bert: Path) -> None:
    instance = opened(bert)
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        instance.compute({"text_input": np.array([[b"\xff"]], object)}, ("embedding",))
    with pytest.raises(InvalidArgument, match="without tokens"):
        embedded(instance, ["a", ""])


@pytest.mark.parametrize(
    ("key", "value"),
    [("pooling", "sum"), ("normalize", "perhaps"), ("dtype", "int8"), ("max_model_len", "-1"), ("threads", "x")],
)
def test_a_bad_parameter_is_refused_by_name(bert: Path, key: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter {key} is '{value}': use"):
        opened(bert, **{key: value})


def test_quantised_weights_are_refused_by_their_scheme(tmp_path: Path) -> None:
    quantized, plain = quantized_llama(tmp_path, "awq")
    with pytest.raises(FailedPrecondition, match=r"\(AWQ INT4, groups of 32\), which .* for generating models"):
        opened(quantized, task="embed")
    with pytest.raises(InvalidArgument, match="parameter quantization is for generating models"):
        opened(plain, task="embed", quantization="fp8")


def test_weights_that_could_run_code_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FailedPrecondition, match=r"has no \*\.safetensors"):
        opened(folder)


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    save_file({"other.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(FailedPrecondition, match="lack .* tensors of its architecture"):
        opened(folder)


@pytest.mark.parametrize(
    ("modules", "error", "text"),
    [
        ("{", FailedPrecondition, "is not JSON"),
        ("[]", FailedPrecondition, "is not a list of modules"),
        ('[{"type": "a.Pooling", "path": ""}]', Unimplemented, "a module 'Pooling'"),
        ('[{"type": "a.Transformer", "path": "../elsewhere"}]', FailedPrecondition, "outside its folder"),
        ('[{"type": "a.Transformer", "path": ""}, {"type": "a.CNN", "path": "x"}]', Unimplemented, "a module 'CNN'"),
        (
            '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "x"}]',
            FailedPrecondition,
            "is missing",
        ),
    ],
)
def test_steps_that_are_not_understood_are_refused(folder: Path, modules: str, error: Any, text: str) -> None:
    (folder / "modules.json").write_text(modules)
    with pytest.raises(error, match=text):
        opened(folder)


def test_which_folders_embed(folder: Path, tmp_path: Path) -> None:
    assert model_task(folder) == "embed"
    assert model_task(folder, "generate") == "generate"
    assert model_task(tmp_path) == "generate"
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"]}')
    assert model_task(tmp_path) == "generate"
    with pytest.raises(InvalidArgument, match="parameter task is 'think'"):
        model_task(folder, "think")


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_embeds_as_before(folder: Path, level: SleepLevel) -> None:
    sentence_steps(folder, {"pooling_mode": "mean"}, "Normalize")
    model = EmbeddingModel.load(configured(folder), folder)
    instance = model.open(Placement("embedder_0_cpu"))
    before = embedded(instance, TEXTS)["embedding"]
    freed = model.sleep(level)
    assert (freed == {}) if level == 1 else freed["host"] > 50_000
    model.wake()
    np.testing.assert_array_equal(embedded(instance, TEXTS)["embedding"], before)
    model.close()
