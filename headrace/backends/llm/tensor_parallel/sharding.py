# SPDX-License-Identifier: Apache-2.0
"""Which part of each weight a rank has, and which models cannot be sharded. Arithmetic only.

Attention: a rank has consecutive query heads and the key-value heads that they use. With fewer key-value heads than ranks,
several ranks have the same one. MLP: a rank has a share of the intermediate values, in each expert too. Vocabulary: a rank
has consecutive tokens of the embeddings and of the head, and the last rank may have fewer. Norms and routers are whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.backends.llm.settings import MAX_RANKS
from headrace.core.errors import InvalidArgument, Unimplemented

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)
_EXPERT_SIZES = {"MixtralForCausalLM": "intermediate_size", "Qwen3MoeForCausalLM": "moe_intermediate_size"}
"""The setting with the intermediate size of an expert."""

Span = tuple[int, int]
"""The first row (or column) and the one after the last."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The shard of one rank."""

    rank: int
    degree: int
    heads: int
    """Query heads of the model, ..."""
    kv_heads: int
    """... and its key-value heads."""
    head_size: int
    intermediate: int
    expert_intermediate: int
    """Of one expert; 0 without experts."""
    vocabulary: int

    @property
    def local_heads(self) -> int:
        """Query heads of this rank."""
        return self.heads // self.degree

    @property
    def local_kv_heads(self) -> int:
        """Key-value heads of this rank."""
        return max(1, self.kv_heads // self.degree)

    @property
    def query_rows(self) -> Span:
        """Rows of the query projection; also columns of the output projection."""
        rows = self.local_heads * self.head_size
        return self.rank * rows, (self.rank + 1) * rows

    @property
    def key_rows(self) -> Span:
        """Rows of the key and value projections."""
        first = self.rank * self.kv_heads // self.degree
        return first * self.head_size, (first + self.local_kv_heads) * self.head_size

    @property
    def intermediate_rows(self) -> Span:
        """Rows of the gate and up projections; also columns of the down projection."""
        return _share(self.rank, self.intermediate, self.degree)

    @property
    def expert_rows(self) -> Span:
        """The same for an expert."""
        return _share(self.rank, self.expert_intermediate, self.degree)

    @property
    def padded_tokens(self) -> int:
        """Tokens of each rank's vocabulary; the last ones of the last rank may be padding."""
        return -(-self.vocabulary // self.degree)

    @property
    def tokens(self) -> Span:
        """Tokens of this rank's vocabulary, without padding."""
        first = min(self.rank * self.padded_tokens, self.vocabulary)
        return first, min(first + self.padded_tokens, self.vocabulary)

    def linear_rows(self, name: str) -> Span | None:
        """Return the rows of a projection that this rank has; None for all. `name`: its last part, `q_proj`."""
        if name == "q_proj":
            return self.query_rows
        if name in ("k_proj", "v_proj"):
            return self.key_rows
        if name in ("gate_proj", "up_proj"):
            return self.intermediate_rows
        return None

    def linear_columns(self, name: str) -> Span | None:
        """Return the columns of a projection that this rank has; None for all."""
        if name == "o_proj":
            return self.query_rows
        return self.intermediate_rows if name == "down_proj" else None

    def full_rows(self, name: str) -> int:
        """Return the rows of a whole projection of which this rank has some."""
        if name == "q_proj":
            return self.heads * self.head_size
        return self.kv_heads * self.head_size if name in ("k_proj", "v_proj") else self.intermediate

    def full_columns(self, name: str) -> int:
        """Return the columns of a whole projection of which this rank has some."""
        return self.heads * self.head_size if name == "o_proj" else self.intermediate


@dataclass(frozen=True, slots=True)
class Part:
    """Where a block of a rank's parameter comes from: rows and columns of a stored matrix."""

    stored: str
    """The name of the stored tensor."""
    shape: tuple[int, ...]
    """The whole stored tensor, as it must be."""
    rows: Span
    columns: Span | None = None
    """None: of a vector, or all."""
    target_row: int = 0
    """The first row of the parameter that is filled."""
    target_index: int | None = None
    """In a parameter of several matrices (experts), which one."""
    stored_index: int | None = None
    """In a stored tensor of several matrices, which one."""


def check_architecture(architecture: str) -> None:
    """Refuse a model whose layers cannot be sharded."""
    if architecture not in ARCHITECTURES:
        raise Unimplemented(
            f"parameter tensor_parallel: models of class {architecture[:64]} cannot be sharded; this server shards "
            f"{', '.join(ARCHITECTURES)}: leave the parameter out, or serve it with another engine through backend "
            "'openai_proxy'"
        )


def sharding_of(architecture: str, config: Any, rank: int, degree: int) -> Sharding:
    """Return the shard of a rank; refuse a degree that does not divide the model. `config`: of transformers."""
    check_architecture(architecture)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size_name = _EXPERT_SIZES.get(architecture)
    sharding = Sharding(
        rank=rank,
        degree=degree,
        heads=heads,
        kv_heads=kv_heads,
        head_size=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        intermediate=int(config.intermediate_size),
        expert_intermediate=int(getattr(config, size_name)) if size_name else 0,
        vocabulary=int(config.vocab_size),
    )
    sizes = {
        "attention heads (num_attention_heads)": heads,
        "values between the layers of its MLP (intermediate_size)": sharding.intermediate,
    }
    if size_name:
        sizes[f"values inside an expert ({size_name})"] = sharding.expert_intermediate
    undivided = [(size, what) for what, size in sizes.items() if size % degree]
    if not _shares_evenly(kv_heads, degree):
        undivided.append((kv_heads, "key-value heads (num_key_value_heads), and is no multiple of it either"))
    if undivided:
        raise _does_not_divide(degree, *undivided[0], _usable_degrees(sizes.values(), kv_heads))
    return sharding


def localize(config: Any, sharding: Sharding) -> None:
    """Change a configuration of transformers to the sizes of one rank's shard."""
    config.head_dim = sharding.head_size
    config.num_attention_heads = sharding.local_heads
    config.num_key_value_heads = sharding.local_kv_heads
    config.intermediate_size = sharding.intermediate // sharding.degree
    if sharding.expert_intermediate and hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = sharding.expert_intermediate // sharding.degree
    config.vocab_size = sharding.padded_tokens


_EXPERTS = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.*)\.mlp\.gate\.weight")


def parts_of(name: str, shape: Sequence[int], sharding: Sharding, stored: frozenset[str]) -> list[Part]:
    """Return where a rank's parameter comes from. `shape`: of the parameter; `stored`: names of all stored tensors."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if found := _EXPERTS.fullmatch(name):
        return _expert_parts(found[1], found[2], shape, sharding, stored)
    if (found := _ROUTER.fullmatch(name)) and name not in stored:
        name = f"{found[1]}.block_sparse_moe.gate.weight"
    if last in ("embed_tokens", "lm_head"):
        return [Part(name, (sharding.vocabulary, shape[1]), sharding.tokens)]
    if rows := sharding.linear_rows(last):
        return [Part(name, (sharding.full_rows(last), *shape[1:]), rows)]
    if kind == "weight" and (columns := sharding.linear_columns(last)):
        return [Part(name, (shape[0], sharding.full_columns(last)), (0, shape[0]), columns)]
    return [Part(name, tuple(shape), (0, shape[0]))]


def _expert_parts(
    layer: str, kind: str, shape: Sequence[int], sharding: Sharding, stored: frozenset[str]
) -> list[Part]:
    """Return the parts of all experts of a layer. They are stored as one tensor, or as one for each expert."""
    experts, size, (first, end) = shape[0], sharding.expert_intermediate, sharding.expert_rows
    hidden = shape[2] if kind == "gate_up_proj" else shape[1]
    joined = f"{layer}.mlp.experts.{kind}"
    parts = []
    for expert in range(experts):
        own = f"{layer}.mlp.experts.{expert}"
        gate, up, down = f"{own}.gate_proj.weight", f"{own}.up_proj.weight", f"{own}.down_proj.weight"
        if gate not in stored:
            own = f"{layer}.block_sparse_moe.experts.{expert}"
            gate, up, down = f"{own}.w1.weight", f"{own}.w3.weight", f"{own}.w2.weight"
        if kind == "down_proj" and joined in stored:
            parts.append(Part(joined, (experts, hidden, size), (0, hidden), (first, end), 0, expert, expert))
        elif kind == "down_proj":
            parts.append(Part(down, (hidden, size), (0, hidden), (first, end), 0, expert))
        elif joined in stored:
            whole = (experts, 2 * size, hidden)
            parts.append(Part(joined, whole, (first, end), None, 0, expert, expert))
            parts.append(Part(joined, whole, (size + first, size + end), None, end - first, expert, expert))
        else:
            parts.append(Part(gate, (size, hidden), (first, end), None, 0, expert))
            parts.append(Part(up, (size, hidden), (first, end), None, end - first, expert))
    return parts


def _share(rank: int, size: int, degree: int) -> Span:
    share = size // degree
    return rank * share, (rank + 1) * share


def _shares_evenly(kv_heads: int, degree: int) -> bool:
    """Whether each rank has as many key-value heads as the others; with fewer heads than ranks, several have the same."""
    return kv_heads % degree == 0 or degree % kv_heads == 0


def _usable_degrees(sizes: Collection[int], kv_heads: int) -> list[int]:
    """Return all numbers of ranks that divide a model, but 1."""
    degrees = range(2, min(MAX_RANKS, *sizes) + 1)
    return [each for each in degrees if not any(size % each for size in sizes) and _shares_evenly(kv_heads, each)]


def _does_not_divide(degree: int, size: int, what: str, usable: Sequence[int]) -> InvalidArgument:
    numbers = [str(each) for each in usable]
    listed = " or ".join([part for part in (", ".join(numbers[:-1]), *numbers[-1:]) if part])
    fix = f"use {listed}" if listed else "no number does, so leave it out"
    return InvalidArgument(
        f"parameter tensor_parallel is {degree}, which does not divide the model's {size} {what}: {fix}"
    )
