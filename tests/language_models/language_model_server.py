# SPDX-License-Identifier: Apache-2.0
"""A repository of tiny models that write, see and embed, and servers over it: in this process, or as a process.

Used by the fixtures of this folder and by the tests that start a server of their own.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import llm_models
from support.llm_models import tiny_llama, tiny_tokenizer
from support.model_cache import copy_of
from support.programs import Program
from support.servers import ThreadServer, serve_in_thread, serve_process

CONTEXT = 512
"""Of the model `llama`, which could do more."""
ADAPTERS = {
    "pirate": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "poet": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
}
LOAD = "/v2/repository/models/{}/load"
UNLOAD = "/v2/repository/models/{}/unload"
_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SEEING_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'text' -%}{{ item['text'] }}"
    "{%- else -%}<|vision_start|><|{{ item['type'] }}_pad|><|vision_end|>{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|end|>{%- endfor -%}<|assistant|>"
)


def make_repository(folder: Path) -> Path:
    """`llama` with two adapters, `vision` (images) and `embedder`; made once per machine and copied."""
    return copy_of(folder, _write_repository, sources=(Path(llm_models.__file__),))


def _write_repository(folder: Path) -> None:
    import torch

    with third_parties(), torch.random.fork_rng():
        tiny_llama(folder / "llama" / "1")
        _make_adapters(folder / "llama" / "1", folder / "llama" / "adapters")
        make_vision_model(folder / "vision" / "1")
        _make_embedder(folder / "embedder" / "1")
    adapters = ",".join(f"{name}=../adapters/{name}" for name in ADAPTERS)
    configure(folder / "llama", max_model_len=str(CONTEXT), adapters=adapters)
    configure(folder / "vision")
    (folder / "embedder" / "config.pbtxt").write_text('backend: "llm"\nmax_batch_size: 8\ndynamic_batching { }\n')


def configure(folder: Path, **parameters: str) -> Path:
    """A configuration for a model that generates, with little memory and one thread."""
    given = {"threads": "1", "kv_cache_bytes": str(8 << 20), **parameters}
    lines = [f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}' for name, value in given.items()]
    (folder / "config.pbtxt").write_text("\n".join(['backend: "llm"', *lines, ""]))
    return folder


def _make_adapters(base: Path, folder: Path) -> None:
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        changed = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))  # type: ignore[arg-type]
        torch.manual_seed(seed)
        for key, parameter in changed.named_parameters():
            if "lora_" in key:
                parameter.data.normal_(0, 0.3)
        changed.save_pretrained(folder / name)


def make_vision_model(folder: Path) -> None:
    """A Qwen2-VL with patches of 4 x 4."""
    import torch
    import transformers

    first = 512
    text = {
        "vocab_size": 520,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    sight = {
        "depth": 2,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=sight,
        vision_start_token_id=first,
        vision_end_token_id=first + 1,
        image_token_id=first + 2,
        video_token_id=first + 3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name and "ln_q" not in name:
            parameter.data.normal_(0, 0.15)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS)})
    tokenizer.chat_template = _SEEING_TEMPLATE
    tokenizer.save_pretrained(folder)
    transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=2048
    ).save_pretrained(folder)


def _make_embedder(folder: Path) -> None:
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=512,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=96,
        initializer_range=0.3,
        pad_token_id=2,
    )
    torch.manual_seed(3)
    transformers.BertModel(config).save_pretrained(folder)
    tiny_tokenizer(folder, chat=False)


class Server:
    """A running `headrace serve`, and plain ways to ask it."""

    def __init__(self, running: Program | ThreadServer, log: Callable[[], str]) -> None:
        self.running = running
        self._log = log

    @property
    def log(self) -> str:
        return self._log()

    @property
    def ports(self) -> list[int]:
        """Of HTTP and gRPC."""
        return self.running.ports

    @property
    def base_url(self) -> str:
        return f"{self.running.url}/v1"

    def request(self, method: str, path: str, body: bytes = b"", seconds: float = 60) -> tuple[int, bytes]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[0], timeout=seconds)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, document: Any) -> tuple[int, Any]:
        """JSON there and back."""
        status, body = self.request("POST", path, json.dumps(document).encode())
        return status, json.loads(body) if body else None

    def events(self, path: str, document: Any) -> list[Any]:
        """The events of a stream that ends well."""
        status, body = self.request("POST", path, json.dumps(document).encode())
        assert status == 200, body
        return [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]

    def metrics(self, model: str) -> dict[str, float]:
        """Numbers of a model, as `/metrics` has them."""
        _, body = self.request("GET", "/metrics")
        results = re.findall(rf'^(\w+)\{{[^}}]*model="{model}"[^}}]*\}} (\S+)$', body.decode(), re.MULTILINE)
        return {name: float(number) for name, number in results}

    def load_of(self, model: str) -> tuple[float, float, float]:
        """Pages in use (of all), sequences that are computed, requests that wait."""
        reported = self.metrics(model)
        names = ("kv_cache_usage_ratio", "sequences_running", "requests_waiting")
        used, running, waiting = (reported[f"headrace_llm_{name}"] for name in names)
        return used, running, waiting

    @property
    def memory(self) -> int:
        """Bytes of the machine's memory that the server has."""
        status = Path(f"/proc/{self.running.pid}/status").read_text()
        return int(re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024


@contextmanager
def served_in_thread(*arguments: str | Path) -> Iterator[Server]:
    """Serve in this process, which has torch and transformers already; `log` has what was logged meanwhile."""
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger().addHandler(handler)
    try:
        with serve_in_thread(*arguments, "--allow-metrics", "true") as running:
            assert "Traceback" not in logged.getvalue(), logged.getvalue()
            yield Server(running, logged.getvalue)
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def served_by_process(log: Path, *arguments: str | Path) -> Iterator[Server]:
    """Serve in a process of its own, which ends well if the test has not ended it."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with serve_process(log, *arguments, "--allow-metrics", "true", env=environment) as program:
        yield Server(program, lambda: program.log)


@contextmanager
def third_parties() -> Iterator[None]:
    """While models are made: what transformers and PEFT warn of is not about us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
