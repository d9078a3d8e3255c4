# SPDX-License-Identifier: Apache-2.0
"""What every backend must do: each module of `cases/` through the real engine, with its real framework.

One engine serves the cases of a module; a test takes them one after the other and tells all failures at the end.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from case import Arrays, Case
from contract_cases import MODULES, cases_of, for_each, write_cases
from contract_engine import ContractFixture, bits_of, check_shapes_known, memory_of, replace_file, shape_of
from contract_files import Canary, corrupted, cut_and_emptied, files_of_other_formats
from contract_serving import Served, as_received, check, dtype_other_than, refusal

from headrace.backends.contract import ComputeInstance
from headrace.core.dtypes import dtype_named
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.engine.repository.check import check_repository
from headrace.engine.repository.states import State

pytestmark = pytest.mark.timeout(300)
"""The first test of a module imports its framework and makes its models."""

MANY = 24
"""Requests at once."""
LEAK_BYTES = 150_000
"""In three rounds. A kept session of ONNX Runtime of the smallest model is 110 KB in each; without one it is 8 KB in all."""
TWO = [{"count": 2, "kind": "KIND_CPU"}]


WORKERS = {
    **dict.fromkeys(("lightgbm", "sklearn", "tensorflow", "xgboost"), "frameworks"),
    **dict.fromkeys(("netdef", "pytorch", "vision"), "torch"),
}
"""Which modules run in one worker process, since they import the same framework."""
QUICK_PYTHON = {
    "test_loads_and_reports_its_tensors",
    "test_answers_what_the_framework_would",
    "test_accepts_arrays_of_any_layout_without_changing_them",
    "test_answers_rows_of_one_request",
    "test_joins_requests_and_gives_each_caller_its_own",
    "test_without_a_configuration",
    "test_models_check_finds_it_well",
    "test_refuses_wrong_requests_and_lives_on",
    "test_an_instance_given_invalid_input_raises_our_error_and_keeps_working",
}
"""The tests of `python_quick` that are not slow. What the others show, they show of the Python models of `python`, too."""

SLOW = {(module, "test_unload_gives_everything_back") for module in ("openvino", "sklearn", "tensorflow", "vision")}
"""Their loads take long. Of the others it is shown quickly that the engine keeps nothing."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test with every module of `cases/`."""
    params = []
    for module in MODULES:
        marks = [pytest.mark.worker(WORKERS.get(module, f"contract of {module}"))]
        test = metafunc.function.__name__
        if (module == "python_quick" and test not in QUICK_PYTHON) or (module, test) in SLOW:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(module, marks=marks))
    metafunc.parametrize("contract", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def contract(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContractFixture]:
    cases = cases_of(request.param)
    repository = tmp_path_factory.mktemp(f"contract_{request.param}")
    write_cases(repository, request.param)
    # The frameworks' own objects, of which there are millions, need not be looked through at each collection.
    gc.collect()
    gc.freeze()
    served = Served(repository)
    yield ContractFixture(served, cases)
    served.close()


@pytest.fixture
def loaded(contract: ContractFixture) -> Iterator[ContractFixture]:
    """The contract with every case loaded as it is written."""
    for case in contract.cases:
        contract.served.load(case.name)
    return contract


def test_loads_and_reports_its_tensors(loaded: ContractFixture) -> None:
    def one(case: Case) -> None:
        assert loaded.served.state(case.name) == (State.READY, "")
        metadata = loaded.served.plane.metadata(case.name)
        given = case.inputs(loaded.rows(case), 0)
        for tensors, arrays in ((metadata.inputs, given), (metadata.outputs, case.expected(given))):
            shapes = {tensor.name: tensor for tensor in tensors}
            assert set(arrays) <= set(shapes), case.name
            for name, array in arrays.items():
                output = shapes[name]
                assert dtype_named(output.datatype).numpy.kind == array.dtype.kind, (
                    f"{name} is said to be {output.datatype}"
                )
                assert len(output.shape) == array.ndim, f"{name} is said to have shape {output.shape}"
                assert all(size in (-1, real) for size, real in zip(output.shape, array.shape, strict=True)), name
        assert (loaded.served.config(case.name).max_batch_size > 0) is case.batches

    for_each(loaded.cases, one)


def test_models_load_side_by_side(contract: ContractFixture) -> None:
    """A server starts all of its models at once, each in one of several threads."""
    for seed in range(3):
        for case in contract.cases:
            contract.served.unload(case.name)
        contract.served.load_all([case.name for case in contract.cases])
        for case in contract.cases:
            given = case.inputs(1, seed)
            check(case, given, contract.served.infer(case.name, given))


def test_answers_what_the_framework_would(loaded: ContractFixture) -> None:
    def one(case: Case) -> None:
        types = {
            output.name: dtype_named(output.datatype) for output in loaded.served.plane.metadata(case.name).outputs
        }
        for seed in range(3):
            given = case.inputs(1, seed)
            answer = loaded.served.infer(case.name, given)
            check(case, given, answer)
            assert {name: array.dtype for name, array in answer.items()} == {name: types[name].numpy for name in answer}
            wanted = next(iter(case.expected(given)))
            assert list(loaded.served.infer(case.name, given, [wanted])) == [wanted]

    for_each(loaded.cases, one)


def test_accepts_arrays_of_any_layout_without_changing_them(loaded: ContractFixture) -> None:
    """Read-only and at odd addresses, as a connection gives them; or turned, as another model does."""

    def one(case: Case) -> None:
        given = case.inputs(loaded.rows(case), 7)
        turned = {name: np.asfortranarray(array) for name, array in given.items()}
        apart = {name: np.repeat(array, 2, axis=-1)[..., ::2] for name, array in given.items()}
        for arrays in (as_received(given), turned, apart):
            before = bits_of(arrays)
            check(case, given, loaded.served.infer(case.name, arrays))
            assert bits_of(arrays) == before, "the model has changed what it was given"

    for_each(loaded.cases, one)


def test_answers_rows_of_one_request(loaded: ContractFixture) -> None:
    def one(case: Case) -> None:
        most = loaded.served.config(case.name).max_batch_size
        for rows in {1, 2, min(5, most), most}:
            given = case.inputs(min(rows, most), rows)
            check(case, given, loaded.served.infer(case.name, given))
        too_many = case.inputs(most + 1, 0)
        assert "batch-size must be <=" in refusal(loaded.served.infer, case.name, too_many).message

    for_each(loaded.batching, one)


def test_joins_requests_and_gives_each_caller_its_own(loaded: ContractFixture) -> None:
    def one(case: Case) -> None:
        loaded.served.load(case.name, dynamic_batching={"max_queue_delay_microseconds": 50_000})
        rows = loaded.rows(case)
        requests = [case.inputs(1 + seed % rows, seed) for seed in range(MANY)]
        before = loaded.served.executions(case.name)
        for given, answer in zip(requests, loaded.served.infer_all(case.name, requests), strict=True):
            check(case, given, answer)
        if len({shape_of(request) for request in requests}) == 1:
            assert loaded.served.executions(case.name) - before < MANY

    for_each(loaded.batching, one)


def test_two_concurrent_instances(loaded: ContractFixture) -> None:
    def one(case: Case) -> None:
        loaded.served.load(case.name, instance_group=TWO)
        (group,) = loaded.served.config(case.name).instance_groups
        assert group.count == 2
        requests = [case.inputs(1, seed) for seed in range(MANY)]
        for given, answer in zip(requests, loaded.served.infer_all(case.name, requests), strict=True):
            check(case, given, answer)

    for_each(loaded.cases, one)


def test_instances_compute_side_by_side(loaded: ContractFixture) -> None:
    """Two threads in two instances of one model, as often as the engine never would."""

    def one(case: Case) -> None:
        model, first = loaded.served.opened(case.name)
        if not isinstance(first, ComputeInstance):
            first.close()
            model.close()
            return
        _, second = loaded.served.opened(case.name)
        third = model.open(loaded.served.placement(case.name))
        together = threading.Barrier(3)

        def many(instance: ComputeInstance, start: int) -> None:
            requests = [case.inputs(1, start + seed) for seed in range(8)]
            together.wait(60)
            for request in requests:
                check(case, request, instance.compute(dict(request), list(case.expected(request))))

        with ThreadPoolExecutor(3) as threads:
            works = [threads.submit(many, item, 100 * index) for index, item in enumerate((first, second, third))]
            for work in works:
                work.result(60)
        for closing in (first, third, model, second):
            closing.close()

    for_each(loaded.cases, one)


def test_without_a_configuration(contract: ContractFixture) -> None:
    def one(case: Case) -> None:
        written = contract.served.repository / case.name / "config.pbtxt"
        text = written.read_text()
        contract.served.unload(case.name)
        written.unlink()
        try:
            contract.served.load(case.name)
            rows = contract.rows(case)
            for seed in range(2):
                given = case.inputs(rows, seed)
                check(case, given, contract.served.infer(case.name, given))
        finally:
            contract.served.unload(case.name)
            written.write_text(text)

    for_each([case for case in contract.cases if not case.needs_config], one)


def test_models_check_finds_it_well(contract: ContractFixture) -> None:
    report = check_repository(contract.served.repository)
    assert set(report.models) == {case.name for case in contract.cases}
    assert report.problems == () and report.warnings == ()


def test_refuses_wrong_requests_and_lives_on(loaded: ContractFixture) -> None:
    def one(case: Case) -> None:
        given = dict(case.inputs(1, 5))
        first = next(iter(given))
        kind = next(
            tensor.datatype for tensor in loaded.served.plane.metadata(case.name).inputs if tensor.name == first
        )
        other = np.zeros(given[first].shape, dtype_other_than(kind))
        deeper = given[first].reshape(*given[first].shape, 1)
        wrong: list[tuple[Arrays, tuple[str, ...], str]] = [
            ({**given, first: other}, (), f"'{first}' data-type is"),
            ({**given, first: deeper}, (), f"unexpected shape for input '{first}'"),
            ({name: array for name, array in given.items() if name != first}, (), "Please provide all required input"),
            ({**given, "NO_SUCH": given[first]}, (), f"expected {len(given)} inputs but got {len(given) + 1}"),
            (given, ("NO_SUCH",), "unexpected inference output 'NO_SUCH'"),
        ]
        for arrays, outputs, text in wrong:
            error = refusal(loaded.served.infer, case.name, arrays, outputs)
            assert isinstance(error, InvalidArgument), error
            assert text in error.message or "inputs between" in error.message, error.message
            check(case, given, loaded.served.infer(case.name, given))

    for_each(loaded.cases, one)


def test_an_instance_given_invalid_input_raises_our_error_and_keeps_working(loaded: ContractFixture) -> None:
    """What the engine lets through because a configuration is more open than the model."""

    def one(case: Case) -> None:
        model, instance = loaded.served.opened(case.name)
        if isinstance(instance, ComputeInstance):
            given = dict(case.inputs(1, 6))
            wanted = list(case.expected(given))
            first = next(iter(given))
            wider = np.concatenate([given[first], given[first]], axis=-1)
            for array in (wider, given[first].reshape(*given[first].shape, 1), wider[..., :0]):
                with suppress(HeadraceError):
                    instance.compute({**given, first: array}, wanted)
                check(case, given, instance.compute(dict(given), wanted))
        instance.close()
        model.close()

    for_each(loaded.cases, one)


def test_unload_gives_everything_back(contract: ContractFixture) -> None:
    process = psutil.Process()

    def one(case: Case) -> None:
        given = case.inputs(1, 0)

        def once() -> None:
            contract.served.load(case.name)
            check(case, given, contract.served.infer(case.name, given))
            contract.served.unload(case.name)

        # A program has a process, which takes its memory along and a while to start.
        rounds = 1 if case.is_code else 3
        for _ in range(3 * rounds):  # until allocators have settled
            once()
        children, threads, memory = len(process.children()), process.num_threads(), memory_of(process)
        growth, more_threads = [], []
        for _ in range(3):
            for _ in range(rounds):
                once()
            memory_now, threads_now = memory_of(process), process.num_threads()
            growth.append(memory_now - memory)
            more_threads.append(threads_now - threads)
            memory, threads = memory_now, threads_now
        # A leak grows each time; a cache that fills, or an allocator that takes more at once, does not.
        assert min(growth) < LEAK_BYTES, f"bytes more after each {rounds} rounds: {growth}"
        assert len(process.children()) <= children
        assert min(more_threads) < rounds, f"threads more after each {rounds} rounds: {more_threads}"

    for_each(contract.cases, one)


def test_a_closed_instance_is_released(loaded: ContractFixture) -> None:
    def one(case: Case) -> None:
        model, instance = loaded.served.opened(case.name)
        if isinstance(instance, ComputeInstance):
            given = case.inputs(1, 0)
            instance.compute(dict(given), list(case.expected(given)))
        instance.close()
        model.close()
        held = [weakref.ref(opened) for opened in (model, instance) if hasattr(type(opened), "__weakref__")]
        del model, instance
        gc.collect()
        assert [ref() for ref in held if ref() is not None] == []

    for_each(loaded.cases, one)


def test_an_invalid_model_file_is_reported_and_can_be_replaced(contract: ContractFixture, tmp_path: Path) -> None:
    neighbour = next(iter(contract.cases))

    def one(case: Case) -> None:
        served = contract.served
        file = served.repository / case.name / "1" / case.model_file
        whole = file.read_bytes()
        canary = Canary(tmp_path / case.name)
        served.unload(case.name)
        try:
            for what, content in {**cut_and_emptied(whole), **files_of_other_formats(canary), "nothing": None}.items():
                replace_file(file, content)
                check_shapes_known(served, case, what)
                assert not canary.sang, f"{what} was executed"
            if neighbour is not case:
                given = neighbour.inputs(1, 1)
                check(neighbour, given, served.infer(neighbour.name, given))
        finally:
            replace_file(file, whole)
        served.load(case.name)
        given = case.inputs(1, 2)
        check(case, given, served.infer(case.name, given))

    contract.served.load(neighbour.name)
    for_each(contract.with_files, one)


def test_an_invalid_model_file_is_reported_without_a_configuration(contract: ContractFixture, tmp_path: Path) -> None:
    """Then it is the first look at the file that fails, and not the load."""

    def one(case: Case) -> None:
        served = contract.served
        file = served.repository / case.name / "1" / case.model_file
        config = served.repository / case.name / "config.pbtxt"
        whole, text = file.read_bytes(), config.read_text()
        canary = Canary(tmp_path / case.name)
        served.unload(case.name)
        config.unlink()
        try:
            for what, content in {**cut_and_emptied(whole), **files_of_other_formats(canary)}.items():
                replace_file(file, content)
                check_shapes_known(served, case, what)
                assert not canary.sang, f"{what} was executed"
        finally:
            replace_file(file, whole)
            config.write_text(text)

    for_each([case for case in contract.with_files if not case.needs_config], one)


def test_a_damaged_file_is_served_or_reported(contract: ContractFixture) -> None:
    """Weights that are other weights cannot be told from right ones; all else must be an error and not a crash."""

    def one(case: Case) -> None:
        file = contract.served.repository / case.name / "1" / case.model_file
        whole = file.read_bytes()
        contract.served.unload(case.name)
        replace_file(file, corrupted(whole))
        try:
            with suppress(HeadraceError):
                contract.served.load(case.name)
                contract.served.infer(case.name, case.inputs(1, 3))
        finally:
            replace_file(file, whole)
        contract.served.unload(case.name)
        contract.served.load(case.name)
        given = case.inputs(1, 4)
        check(case, given, contract.served.infer(case.name, given))

    for_each(contract.with_files, one)
