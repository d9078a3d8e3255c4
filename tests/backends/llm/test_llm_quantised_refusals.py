# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints that are refused: by their scheme's name before weights are read, and damaged ones when loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.llm.model_runner.model_loader import check_folder, load_model
from headrace.backends.llm.quantization.checkpoint import weight_scheme
from headrace.backends.llm.quantization.schemes import read_quantization
from headrace.backends.llm.settings import LlmSettings
from headrace.core.errors import FailedPrecondition
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.server import ServerSettings, build_site
from support.llm_models import tiny_llama
from support.programs import run
from support.quantized_checkpoints import (
    SCHEMES,
    Scheme,
    Tensors,
    change_weights,
    compressed,
    floats,
    integers,
    quantized_llama,
    write_config,
)
from support.serving import Serving, serving

AWQ = SCHEMES["awq"].config
GPTQ = SCHEMES["gptq"].config
PACKED = integers(4, 32)
INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def refused_before_reading(folder: Path, **more: Any) -> str:
    with pytest.raises(FailedPrecondition) as raised:
        check_folder(LlmSettings(folder, **more))
    return raised.value.message


def refused_when_loaded(folder: Path, **more: Any) -> str:
    settings = LlmSettings(folder, **more)
    checked = check_folder(settings)
    with pytest.raises(FailedPrecondition) as raised:
        load_model(checked, settings, torch.device("cpu"))
    return raised.value.message


