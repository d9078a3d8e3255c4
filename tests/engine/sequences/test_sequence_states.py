# SPDX-License-Identifier: Apache-2.0
"""Implicit state: real ONNX models that add up or grow, and what is kept, given out and refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from sequence_fakes import READY, Caller, model, scheduler_with_compute_runners

from headrace.backends.contract import Array, Placement
from headrace.core.dtypes import BYTES, FP32, INT32
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument, Unimplemented
from headrace.core.requests import InferRequest, RequestedOutput
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.engine.execution.runners import RequestRunner
from headrace.engine.scheduling.dynamic_batcher import FixedDelay
from headrace.engine.scheduling.pending_request import BatchLog
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.sequences.implicit_state import StatefulConcatenator, read_initial_states
from headrace.engine.sequences.scheduler import SequenceScheduler
from headrace.engine.statistics import VersionStatistics
from headrace.engine.versions import ModelVersion
from headrace.models.config.types import (
    InitialState,
    OldestStrategy,
    OutputSpec,
    SequenceBatching,
    StateSpec,
)

SUM = StateSpec("SUM_IN", "SUM_OUT", FP32, (1,))
DIRECT = SequenceBatching(states=(SUM,), max_sequence_idle_microseconds=60_000_000)
OLDEST = replace(DIRECT, strategy=OldestStrategy(max_candidate_sequences=6))
BOTH = pytest.mark.parametrize("sequences", [DIRECT, OLDEST], ids=["direct", "oldest"])


class OnnxInstance:
    """One session, as a backend would hold it."""

    def __init__(self, graph: Any) -> None:
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.checker.check_model(model)
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self.batches: list[dict[str, Array]] = []

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        self.batches.append(dict(inputs))
        if (inputs["X"] < 0).any():
            raise InvalidArgument("no negative numbers")
        return dict(zip(requested, self._session.run(list(requested), dict(inputs)), strict=True))

    def close(self) -> None:
        """The session goes with the last reference."""


def _value(name: str, *dims: str | int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(dims))


def adding() -> OnnxInstance:
    """Y = SUM_OUT = X + SUM_IN."""
    nodes = [
        helper.make_node("Add", ["X", "SUM_IN"], ["SUM_OUT"]),
        helper.make_node("Identity", ["SUM_OUT"], ["Y"]),
    ]
    inputs = [_value("X", "N", 1), _value("SUM_IN", "N", 1)]
    return OnnxInstance(helper.make_graph(nodes, "adding", inputs, [_value("Y", "N", 1), _value("SUM_OUT", "N", 1)]))


def growing() -> OnnxInstance:
    """Keeps all it was given: ALL_OUT = ALL_IN and X behind it; Y is their sum."""
    nodes = [
        helper.make_node("Concat", ["ALL_IN", "X"], ["ALL_OUT"], axis=1),
        helper.make_node("ReduceSum", ["ALL_OUT", "one"], ["Y"], keepdims=1),
    ]
    inputs = [_value("X", "N", 1), _value("ALL_IN", "N", "K")]
    outputs = [_value("Y", "N", 1), _value("ALL_OUT", "N", "K1")]
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    return OnnxInstance(helper.make_graph(nodes, "growing", inputs, outputs, [one]))


async def talk(caller: Caller, name: int, dice: random.Random) -> None:
    values = [dice.randint(1, 9) for _ in range(dice.randint(1, 10))]
    answers = []
    for index, value in enumerate(values):
        flags = "S" * (index == 0) + "E" * (index == len(values) - 1)
        answers.append(asyncio.ensure_future(caller.ask(name, value, flags)))
        await asyncio.sleep(0)
        if dice.random() < 0.5:
            await answers[-1]
    assert await asyncio.gather(*answers) == list(accumulate(values))


@BOTH
@pytest.mark.parametrize("runs", ["inline", "thread"])
@pytest.mark.parametrize("grows", [False, True], ids=["adding", "growing"])
def test_every_sequence_has_a_state_of_its_own(sequences: SequenceBatching, runs: str, grows: bool) -> None:
    async def main() -> None:
        if grows:
            sequences_ = replace(sequences, states=(StateSpec("ALL_IN", "ALL_OUT", FP32, (-1,)),))
            instances = [growing(), growing()]
        else:
            sequences_, instances = sequences, [adding(), adding()]
        caller, runners = scheduler_with_compute_runners(sequences_, instances, runs=runs)
        await asyncio.gather(*(talk(caller, n + 1, random.Random(n)) for n in range(20)))
        assert max(len(batch["X"]) for instance in instances for batch in instance.batches) > 1
        for runner in runners:
            await asyncio.to_thread(runner.close)

    asyncio.run(main())


def test_a_sequence_starts_with_the_configured_state(tmp_path: Path) -> None:
    async def main() -> None:
        for initial, first in ((None, 1), ({"SUM_IN": np.array([41], np.float32)}, 42)):
            caller, _ = scheduler_with_compute_runners(DIRECT, [adding()], runs="inline", initial_states=initial)
            assert await caller.ask(1, 1, "S") == first
            assert await caller.ask(1, 1) == first + 1
            assert await caller.ask(1, 1, "S") == first  # anew
            assert await caller.ask(2, 1, "S") == first

    asyncio.run(main())


@BOTH
def test_a_failed_request_leaves_the_state_as_it_was(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, _ = scheduler_with_compute_runners(sequences, [adding()], runs="inline")
        assert await caller.ask(1, 5, "S") == 5
        with pytest.raises(InvalidArgument, match="no negative numbers"):
            await caller.ask(1, -2)
        assert await caller.ask(1, 1) == 6

    asyncio.run(main())


def test_a_request_cancelled_while_it_is_computed_has_been_computed() -> None:
    async def main() -> None:
        caller, (runner,) = scheduler_with_compute_runners(DIRECT, [adding()], runs="thread")
        pending, _ = caller.send(1, 5, "S")
        while pending.batch_record is None:
            await asyncio.sleep(0)
        pending.cancel()
        assert await caller.ask(1, 1) == 6
        await asyncio.to_thread(runner.close)

    asyncio.run(main())


@BOTH
def test_the_state_is_given_out_only_where_it_is_an_output(sequences: SequenceBatching) -> None:
    async def main() -> None:
        caller, _ = scheduler_with_compute_runners(sequences, [adding()], runs="inline")
        _, future = caller.send(1, 5, "S")
        assert [tensor.name for tensor in (await future).outputs] == ["Y"]
        _, future = caller.send(1, 5, outputs=("Y",))
        response = await future
        assert [(tensor.name, tensor.array.item()) for tensor in response.outputs] == [("Y", 10)]

        declared = model(sequences)
        declared = replace(declared, outputs=(*declared.outputs, OutputSpec("SUM_OUT", FP32, (1,))))
        caller, _ = scheduler_with_compute_runners(sequences, [adding()], config=declared, runs="inline")
        _, future = caller.send(1, 5, "S")
        assert [tensor.name for tensor in (await future).outputs] == ["Y", "SUM_OUT"]
        _, future = caller.send(1, 2, outputs=("SUM_OUT",))
        assert [(tensor.name, tensor.array.item()) for tensor in (await future).outputs] == [("SUM_OUT", 7)]
        _, future = caller.send(1, 2, outputs=("Y",))
        assert [(tensor.name, tensor.array.item()) for tensor in (await future).outputs] == [("Y", 9)]

    asyncio.run(main())


def test_fillers_have_a_state_too_and_keep_none() -> None:
    class Noting(OnnxInstance):
        """Takes READY, which the graph has no input for."""

        def __init__(self) -> None:
            self._inner = adding()
            self.batches = []

        def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
            self.batches.append(dict(inputs))
            return self._inner.compute({name: inputs[name] for name in ("X", "SUM_IN")}, requested)

    async def main() -> None:
        instance = Noting()
        caller, _ = scheduler_with_compute_runners(replace(DIRECT, controls=(READY,)), [instance], runs="inline")
        futures = [caller.send(name, name, "S")[1] for name in (1, 2, 3)]
        await asyncio.gather(*futures)
        assert await caller.ask(3, 30, outputs=("Y",)) == 33
        assert instance.batches[1]["SUM_IN"].tolist() == [[0], [0], [3]]
        assert instance.batches[1]["READY"].tolist() == [[0], [0], [1]]
        assert await caller.ask(1, 10) == 11
        assert await caller.ask(2, 20) == 22

    asyncio.run(main())


class AddingRequests:
    """A `RequestInstance` that adds up, and sees the state among its inputs."""

    def execute(self, batch: Any, finished: Any) -> None:
        for work in batch:
            inputs = {tensor.name: tensor.array for tensor in work.request.inputs}
            names = {output.name for output in work.request.outputs} or {"Y", "SUM_OUT"}
            after = inputs["SUM_IN"] + inputs["X"]
            every = {"Y": Tensor("Y", FP32, after), "SUM_OUT": Tensor("SUM_OUT", FP32, after)}
            # As the Python backend: what is not asked for is not sent.
            work.reply([every[name] for name in sorted(names)])
        finished()

    def close(self) -> None:
        """Nothing to close."""


@BOTH
def test_request_instances_have_state_as_well(sequences: SequenceBatching) -> None:
    async def main() -> None:
        config = model(sequences)
        runner = RequestRunner(
            AddingRequests(),
            Placement("i"),
            StatefulConcatenator(config, sequences),
            VersionStatistics(),
            FixedDelay(0),
        )
        caller = Caller(SequenceScheduler(config, sequences, [runner], BatchLog(), limiter=RateLimiter()))
        assert await caller.ask(1, 5, "S") == 5
        assert await caller.ask(1, 2, outputs=("Y",)) == 7
        assert await caller.ask(1, 3) == 10

    asyncio.run(main())


def test_a_model_that_forgets_its_state_fails() -> None:
    class Forgetful:
        def __init__(self, result: dict[str, Array]) -> None:
            self._result = result

        def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
            return self._result

        def close(self) -> None:
            """Nothing to close."""

    async def main() -> None:
        fine = np.ones((1, 1), np.float32)
        for result, text in (
            ({"Y": fine}, "did not return its state 'SUM_OUT'"),
            ({"Y": fine, "SUM_OUT": np.ones((1, 2), np.float32)}, r"'SUM_OUT', which its configuration declares \[1\]"),
            ({"Y": fine, "SUM_OUT": np.ones((1, 1), np.int32)}, "int32 values for output 'SUM_OUT'"),
        ):
            caller, _ = scheduler_with_compute_runners(DIRECT, [Forgetful(result)], runs="inline")
            with pytest.raises(Internal, match=text):
                await caller.ask(1, 1, "S")

    asyncio.run(main())


def test_ragged_inputs_have_no_place_beside_state() -> None:
    config = model(DIRECT)
    ragged = replace(config, inputs=(replace(config.inputs[0], allow_ragged_batch=True),))
    with pytest.raises(Unimplemented, match="allow_ragged_batch"):
        StatefulConcatenator(ragged, DIRECT)


def _with(dims: tuple[int, ...], *initial: InitialState) -> SequenceBatching:
    return replace(DIRECT, states=(replace(SUM, dims=dims, initial=initial),))


def test_initial_states_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "initial_state"
    folder.mkdir()
    (folder / "numbers").write_bytes(np.array([1, 2, 3, 4, 5], np.float32).tobytes())
    (folder / "words").write_bytes(b"\x02\x00\x00\x00ab\x00\x00\x00\x00")
    result = read_initial_states(_with((2, -1), InitialState("i", FP32, (2, 2), False, "numbers")), tmp_path)
    assert result["SUM_IN"].tolist() == [[1, 2], [3, 4]]
    assert read_initial_states(_with((3,), InitialState("i", FP32, (3,), True)), tmp_path)["SUM_IN"].tolist() == [
        0,
        0,
        0,
    ]
    assert read_initial_states(DIRECT, tmp_path) == {}
    words = StateSpec("W", "W_OUT", BYTES, (2,), (InitialState("i", BYTES, (2,), False, "words"),))
    assert read_initial_states(replace(DIRECT, states=(words,)), tmp_path)["W"].tolist() == [b"ab", b""]


@pytest.mark.parametrize(
    ("dims", "initial", "text"),
    [
        ((2,), InitialState("i", INT32, (2,), True), "is INT32, the state FP32"),
        ((-1,), InitialState("i", FP32, (-1,), True), "fixed dims"),
        ((2,), InitialState("i", FP32, (3,), True), "do not fit"),
        ((2,), InitialState("i", FP32, (2, 1), True), "do not fit"),
        ((4,), InitialState("i", FP32, (4,), False, "short"), "has 8 bytes; .* need 16"),
        ((4,), InitialState("i", FP32, (4,), False, "absent"), "cannot be read"),
    ],
)
def test_wrong_initial_states_are_refused(
    tmp_path: Path, dims: tuple[int, ...], initial: InitialState, text: str
) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "short").write_bytes(bytes(8))
    with pytest.raises((InvalidArgument, FailedPrecondition), match=text):
        read_initial_states(_with(dims, initial), tmp_path)


def test_two_initial_states_are_refused(tmp_path: Path) -> None:
    one = InitialState("i", FP32, (1,), True)
    with pytest.raises(InvalidArgument, match="2 initial states"):
        read_initial_states(_with((1,), one, one), tmp_path)


def test_a_version_serves_sequences() -> None:
    """With the checks of a real version in front: callers send neither controls nor state."""

    async def main() -> None:
        caller, _ = scheduler_with_compute_runners(DIRECT, [adding()], runs="inline")
        statistics = VersionStatistics()
        version = ModelVersion(
            model(DIRECT), 1, statistics, caller.scheduler, FixedDelay(0), labels={}, close=lambda: None
        )

        async def ask(value: float, **parameters: Any) -> float:
            reported: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            request = InferRequest(
                "memory",
                [tensor_from_values("X", FP32, [1, 1], [value])],
                outputs=[RequestedOutput("Y")],
                parameters={"sequence_id": "s", **parameters},
            )
            version.infer(request, reported.set_result)
            result = await reported
            return float(result.outputs[0].array.item())

        assert await ask(1, sequence_start=True) == 1
        assert await ask(2) == 3
        assert await ask(3, sequence_end=True) == 6
        with pytest.raises(InvalidArgument, match="START"):
            await ask(4)
        assert (statistics.received, statistics.settled, statistics.total().success) == (4, 4, 3)

    asyncio.run(main())
