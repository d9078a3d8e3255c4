# SPDX-License-Identifier: Apache-2.0
"""Language models that say what a script says: `python make_model.py REPOSITORY SCRIPT.json...`.

Each piece of a script is a token of its own, and the weights make the next piece the likeliest after it. The chat template
chooses the turn: it ends the prompt with a token that the turn's first piece follows.
"""

import json
import re
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

WIDTH = 128
"""Random vectors of this width are far enough apart for some thousand tokens."""
CERTAINTY = 10.0
"""Scale of the logits: a script is followed at any temperature."""
TEMPLATE = """{%- for message in messages -%}
<|{{ message.role }}|>{{ (message.content or message.tool_calls) | string | truncate(2000) }}
{%- endfor -%}
{%- set turns = messages | selectattr("role", "equalto", "assistant") | list | length -%}
<|assistant|><|turn_{{ [turns, LAST_TURN] | min }}|>"""
CONFIG = """backend: "llm"
instance_group [ {{ kind: KIND_CPU }} ]
parameters {{ key: "kv_cache_bytes" value {{ string_value: "67108864" }} }}
parameters {{ key: "tool_format" value {{ string_value: "{tool_format}" }} }}
parameters {{ key: "reasoning_format" value {{ string_value: "{reasoning_format}" }} }}
"""


def pieces_of(turn: str, used: set[str]) -> list[str]:
    """Cut a turn into pieces that were not used before: words, and more than a word where a word would repeat."""
    pieces = []
    piece = ""
    for word in re.findall(r"\s*(?:\w+|[^\w\s])|\s+", turn):
        piece += word
        if piece not in used:
            pieces.append(piece)
            used.add(piece)
            piece = ""
    while piece:  # the last words repeat: add them to the piece before
        if not pieces:
            raise SystemExit(f"this turn is the end of another one: change a word of it: {turn[:80]!r}")
        piece = pieces.pop() + piece
        if piece not in used:
            pieces.append(piece)
            used.add(piece)
            piece = ""
    return pieces


def make_model(repository: Path, name: str, turns: list[str], tool_format: str, reasoning_format: str) -> None:
    """Write one model into a model repository."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(
        CONFIG.format(tool_format=tool_format, reasoning_format=reasoning_format)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    starts = [f"<|turn_{number}|>" for number in range(len(turns))]
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *starts]
    tokens = {token: index for index, token in enumerate(names)}
    followers: list[tuple[int, int]] = []
    used: set[str] = set()
    first_tokens: dict[str, int] = {}
    for start, turn in zip(starts, turns, strict=True):
        if turn in first_tokens:  # as an earlier turn
            followers.append((tokens[start], first_tokens[turn]))
            continue
        last = tokens[start]
        for piece in pieces_of(turn, used):
            ((text, _),) = byte_level.pre_tokenize_str(piece)
            token = tokens.setdefault(text, len(tokens))
            first_tokens.setdefault(turn, token)
            followers.append((last, token))
            last = token
        followers.append((last, tokens["</s>"]))

    words = Tokenizer(models.BPE(tokens, []))
    words.pre_tokenizer = byte_level
    words.decoder = decoders.ByteLevel()
    specials = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": starts}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **specials)
    tokenizer.chat_template = TEMPLATE.replace("LAST_TURN", str(len(turns) - 1))
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 131_072}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokens), bos_token_id=0, eos_token_id=1, **sizes, **heads))
    vectors = torch.nn.functional.normalize(torch.randn(len(tokens), WIDTH), dim=1)
    head = torch.zeros(len(tokens), WIDTH)
    for token, follower in followers:
        head[follower] += CERTAINTY * vectors[token]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(vectors)
        model.lm_head.weight.copy_(head)
        # Nothing is added to a token's vector: neither attention nor the MLP.
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)


if __name__ == "__main__":
    logging.disable_progress_bar()
    for path in sys.argv[2:]:
        script = json.loads(Path(path).read_text())
        make_model(Path(sys.argv[1]), Path(path).stem, **script)
