# SPDX-License-Identifier: Apache-2.0
"""Tiny language models with random weights, as Hugging Face folders, made at test time.

folder = tiny_llama(tmp_path / "llama")                        # a LlamaForCausalLM of 64 wide, 2 layers, 512 tokens
folder = tiny_qwen2(tmp_path / "qwen2", hidden_size=32)        # any field of the model's configuration
folder = tiny_mistral(tmp_path / "m", sliding_window=8)

A folder is made once per machine (`support.model_cache`) and copied. The weights are wide (a standard deviation of 0.3), so
that greedy answers wander and a mistake of a key or a position shows.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from support.model_cache import copy_of

VOCABULARY = 512
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('unknown role ' ~ message['role']) }}"
    "{%- endif -%}"
    "<|{{ message['role'] }}|>"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- elif message['content'] -%}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}"
    "{%- for call in message.get('tool_calls') or [] -%}<tool_call>{{ call | tojson }}</tool_call>{%- endfor -%}"
    "<|end|>"
    "{%- endfor -%}"
    "{%- if tools -%}<|system|>{{ tools | tojson }}<|end|>{%- endif -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
_CORPUS = (
    "the quick brown fox jumps over the lazy dog while the river runs to the sea",
    "a headrace is the channel that brings fast water to a turbine and a mill grinds corn",
    "requests join and leave between steps; pages are shared, counted and given back",
    'json looks like {"name": "value", "list": [1, 2, 3], "true": false, "null": null}',
    "Grüße aus Köln, naïve café, 日本語のテキスト, emoji 🙂🚀 and numbers 0123456789",
)


def tiny_tokenizer(folder: Path, *, chat: bool = True) -> Any:
    """Save a byte-level BPE tokenizer of 512 tokens, with a chat template; returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in _CORPUS for _ in range(3)], trainer)
    missing = VOCABULARY - tokenizer.get_vocab_size()
    if missing > 0:
        tokenizer.add_tokens([f"filler{number}" for number in range(missing)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def tiny_llama(folder: Path, **overrides: Any) -> Path:
    """A Llama of 2 layers, 4 heads over 2 for keys and values, 64 wide, with 2,048 positions."""
    return _tiny(folder, "LlamaConfig", "LlamaForCausalLM", overrides)


def tiny_qwen2(folder: Path, **overrides: Any) -> Path:
    """A Qwen2 of the same size."""
    return _tiny(folder, "Qwen2Config", "Qwen2ForCausalLM", overrides)


def tiny_mistral(folder: Path, **overrides: Any) -> Path:
    """A Mistral of the same size, that sees the last 24 tokens only."""
    return _tiny(folder, "MistralConfig", "MistralForCausalLM", {"sliding_window": 24, **overrides})


def tiny_gemma3(folder: Path, **overrides: Any) -> Path:
    """A Gemma 3: some layers see the last 16 tokens, others everything."""
    settings = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
    return _tiny(folder, "Gemma3TextConfig", "Gemma3ForCausalLM", {**settings, **overrides})


def tiny_model(folder: Path, config: str, model: str, **overrides: Any) -> Path:
    """A model of the same size, by the names of its classes in transformers."""
    return _tiny(folder, config, model, overrides)


def tiny_qwen3(folder: Path, **overrides: Any) -> Path:
    """A Qwen3 of the same size, which normalizes queries and keys."""
    return _tiny(folder, "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, **overrides})


def tiny_mixtral(folder: Path, **overrides: Any) -> Path:
    """A Mixtral of the same size, with 4 experts, of which a token uses 2."""
    settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _tiny(folder, "MixtralConfig", "MixtralForCausalLM", {**settings, **overrides})


def tiny_qwen3_moe(folder: Path, **overrides: Any) -> Path:
    """A Qwen3-MoE: 4 experts of 32 in the first layer, of which a token uses 2; an MLP in the second."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    settings = {**experts, "mlp_only_layers": [1], "head_dim": 16}
    return _tiny(folder, "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**settings, **overrides})


def tiny_config(kind: str, **overrides: Any) -> Any:
    """The configuration of a tiny model of that class of transformers."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    return getattr(transformers, kind)(**{**settings, **overrides})


def _tiny(folder: Path, config_kind: str, model_kind: str, overrides: dict[str, Any]) -> Path:
    return copy_of(folder, _save, config_kind, model_kind, sorted(overrides.items()))


def _save(folder: Path, config_kind: str, model_kind: str, overrides: list[tuple[str, Any]]) -> None:
    import torch
    import transformers

    settings = dict(overrides)
    seed, chat = int(settings.pop("seed", 7)), bool(settings.pop("chat", True))
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = getattr(transformers, model_kind)(tiny_config(config_kind, **settings))
        model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
        model.save_pretrained(folder)
        tiny_tokenizer(folder, chat=chat)


def tiny_encoder(folder: Path, kind: str = "Bert", head: str = "Model", **overrides: Any) -> Path:
    """An encoder of 2 layers, 32 wide, with 96 positions: `tiny_encoder(folder, "ModernBert", "ForSequenceClassification")`.

    Classifiers have one label, as rerankers do. The tokenizer puts special tokens around a text and between two.
    """
    return copy_of(folder, _save_encoder, kind, head, sorted(overrides.items()))


def _save_encoder(folder: Path, kind: str, head: str, overrides: list[tuple[str, Any]]) -> None:
    import torch
    import transformers
    from tokenizers import processors

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 98 if kind == "XLMRoberta" else 96,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        **dict(overrides),
    }
    if head.startswith("For"):
        settings.setdefault("num_labels", 1)
    seed = int(settings.pop("seed", 3))
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**settings)
        getattr(transformers, f"{kind}{head}")(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer(folder, chat=False)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>",
        pair="<|bos|> $A <|eos|> $B:1 <|eos|>:1",
        special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)],
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if kind == "Bert" else [])]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        model_input_names=names,
    )
    fast.save_pretrained(folder)


