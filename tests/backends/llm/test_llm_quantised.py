# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: logits and greedy answers equal to those of the same weights, dequantised and served as float32."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.backends.llm.kv_transfer.page_layout import weights_fingerprint
from headrace.backends.llm.lora import load_adapters
from headrace.backends.llm.model_runner import quantized_cuda
from headrace.backends.llm.model_runner.fused_projections import fuse_projections
from headrace.backends.llm.model_runner.model_loader import check_folder, load_model, open_runner
from headrace.backends.llm.model_runner.packed_weights import PackedWeights, multiply_in_chunks, to_fp8
from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear
from headrace.backends.llm.quantization.checkpoint import bytes_after_fp8
from headrace.backends.llm.settings import LlmSettings
from headrace.core.errors import ResourceExhausted
from support.llm_models import tiny_llama, tiny_mistral
from support.llm_steps import greedy_answers
from support.quantized_checkpoints import KEPT, SCHEMES, quantize, quantized_llama

CPU = torch.device("cpu")
NEW = 12
PROMPTS = [[(7 * number + 3 * place * place) % 500 + 8 for place in range(1 + 9 * number)] for number in range(5)]
IDS = torch.tensor([PROMPTS[-1]])


def loaded(folder: Path, **more: Any) -> Any:
    settings = LlmSettings(folder, **more)
    return load_model(check_folder(settings), settings, CPU)


def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=IDS).logits[0]
    return logits


def answers(model: Any, adapter: str = "", adapters: Any = None) -> list[list[int]]:
    """Greedy tokens of all prompts, through pages and chunks."""
    runner, _ = open_runner(model, LlmSettings(Path(), page_size=8, kv_cache_bytes=1 << 22), CPU)
    if adapters is not None:
        runner.before_forward = adapters.select_rows
    found = greedy_answers(runner, PROMPTS, NEW, step_tokens=16, adapter=adapter)
    runner.close()
    return found


