# SPDX-License-Identifier: Apache-2.0
"""The model runner of the first rank: tells the other ranks of each step, and computes its own share of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.backends.llm.model_runner.model_loader import make_runner, open_runner
from headrace.backends.llm.model_runner.runner import ModelRunner, RunnerLost, Sample, Step
from headrace.backends.llm.scheduler import Chunk
from headrace.backends.llm.settings import EngineSizes, LlmSettings
from headrace.backends.llm.tensor_parallel.group import RankGroup
from headrace.backends.llm.tensor_parallel.step_codec import StepEncoder


def open_parallel_runner(
    model: Any, settings: LlmSettings, group: RankGroup, device: torch.device, version: str
) -> tuple[TensorParallelRunner, EngineSizes]:
    """Return a runner over the model of the first rank and all others, and the sizes that fit all."""
    inner, sizes = open_runner(model, settings, device, version, agree=group.agree)
    try:
        return TensorParallelRunner(inner, settings, sizes, group), sizes
    except BaseException:
        inner.close()
        raise


class TensorParallelRunner(ModelRunner):
    """Implements `ModelRunner` and `engine_core.Recovery`."""

    def __init__(self, inner: ModelRunner, settings: LlmSettings, sizes: EngineSizes, group: RankGroup) -> None:
        """`inner` computes the share of the first rank."""
        super().__init__(inner.model, inner.attention, inner.cache, page_size=inner.page_size)
        self._inner = inner
        self._settings = settings
        self._sizes = sizes
        self._group = group
        self._adapters = tuple(settings.adapters)
        self._encoder = StepEncoder(self._adapters)
        self.async_scheduling = inner.async_scheduling
        group.await_ready(inner)

    def launch(self, chunks: Sequence[Chunk], *, greedy: bool, sample: Sample | None = None) -> Step:
        """See `ModelRunner`. Raises `RunnerLost`."""
        message = self._encoder.encode(chunks, greedy=greedy, sampled=sample is not None)
        self._group.send_step(message)
        try:
            self._inner.before_forward = self.before_forward
            step = self._inner.launch(chunks, greedy=greedy, sample=None if sample is None else self._shared(sample))
        except Exception as error:
            raise self._group.lose("rank 0 could not compute a step") from error
        return TensorParallelStep(step, self._group)

    def _shared(self, sample: Sample) -> Sample:
        """Return a function that samples tokens and gives them to the other ranks, which continue with them."""

        def sample_for_all(chunks: Sequence[Chunk], logits: torch.Tensor) -> torch.Tensor:
            return self._group.peers.broadcast(sample(chunks, logits).to(torch.int64).contiguous())

        return sample_for_all

    # As `engine_core.Recovery`

    def watch(self, on_lost: Callable[[RunnerLost], None]) -> None:
        """Call `on_lost`, from a thread, when the other ranks are lost."""
        self._group.watch(on_lost)

    @property
    def is_lost(self) -> bool:
        """Whether the other ranks are lost."""
        return self._group.is_lost

    def restore(self) -> None:
        """Start the other ranks again. Raises a `HeadraceError` if that fails."""
        self._encoder = StepEncoder(self._adapters)
        self._inner = self._group.restore(self._sizes, self._make_inner)

    def interrupt(self) -> None:
        """Make whatever waits for the other ranks end soon. From any thread."""
        self._group.interrupt()

    def _make_inner(self) -> ModelRunner:
        """Return a new runner for the share of the first rank: captured graphs belong to the ranks that are lost."""
        self._inner.close_graphs()
        return make_runner(self.model, self.attention, self.cache, self._settings, self._sizes)

    def close(self) -> None:
        """Free the memory of the host and the device, and end the ranks."""
        self._group.close()
        self._inner.close()
        del self._inner
        super().close()


class TensorParallelStep(Step):
    """A step that all ranks compute."""

    __slots__ = ("_finished", "_group", "_step")

    def __init__(self, step: Step, group: RankGroup) -> None:
        self.chunks = step.chunks
        self._step = step
        self._group = group
        self._finished = False

    @property
    def logits(self) -> torch.Tensor:
        """See `Step`."""
        try:
            logits = self._step.logits
            if logits.is_cuda:
                torch.cuda.current_stream(logits.device).synchronize()
        except Exception as error:
            raise self._group.lose("rank 0 could not finish a step") from error
        self._finish()
        return logits

    def tokens(self) -> list[int]:
        """See `Step`."""
        try:
            tokens = self._step.tokens()
        except Exception as error:
            raise self._group.lose("rank 0 could not finish a step") from error
        self._finish()
        return tokens

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._group.step_finished()
