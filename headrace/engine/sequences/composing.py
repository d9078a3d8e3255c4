# SPDX-License-Identifier: Apache-2.0
"""Turns a caller's request into the one the model sees: with control inputs and state. Called by the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.backends.contract import Array
from headrace.core.messages import InferRequest, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.engine.sequences.controls import Controls
from headrace.engine.sequences.flags import SequenceId
from headrace.engine.sequences.live import LiveSequence, Step
from headrace.engine.sequences.states import States, zeros
from headrace.models.config.types import ModelConfig, SequenceBatching


class Composer:
    """For one model."""

    def __init__(self, config: ModelConfig, sequences: SequenceBatching, initial: Mapping[str, Array]) -> None:
        batched = config.max_batch_size > 0
        self._controls = Controls(sequences.controls, config.name, batched=batched)
        self.states = States(sequences.states, initial, batched=batched)

    def begin(self, id: SequenceId) -> LiveSequence:
        """A new sequence; raises for an id that the model cannot be told."""
        return LiveSequence(id, self._controls.corrid(id), self.states.fresh())

    def complete(self, step: Step) -> None:
        """Give a step's request the inputs that its caller did not send."""
        sequence, flags = step.sequence, step.flags
        if sequence is None or flags is None:
            return
        inputs = [*step.request.inputs, *self._controls.of(start=flags.start, end=flags.end)]
        if sequence.corrid is not None:
            inputs.append(sequence.corrid)
        inputs += self.states.tensors(sequence.state)
        step.request = self._request(step.request, inputs)

    def filler(self, like: Step, now_ns: int) -> Step:
        """A row for a slot without a request: of the shapes of a batch's other rows, and all zeros."""
        made = {tensor.name for tensor in self._controls.filler}
        inputs = [
            Tensor(tensor.name, tensor.dtype, zeros(tensor.dtype, tensor.shape))
            for tensor in like.request.inputs
            if tensor.name not in made
        ]
        outputs = like.asked.request.outputs if like.asked is not None else ()
        request = InferRequest(like.request.model_name, [*inputs, *self._controls.filler], outputs=outputs)
        return Step(like.owner, request, like.key, now_ns, like.told)

    def _request(self, request: InferRequest, inputs: list[Tensor]) -> InferRequest:
        outputs = request.outputs
        if outputs and self.states.output_names:
            asked = {output.name for output in outputs}
            outputs = [
                *outputs,
                *(RequestedOutput(name) for name in self.states.output_names if name not in asked),
            ]
        return InferRequest(request.model_name, inputs, request.model_version, request.id, outputs, request.parameters)