def with_config(folder: Path, config: Any) -> Path:
    write_config(folder, Scheme(config, SCHEMES["awq"].pack))
    return folder


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' (load_in_4bit)"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "marlin", "bits": 4}, "'marlin'"),
        ({"bits": 4}, "'no quant_method'"),
        (AWQ | {"version": "gemv"}, "AWQ (version gemv)"),
        (AWQ | {"version": "marlin"}, "AWQ (version marlin)"),
        (AWQ | {"bits": 3}, "AWQ (3 bits)"),
        (AWQ | {"zero_point": False}, "AWQ (without zero points)"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ (checkpoint_format marlin)"),
        (GPTQ | {"is_marlin_format": True}, "GPTQ (checkpoint_format marlin)"),
        (GPTQ | {"bits": 2}, "GPTQ (2 bits)"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "'dynamic'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt W4A8_AWQ"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group"}), "nvfp4"),
        (compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group"}), "mxfp4"),
        (compressed("int-quantized", integers(8, -1), INT8_ACTIVATIONS), "int-quantized (int8 activations)"),
        (compressed("int-quantized", integers(8, -1)), "int-quantized (int8 weights)"),
        (compressed("pack-quantized", PACKED, INT8_ACTIVATIONS), "pack-quantized (int8 activations)"),
        (compressed("pack-quantized", integers(3, 32)), "pack-quantized (3 bits)"),
        (compressed("pack-quantized", PACKED | {"strategy": "tensor"}), "strategy tensor"),
        (compressed("float-quantized", floats("group", group_size=32)), "strategy group"),
        (compressed("marlin-24", PACKED), "marlin-24"),
        (compressed("pack-quantized", PACKED, transform_config={"config_groups": {"a": {}}}), "transform_config"),
        (compressed("pack-quantized", PACKED, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    ],
)
def test_a_scheme_that_cannot_be_computed_is_named(config: Any, named: str, tmp_path: Path) -> None:
    text = refused_before_reading(with_config(tiny_llama(tmp_path / "model"), config))
    assert named in text
    assert "choose a checkpoint with FP8 (per tensor, channel or block) of compressed-tensors" in text
    assert "openai_proxy" in text


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("awq", "quantization_config in 'model/config.json' is not an object"),
        (AWQ | {"bits": "four"}, "has no usable bits"),
        (AWQ | {"group_size": 0}, "has no usable group_size"),
        (AWQ | {"group_size": True}, "has no usable group_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "has no usable block"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "has no usable block"),
        (compressed("pack-quantized", PACKED) | {"config_groups": []}, "has no usable config_groups"),
        (compressed("pack-quantized", PACKED) | {"config_groups": {"a": 1}}, "has no usable config_groups"),
        (compressed("pack-quantized", "int4"), "has no usable weights"),  # type: ignore[arg-type]
        (compressed("pack-quantized", PACKED, "int8"), "has no usable input_activations"),
        (AWQ, "no weights beside it are quantised"),
        (SCHEMES["fp8-block"].config, "no weights beside it are quantised"),
    ],
)
def test_a_damaged_configuration_is_refused(config: Any, named: str, tmp_path: Path) -> None:
    assert named in refused_before_reading(with_config(tiny_llama(tmp_path / "model"), config))


def damaged_copies(config: Any) -> Iterator[Any]:
    """The configuration with each of its values replaced by each strange one."""
    strange = (None, True, -1, 0, 2**70, 1e400, "", "re:(", "x" * 500, [], [[]], [None, 1], {}, {"a": {}}, {"": None})
    places = config.items() if isinstance(config, dict) else enumerate(config)
    for place, value in list(places):
        inside = damaged_copies(value) if isinstance(value, dict | list) else ()
        for new in (*strange, *inside):
            copy = config.copy()
            copy[place] = new
            yield copy


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_value_of_a_configuration_breaks_its_reader(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("[]")
    count = 0
    for config in damaged_copies({"quantization_config": SCHEMES[scheme].config, "text_config": {}}):
        count += 1
        with suppress(FailedPrecondition):
            quantization = read_quantization(tmp_path, config)
            assert str(quantization)
            if quantization is not None:
                quantization.scheme_of("model.layers.0.mlp.up_proj")
    assert count >= 60


QUERY = "model.layers.0.self_attn.q_proj"


def without(last: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update() if tensors.pop(f"{QUERY}.{last}") is None else None


def replaced(last: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{QUERY}.{last}": change(tensors[f"{QUERY}.{last}"])})


def with_value(last: str, value: float, where: Any = (0, 0)) -> Callable[[Tensors], None]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[where] = value
        return tensor

    return replaced(last, change)


@pytest.mark.parametrize(
    ("scheme", "change", "named"),
    [
        ("awq", without("scales"), "no 'model.layers.0.self_attn.q_proj.scales', which AWQ INT4, groups of 32 needs"),
        ("awq", without("qzeros"), "q_proj.qzeros', which AWQ"),
        ("gptq-act-order", without("g_idx"), "q_proj.g_idx', which GPTQ"),
        ("ct-int4", without("weight_scale"), "q_proj.weight_scale', which compressed-tensors INT4"),
        ("ct-int4-asymmetric", without("weight_zero_point"), "q_proj.weight_zero_point'"),
        ("ct-fp8-channel", without("weight_scale"), "q_proj.weight_scale', which compressed-tensors FP8"),
        ("fp8-block", without("weight_scale_inv"), "q_proj.weight_scale', which Hugging Face FP8"),
        ("awq", replaced("scales", lambda tensor: tensor[:1].clone()), "has shape [1, 64]"),
        ("gptq", replaced("qzeros", lambda tensor: tensor[:, :4].clone()), "has shape [2, 4]"),
        ("ct-fp8-channel", replaced("weight_scale", lambda tensor: tensor[:5].clone()), "has shape [5, 1]"),
        ("fp8-block", replaced("weight_scale_inv", lambda tensor: tensor[:1].clone()), "needs [2, 2]"),
        ("ct-int4", replaced("weight_packed", lambda tensor: tensor.flatten()), "has shape [512]"),
        ("ct-int4", replaced("weight_packed", lambda tensor: tensor.to(torch.int16)), "has type I16"),
        ("ct-int4", replaced("weight_scale", lambda tensor: tensor.to(torch.float64)), "has type F64"),
        ("ct-fp8-channel", replaced("weight", lambda tensor: tensor.to(torch.float8_e5m2)), "type F8_E5M2"),
    ],
)
def test_missing_and_misshapen_tensors_are_found_before_weights_are_read(
    scheme: str, change: Callable[[Tensors], None], named: str, tmp_path: Path
) -> None:
    quantized, _ = quantized_llama(tmp_path, scheme)
    change_weights(quantized, change)
    assert named in refused_before_reading(quantized)


@pytest.mark.parametrize(
    ("scheme", "change", "named"),
    [
        (
            "awq",
            with_value("scales", float("nan")),
            "the scale of the quantised layer 'model.layers.0.self_attn.q_proj'",
        ),
        ("gptq", with_value("scales", float("inf")), "values that are not finite"),
        ("ct-int4", with_value("weight_scale", 0.0), "has zeros for weights that are not zero"),
        ("ct-fp8-channel", with_value("weight_scale", float("nan")), "values that are not finite"),
        ("fp8-tensor", with_value("weight_scale_inv", 0.0, ()), "has zeros for weights that are not zero"),
        ("fp8-block", with_value("weight_scale_inv", float("-inf")), "values that are not finite"),
        ("ct-fp8-channel", with_value("weight", float("nan")), "has values that are no numbers"),
        ("gptq-act-order", with_value("g_idx", 9, 0), "does not have 32 inputs in each of 2 groups"),
        ("gptq-act-order", with_value("g_idx", -1, 0), "does not have 32 inputs in each of 2 groups"),
        ("ct-int4", with_value("weight_shape", 63, 0), "the weight_shape of the quantised layer"),
    ],
)
def test_damaged_values_are_found_when_loading(
    scheme: str, change: Callable[[Tensors], None], named: str, tmp_path: Path
) -> None:
    quantized, _ = quantized_llama(tmp_path, scheme)
    change_weights(quantized, change)
    assert named in refused_when_loaded(quantized)


def test_a_scale_may_be_zero_where_all_weights_are(tmp_path: Path) -> None:
    quantized, _ = quantized_llama(tmp_path, "ct-fp8-channel")

    def change(tensors: Tensors) -> None:
        tensors[f"{QUERY}.weight"][3] = 0.0
        tensors[f"{QUERY}.weight_scale"][3] = 0.0

    change_weights(quantized, change)
    settings = LlmSettings(quantized)
    load_model(check_folder(settings), settings, torch.device("cpu"))


def test_weights_and_configuration_of_different_models(tmp_path: Path) -> None:
    awq, _ = quantized_llama(tmp_path / "awq", "awq")
    text = refused_before_reading(with_config(awq, SCHEMES["fp8-block"].config))
    assert "says Hugging Face FP8, blocks of 32x32, and 'model.layers.0.mlp.down_proj' is stored in another way" in text
    text = refused_before_reading(with_config(awq, AWQ | {"group_size": 48}))
    assert "AWQ INT4, groups of 48" in text
    assert "which are no whole groups" in text
    config = json.loads((awq / "config.json").read_text())
    del config["quantization_config"]
    (awq / "config.json").write_text(json.dumps(config))
    assert "has no quantization_config, and the weights of 'model.layers.0." in refused_before_reading(awq)

    gptq, _ = quantized_llama(tmp_path / "gptq", "gptq")
    config = json.loads((gptq / "config.json").read_text())
    (gptq / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    assert "k_proj' has 32 outputs and 64 inputs, and the model's config.json needs 64 and 64" in refused_when_loaded(
        gptq
    )
    (gptq / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    assert "has shape [512, 64] in the weights, and the model's config.json needs [500, 64]" in refused_when_loaded(
        gptq
    )
    (gptq / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert "'model.layers.1.mlp.gate_proj' is no layer in models of class LlamaForCausalLM" in refused_when_loaded(gptq)
    (gptq / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "lack 9 tensors of LlamaForCausalLM" in refused_when_loaded(gptq)


def test_quantised_experts_and_heads_that_are_tied_are_refused(tmp_path: Path) -> None:
    quantized, _ = quantized_llama(tmp_path, "ct-fp8-channel", tie_word_embeddings=True)

    def rename(tensors: Tensors) -> None:
        for last in ("weight", "weight_scale"):
            tensors[f"model.layers.0.mlp.experts.0.up_proj.{last}"] = tensors[f"{QUERY}.{last}"].clone()

    def quantise_head(tensors: Tensors) -> None:
        for last in ("weight", "weight_scale"):
            del tensors[f"model.layers.0.mlp.experts.0.up_proj.{last}"]
        tensors["lm_head.weight"] = torch.ones(512, 64).to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = torch.ones(512, 1)

    change_weights(quantized, rename)
    assert "the experts of a mixture of experts" in refused_before_reading(quantized)
    change_weights(quantized, quantise_head)
    assert "'lm_head' is quantised, and config.json ties it to the embeddings" in refused_when_loaded(quantized)


def test_fp8_is_made_of_whole_unquantised_weights(tmp_path: Path) -> None:
    quantized, plain = quantized_llama(tmp_path, "awq")
    text = refused_before_reading(quantized, quantization="fp8")
    assert "are quantised already (AWQ INT4, groups of 32): leave out parameter quantization" in text
    change_weights(plain, with_value("weight", float("nan")))
    assert "the scale of the quantised layer" in refused_when_loaded(plain, quantization="fp8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    quantized, _ = quantized_llama(tmp_path_factory.mktemp("pair"), "awq")
    for name in ("good", "gemv", "damaged"):
        (folder / name).mkdir()
        (folder / name / "1").symlink_to(quantized)
        (folder / name / "config.pbtxt").write_text(
            'backend: "llm"\ninstance_group [ { kind: KIND_CPU } ]\n'
            'parameters { key: "kv_cache_bytes" value { string_value: "8388608" } }\n'
        )
    for name in ("gemv", "damaged"):
        (folder / name / "1").unlink()
        quantized_llama(folder / name / "pair", "awq")
        (folder / name / "pair" / "quantized").rename(folder / name / "1")
    with_config(folder / "gemv" / "1", AWQ | {"version": "gemv"})
    change_weights(folder / "damaged" / "1", with_value("scales", float("nan")))
    engines: list[Engine] = []

    async def site() -> Site:
        control = RepositorySettings(mode="explicit", exit_on_error=False)
        engines.append(open_engine(EngineSettings(repositories=(folder,), repository=control, gpus=0)))
        await engines[0].start()
        address = Address.parse("127.0.0.1:0")
        return build_site(engines[0].plane, ServerSettings(http=address, grpc=address))[0]

    with serving(site) as running:
        yield running
        running.call(engines[0].close, 10)


def ask(server: Serving, path: str, document: Any) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(document))
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_over_http_a_load_is_refused_with_the_schemes_name_and_others_go_on(server: Serving) -> None:
    status, text = ask(server, "/v2/repository/models/good/load", {})
    assert status == 200, text
    for name, said in (("gemv", "AWQ (version gemv)"), ("damaged", "values that are not finite")):
        status, text = ask(server, f"/v2/repository/models/{name}/load", {})
        assert status == 409, text
        assert said in text
    status, text = ask(server, "/v2/models/good/generate", {"text_input": "the", "max_tokens": 3, "ignore_eos": True})
    assert (status, "text_output" in text) == (200, True), text
    shown = run("models", "show", "good", "--url", f"http://127.0.0.1:{server.port}")
    assert "Quantised weights: AWQ INT4, groups of 32." in shown.stdout


def test_the_scheme_in_words(tmp_path: Path) -> None:
    quantized, plain = quantized_llama(tmp_path, "ct-mixed")
    expected = "compressed-tensors FP8, per tensor or channel; compressed-tensors INT4, groups of 16"
    assert weight_scheme(quantized, "") == expected
    assert weight_scheme(plain, "") == weight_scheme(tmp_path, "") == ""
    assert weight_scheme(plain, "FP8") == "FP8, made at load, per channel"