def weight_bytes(model: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def quantised_layers(model: Any) -> dict[str, QuantizedLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_computes_what_its_dequantised_weights_do(scheme: str, tmp_path: Path) -> None:
    quantized, plain = quantized_llama(tmp_path, scheme)
    model = loaded(quantized)
    layers = quantised_layers(model)
    assert len(layers) == 13
    assert KEPT not in layers
    torch.testing.assert_close(logits_of(model), logits_of(reference(plain)), rtol=1e-4, atol=1e-3)
    assert model.dtype is torch.float32
    checkpoint = check_folder(LlmSettings(quantized)).quantized
    assert checkpoint is not None
    # A checkpoint in the order of activations may turn out to be in the usual one.
    assert weight_bytes(model) <= checkpoint.needed_bytes(4) < 1.02 * weight_bytes(model)
    assert answers(model) == answers(loaded(plain))


@pytest.mark.parametrize("scheme", ["awq", "ct-fp8-channel"])
def test_biases_and_other_families(scheme: str, tmp_path: Path) -> None:
    quantized, plain = quantized_llama(tmp_path, scheme, make="tiny_qwen2")
    torch.testing.assert_close(logits_of(loaded(quantized)), logits_of(reference(plain)), rtol=1e-4, atol=1e-3)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    quantized, plain = quantized_llama(tmp_path, "gptq", tie_word_embeddings=True)
    model = loaded(quantized)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    torch.testing.assert_close(logits_of(model), logits_of(reference(plain)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scheme", ["awq", "ct-fp8-channel"])
def test_a_vision_language_model_whose_checkpoint_has_other_names(scheme: str, tmp_path: Path) -> None:
    sight = {"depth": 1, "num_heads": 4, "patch_size": 4, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {"vocab_size": 512, "num_hidden_layers": 1, "rope_parameters": rope, **sizes}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=sight)
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    for folder in (quantized, plain):
        transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    quantize(quantized, plain, SCHEMES[scheme])
    model = loaded(quantized)
    assert min(quantised_layers(model)) == "model.language_model.layers.0.mlp.down_proj"
    with (quantized / "model.safetensors").open("rb") as file:
        assert b'"model.layers.0.mlp.down_proj.' in file.read(1 << 16), "the checkpoint has the model's own names"
    torch.testing.assert_close(logits_of(model), logits_of(loaded(plain)), rtol=1e-4, atol=1e-4)
    made = quantised_layers(loaded(plain, quantization="fp8"))
    assert len(made) == 7
    assert all(".language_model." in name for name in made)


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-tensor"])
@pytest.mark.filterwarnings("ignore")  # of transformers, which has no FP8 product without a GPU
def test_transformers_reads_the_same_from_fp8_checkpoints(scheme: str, tmp_path: Path) -> None:
    """transformers has a reader of its own for this format, and dequantises when it loads."""
    quantized, _ = quantized_llama(tmp_path, scheme)
    torch.testing.assert_close(logits_of(loaded(quantized)), logits_of(reference(quantized)), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on CPUs without such numbers
@pytest.mark.parametrize("scheme", ["awq", "ct-fp8-block"])
def test_16_bits(scheme: str, tmp_path: Path) -> None:
    quantized, plain = quantized_llama(tmp_path, scheme)
    model = loaded(quantized, dtype="bfloat16")
    assert model.dtype is torch.bfloat16
    expected = logits_of(loaded(plain, dtype="bfloat16")).float()
    assert torch.cosine_similarity(logits_of(model).float(), expected, dim=-1).min() > 0.99


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("make", [tiny_llama, tiny_mistral])
def test_fp8_made_at_load_is_near_bfloat16(make: Any, tmp_path: Path) -> None:
    """Random weights are the worst case; those of trained models lose less."""
    folder = make(tmp_path / "model", initializer_range=0.05)
    plain, quantized = loaded(folder, dtype="bfloat16"), loaded(folder, quantization="fp8")
    assert len(quantised_layers(quantized)) == 14
    assert type(quantized.lm_head) is torch.nn.Linear
    assert weight_bytes(quantized) == bytes_after_fp8(folder, 4) + 4 * sum(
        layer.out_features for layer in quantised_layers(quantized).values()
    )
    expected, found = logits_of(plain).float(), logits_of(quantized)
    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.99
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence < 0.01
    # Of the same weights, dequantised, it is exact.
    exact = reference(folder)
    for name, layer in quantised_layers(quantized).items():
        exact.get_submodule(name).weight.data = layer.weights.dequantize(0, layer.out_features)
    torch.testing.assert_close(found, logits_of(exact), rtol=1e-4, atol=1e-4)


def test_adapters_on_a_quantised_model(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    quantized, plain = quantized_llama(tmp_path / "models", "gptq-act-order")
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
        changed = get_peft_model(reference(plain), config)
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.3)
        changed.save_pretrained(tmp_path / "adapter")
    said = []
    for folder in (quantized, plain):
        model = loaded(folder)
        adapters = load_adapters(model, {"one": tmp_path / "adapter"})
        said.append((answers(model, "one", adapters), answers(model, "", adapters)))
        adapters.close()
    assert said[0] == said[1]
    assert said[0][0] != said[0][1], "the adapter changes nothing"


@pytest.mark.parametrize("scheme", ["awq", "ct-fp8-channel", "fp8-block"])
def test_projections_of_quantised_layers_are_fused(scheme: str, tmp_path: Path) -> None:
    quantized, _ = quantized_llama(tmp_path, scheme)
    model = loaded(quantized)
    ids = torch.arange(2, 11)[None]
    with torch.inference_mode():
        before = model(ids).logits
        assert fuse_projections(model) == 4
        torch.testing.assert_close(model(ids).logits, before)


def test_a_fingerprint_tells_quantised_weights_apart(tmp_path: Path) -> None:
    prints = set()
    for scheme in ("awq", "gptq", "ct-fp8-channel", "ct-fp8-tensor"):
        quantized, _ = quantized_llama(tmp_path / scheme, scheme)
        prints.add(weights_fingerprint(loaded(quantized), {}))
    assert len(prints) == 4


def test_memory_is_that_of_packed_weights(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden_size=128, intermediate_size=512)
    with pytest.raises(ResourceExhausted, match="take 0.00"):
        loaded(folder, max_weight_bytes=1_200_000)
    model = loaded(folder, max_weight_bytes=1_200_000, quantization="fp8")
    assert weight_bytes(model) < 1_200_000
    quantized, _ = quantized_llama(tmp_path / "models", "awq")
    with pytest.raises(ResourceExhausted, match="are allowed"):
        loaded(quantized, max_weight_bytes=300_000)
    loaded(quantized, max_weight_bytes=350_000)


def test_large_layers_are_dequantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 64)
    block = PackedWeights(torch.randn(70, 64).to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.1, (32, 48))
    zeros = torch.randint(0, 16, (70, 2), dtype=torch.uint8)
    integers = PackedWeights(torch.randint(0, 256, (70, 32), dtype=torch.uint8), torch.rand(70, 2), (1, 32), 4, zeros)
    for weights in (block, integers):
        whole = multiply_in_chunks(rows, weights)
        torch.testing.assert_close(whole, rows @ weights.dequantize(0, 70).T)
        monkeypatch.setattr("headrace.backends.llm.model_runner.packed_weights._CPU_CHUNK", 64 * 13)
        torch.testing.assert_close(multiply_in_chunks(rows, weights), whole)
        monkeypatch.undo()


def test_every_fp8_number_is_read_as_pytorch_reads_it() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    values = numbers[(numbers & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[None]
    weights = PackedWeights(values, torch.ones(1, 1), (1, values.shape[1]))
    assert torch.equal(weights.dequantize(0, 1), values.float())


def test_an_output_of_zeros_is_made_fp8() -> None:
    weights = to_fp8(torch.tensor([[0.0, 0.0], [1.0, -448.0]]))
    assert weights.dequantize(0, 2).tolist() == [[0.0, 0.0], [1.0, -448.0]]


def test_the_fp8_product_is_near_the_dequantised_one(cpu_operators: None) -> None:
    """The product that a GPU uses for many rows; PyTorch has it for CPUs too."""
    torch.manual_seed(0)
    weights, rows = to_fp8(torch.randn(48, 64)), torch.randn(5, 64)
    expected = multiply_in_chunks(rows, weights)
    found = quantized_cuda.fp8_product(rows, weights.values, weights.scales)
    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.995


def test_a_single_row_is_not_made_fp8(cpu_operators: None) -> None:
    torch.manual_seed(0)
    weights, rows = to_fp8(torch.randn(48, 64)), torch.randn(1, 64)
    found = quantized_cuda.fp8_product(rows, weights.values, weights.scales)
    torch.testing.assert_close(found, multiply_in_chunks(rows, weights))


def test_the_product_of_a_gpu_is_one_operator_for_the_compiler(cpu_operators: None) -> None:
    weights = PackedWeights(torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(1, 2), (32, 32))
    rows = torch.randn(3, 64)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return quantized_cuda.multiply(rows, weights.values, weights.scales, weights.zeros, weights.block)

    compiled = torch.compile(compute, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(rows), multiply_in_chunks(rows, weights))


@pytest.fixture
def cpu_operators() -> None:
    """The operators of a GPU, computed by PyTorch alone on a CPU."""
    multiply, multiply_fp8 = quantized_cuda._register()
    multiply.register_kernel("cpu")(
        lambda rows, values, scales, zeros, *block: multiply_in_chunks(
            rows, PackedWeights(values, scales, block, 8 * values.shape[1] // rows.shape[1], zeros)
        )
    )
    multiply_fp8.register_kernel("cpu")(quantized_cuda._scaled_product)
