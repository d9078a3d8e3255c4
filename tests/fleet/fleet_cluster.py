# SPDX-License-Identifier: Apache-2.0
"""A cluster in files: the models and runtimes that the seed's examples name, as a user would keep them in a folder."""

from __future__ import annotations

from pathlib import Path

MODELS = """
apiVersion: ome.io/v1beta1
kind: ClusterBaseModel
metadata:
  name: llama-3-70b-instruct
spec:
  modelFormat: {name: safetensors, version: "1.0.0"}
  modelFramework: {name: transformers, version: "4.40.0"}
  modelArchitecture: LlamaForCausalLM
  modelParameterSize: 70.6B
  storage: {storageUri: "hf://meta-llama/Meta-Llama-3-70B-Instruct", path: /models/llama-3-70b}
---
apiVersion: ome.io/v1beta1
kind: ClusterBaseModel
metadata:
  name: deepseek-r1
spec:
  modelFormat: {name: safetensors, version: "1.0.0"}
  modelFramework: {name: transformers, version: "4.46.3"}
  modelArchitecture: DeepseekV3ForCausalLM
  quantization: fp8
  modelParameterSize: 671B
  storage: {storageUri: "hf://deepseek-ai/DeepSeek-R1", path: /models/deepseek-r1}
"""

RUNTIMES = """
apiVersion: ome.io/v1beta1
kind: ClusterServingRuntime
metadata:
  name: vllm-text-generation
spec:
  supportedModelFormats:
    - modelFormat: {name: safetensors, version: "1.0.0"}
      modelFramework: {name: transformers, version: "4.40.0"}
      modelArchitecture: LlamaForCausalLM
      autoSelect: true
      priority: 2
  modelSizeRange: {min: 60B, max: 80B}
  protocolVersions: [openAI]
  engineConfig:
    runner:
      name: ome-container
      image: vllm/vllm-openai:v0.9.0
      args: ["--model", "$(MODEL_PATH)"]
      ports: [{containerPort: 8080, name: http}]
      resources:
        requests: {nvidia.com/gpu: "4"}
        limits: {nvidia.com/gpu: "4"}
  routerConfig:
    runner:
      name: router
      image: lmsysorg/sglang-router:v0.1
      ports: [{containerPort: 8080, name: http}]
---
apiVersion: ome.io/v1beta1
kind: ClusterServingRuntime
metadata:
  name: deepseek-many-nodes
spec:
  supportedModelFormats:
    - modelFormat: {name: safetensors, version: "1.0.0"}
      modelFramework: {name: transformers, version: "4.46.3"}
      modelArchitecture: DeepseekV3ForCausalLM
      quantization: fp8
      autoSelect: true
  protocolVersions: [openAI]
  engineConfig:
    leader:
      runner:
        name: ome-container
        image: lmsysorg/sglang:v0.4
        command: [leader]
        ports: [{containerPort: 8080, name: http}]
        resources: {limits: {nvidia.com/gpu: "8"}}
    worker:
      size: 1
      runner:
        name: ome-container
        image: lmsysorg/sglang:v0.4
        command: [worker]
        resources: {limits: {nvidia.com/gpu: "8"}}
---
apiVersion: ome.io/v1beta1
kind: ClusterServingRuntime
metadata:
  name: deepseek-pairs
spec:
  supportedModelFormats:
    - modelFormat: {name: safetensors, version: "1.0.0"}
      modelFramework: {name: transformers, version: "4.46.3"}
      modelArchitecture: DeepseekV3ForCausalLM
      quantization: fp8
      autoSelect: true
      priority: 2
  protocolVersions: [openAI]
  engineConfig:
    runner:
      name: ome-container
      image: lmsysorg/sglang:v0.4
      args: [--disaggregation-mode, prefill]
      ports: [{containerPort: 8080, name: http}]
  decoderConfig:
    runner:
      name: ome-container
      image: lmsysorg/sglang:v0.4
      args: [--disaggregation-mode, decode]
      ports: [{containerPort: 8080, name: http}]
  routerConfig:
    runner:
      name: router
      image: lmsysorg/sglang-router:v0.1
      ports: [{containerPort: 8080, name: http}]
"""


def cluster_folder(folder: Path) -> Path:
    """The folder for `--with`."""
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "models.yaml").write_text(MODELS)
    (folder / "runtimes.yaml").write_text(RUNTIMES)
    return folder