def tiny_whisper(folder: Path, **overrides: Any) -> Path:
    """A Whisper of 1 layer, 32 wide, that writes at most 32 tokens for a window; it knows English and German.

    `multilingual=False` makes one for English.
    """
    return copy_of(folder, _save_whisper, sorted(overrides.items()))


def _save_whisper(folder: Path, overrides: list[tuple[str, Any]]) -> None:
    import torch
    import transformers

    settings = dict(overrides)
    multilingual = bool(settings.pop("multilingual", True))
    base = tiny_tokenizer(folder, chat=False)
    tasks = ["en", "de", "translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    names = ["endoftext", "startoftranscript", *tasks, *(f"{step * 0.02:.2f}" for step in range(1501))]
    base.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    ids = fast.get_vocab()
    end = ids["<|endoftext|>"]
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(int(settings.pop("seed", 5)))
        config = transformers.WhisperConfig(
            **{
                "vocab_size": len(ids),
                "num_mel_bins": 80,
                "d_model": 32,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "max_target_positions": 64,
                "init_std": 0.5,
                "decoder_start_token_id": ids["<|startoftranscript|>"],
                "bos_token_id": end,
                "eos_token_id": end,
                "pad_token_id": end,
                **settings,
            }
        )
        model = transformers.WhisperForConditionalGeneration(config)
        generation = transformers.GenerationConfig(
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=end,
            decoder_start_token_id=ids["<|startoftranscript|>"],
            max_length=64,
            suppress_tokens=[ids[f"<|{name}|>"] for name in ("startoftranscript", *tasks)],
            begin_suppress_tokens=[end],
        )
        generation.is_multilingual = multilingual
        generation.no_timestamps_token_id = ids["<|notimestamps|>"]
        generation.prev_sot_token_id = ids["<|startofprev|>"]
        generation.max_initial_timestamp_index = 50
        generation.return_timestamps = False
        if multilingual:
            generation.lang_to_id = {f"<|{code}|>": ids[f"<|{code}|>"] for code in ("en", "de")}
            generation.task_to_id = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
        model.generation_config = generation
        model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
