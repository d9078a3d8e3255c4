# SPDX-License-Identifier: Apache-2.0
"""Write a Llama folder with random weights, large enough to measure a server with.

python -m bench.llm.make_model 1b /tmp/models/1b
python -m bench.llm.make_model tiny /tmp/models/tiny --device cpu
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "1b": {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""`tiny` is for a CPU."""


def main() -> None:
    """Parse the command line and write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", help="where the weights are drawn; bfloat16 unless it is cpu")
    parser.add_argument("--length", type=int, default=8192, help="of the context")
    arguments = parser.parse_args()
    write(arguments.size, arguments.folder, arguments.device, arguments.length)


def write(size: str, folder: Path, device: str, length: int = 8192) -> None:
    """Write weights, configuration and tokenizer."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**SIZES[size], max_position_embeddings=length, bos_token_id=0, eos_token_id=1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(folder)
    _tokenizer(config.vocab_size).save_pretrained(folder)


def _tokenizer(vocabulary: int) -> Any:
    """Return a byte-level tokenizer of so many tokens: the bytes, and words of letters."""
    pieces, merges = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())], []
    for left, right in _pairs():
        if len(pieces) >= vocabulary:
            break
        merges.append((left, right))
        pieces.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _pairs() -> Iterator[tuple[str, str]]:
    """Yield all pairs of a shorter piece and a letter, without end."""
    shorter = ["\u0120", *ascii_lowercase]
    while True:
        longer = []
        for left in shorter:
            for right in ascii_lowercase:
                yield left, right
                longer.append(left + right)
        shorter = longer


if __name__ == "__main__":
    main()
