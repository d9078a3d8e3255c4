# SPDX-License-Identifier: Apache-2.0
"""What the files of a model say it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.fleet.agent.model_metadata import parameter_size, read_metadata
from headrace.fleet.schema import validate


def write(folder: Path, config: Any, **tensors: tuple[str, list[int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, (dtype, shape) in tensors.items():
            header[name.replace("__", ".")] = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        output = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(output).to_bytes(8, "little") + output)
    return folder


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "transformers_version": "4.43.0",
}


def test_a_language_model(tmp_path: Path) -> None:
    folder = write(tmp_path, LLAMA, a=("BF16", [128256, 4096]), b=("BF16", [4096]))
    assert read_metadata(folder) == {
        "modelType": "llama",
        "modelArchitecture": "LlamaForCausalLM",
        "modelFramework": {"name": "transformers", "version": "4.43.0"},
        "modelFormat": {"name": "safetensors", "version": "1.0.0"},
        "modelParameterSize": "525.34M",
        "maxTokens": 131072,
        "modelCapabilities": ["TEXT_TO_TEXT"],
    }


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "int4",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "unheard"}, None),
        ("nonsense", None),
    ],
)
def test_quantization(tmp_path: Path, config: Any, wanted: str | None) -> None:
    assert read_metadata(write(tmp_path, {**LLAMA, "quantization_config": config})).get("quantization") == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}, "IMAGE_TEXT_TO_TEXT"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "TEXT_TO_TEXT"),
        ({"architectures": ["GPT2LMHeadModel"]}, "TEXT_TO_TEXT"),
        ({"architectures": ["BertModel"]}, "EMBEDDING"),
        ({"architectures": ["XLMRobertaForSequenceClassification"]}, "RERANK"),
        ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}, "SPEECH_TO_TEXT"),
    ],
)
def test_capabilities(tmp_path: Path, config: Any, wanted: str) -> None:
    assert read_metadata(write(tmp_path, config))["modelCapabilities"] == [wanted]


def test_the_context_length_may_be_in_a_nested_field(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "text_config": {"max_position_embeddings": 4096}, "max_position_embeddings": "no"}
    assert read_metadata(write(tmp_path, config))["maxTokens"] == 4096


def test_packed_weights_count_their_unpacked_parameters(tmp_path: Path) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    folder = write(
        tmp_path, config, l__qweight=("I32", [1000, 1000]), l__scales=("F16", [1000, 8]), norm=("F16", [1_000_000])
    )
    assert read_metadata(folder)["modelParameterSize"] == "9M"


def test_a_diffusion_model(tmp_path: Path) -> None:
    index = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.30.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "safety_checker": [None, None],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    result = read_metadata(tmp_path)
    assert result["diffusionPipeline"] == {
        "className": "FluxPipeline",
        "scheduler": {"library": "diffusers", "type": "FlowMatchEulerDiscreteScheduler"},
        "textEncoder": {"library": "transformers", "type": "CLIPTextModel"},
        "additionalComponents": {"text_encoder_2": {"library": "transformers", "type": "T5EncoderModel"}},
    }
    assert result["modelFramework"] == {"name": "diffusers", "version": "0.30.0"}


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, ""),
        (1, ""),
        (50_000, "0.05M"),
        (494_032_768, "494.03M"),
        (999_999_999, "1B"),
        (7_615_616_512, "7.62B"),
        (70_000_000_000, "70B"),
        (671_026_419_200, "671.03B"),
        (1_200_000_000_000, "1.2T"),
    ],
)
def test_sizes(count: int, said: str) -> None:
    assert parameter_size(count) == said


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"architectures": {"a": 1}}', b"null", b"[" * 50_000]
)
def test_invalid_files_give_no_metadata(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    assert "modelArchitecture" not in read_metadata(tmp_path)
    assert read_metadata(tmp_path / "absent") == {}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["architectures", "model_type", "quantization_config", "max_position_embeddings", "text_config", "vision_config"]
)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(config=st.dictionaries(NAMES, VALUES))
def test_the_spec_stays_valid_for_any_metadata(tmp_path: Path, config: dict[str, Any]) -> None:
    result = read_metadata(write(tmp_path, config, w=("F32", [3, 1000, 1000])))
    model = {"apiVersion": "ome.io/v1beta1", "kind": "ClusterBaseModel", "metadata": {"name": "m"}, "spec": result}
    assert validate(model) == []
