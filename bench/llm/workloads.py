# SPDX-License-Identifier: Apache-2.0
"""The workloads: closed loops of completion requests whose prompts are random token ids."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

Range = tuple[int, int]
_LOWEST_TOKEN = 300
"""Above the special tokens and bytes of most tokenizers."""


@dataclass(frozen=True)
class Workload:
    """A closed loop: each stream sends its next request when its last one is answered."""

    name: str
    description: str
    streams: int
    requests: int
    prompt: Range
    """Tokens of a prompt, evenly distributed."""
    answer: Range
    """Tokens of an answer. The end token is ignored, so answers have exactly this length."""
    shared: int = 0
    """Tokens that all prompts begin with."""
    sampled: bool = False
    """Temperature 0.8 and top_p 0.95 instead of greedy."""
    streamed: bool = True
    seed: int = 1

    def prompts(self, vocabulary: int) -> list[tuple[list[int], int]]:
        """Return prompts and the lengths of their answers: the same ones for every server."""
        source = random.Random(self.seed)

        def tokens(count: int) -> list[int]:
            return [source.randrange(min(_LOWEST_TOKEN, vocabulary // 2), vocabulary) for _ in range(count)]

        shared = tokens(self.shared)
        return [
            (shared + tokens(source.randint(*self.prompt)), source.randint(*self.answer)) for _ in range(self.requests)
        ]

    def body(self, model: str, prompt: list[int], answer: int) -> bytes:
        """Return the body of a request to `/v1/completions`."""
        body = {"model": model, "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0.0}
        if self.sampled:
            body |= {"temperature": 0.8, "top_p": 0.95}
        if self.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()

    def smaller(self) -> Workload:
        """Return a few short requests of the same kind, to try everything out."""
        answer = min(self.answer[0], 8), min(self.answer[1], 12)
        prompt = min(self.prompt[0], 16), min(self.prompt[1], 32)
        streams = min(self.streams, 4)
        return replace(
            self, streams=streams, requests=2 * streams, prompt=prompt, answer=answer, shared=self.shared and 32
        )


_MIXED = {"prompt": (32, 512), "answer": (16, 512)}
_SAMPLED = "the same, temperature 0.8, top_p 0.95"
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("one", "one stream, 128 in, 384 out", 1, 6, (128, 128), (384, 384), seed=11),
        Workload("mixed64", "64 streams, 32-512 in, 16-512 out, greedy", 64, 512, **_MIXED, seed=21),
        Workload("mixed64-sampled", _SAMPLED, 64, 512, **_MIXED, sampled=True, seed=22),
        Workload("mixed256", "256 streams, 32-512 in, 16-512 out, greedy", 256, 1536, **_MIXED, seed=31),
        Workload("mixed256-sampled", _SAMPLED, 256, 1536, **_MIXED, sampled=True, seed=32),
        Workload("mixed256-whole", "256 streams, answers not streamed", 256, 1536, **_MIXED, streamed=False, seed=33),
        Workload("long", "64 prompts of 4,096 tokens at once, 64 out", 64, 64, (4096, 4096), (64, 64), seed=42),
        Workload(
            "prefix", "256 prompts with 2,048 tokens in common, 64 out", 64, 256, (128, 128), (64, 64), 2048, seed=43
        ),
    )
}
WARM_UP = (
    Workload("warm up", "", 8, 24, (32, 512), (24, 24), seed=1),
    Workload("warm up", "", 4, 8, (64, 64), (16, 16), sampled=True, seed=2),
)
"""Before the first measurement: connections, caches and kernels."""
