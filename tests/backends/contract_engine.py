# SPDX-License-Identifier: Apache-2.0
"""What the tests of the contract suite have in common: the cases with their engine, and how outcomes are looked at."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from case import Arrays, Case
from contract_serving import Served, refusal

from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound
from headrace.engine.repository.states import State

REMEDIES = ("put ", "export", "save", "write", "name it", "use ", "replace", "correct", "install", "add ", "convert")


@dataclass
class ContractFixture:
    """The cases of one module, and the engine that serves them."""

    served: Served
    cases: list[Case]

    @property
    def batching(self) -> list[Case]:
        return [case for case in self.cases if case.batches]

    @property
    def with_files(self) -> list[Case]:
        return [case for case in self.cases if case.model_file]

    def rows(self, case: Case) -> int:
        """As many as the model takes, up to 3."""
        return min(3, self.served.config(case.name).max_batch_size) if case.batches else 1


def shape_of(given: Arrays) -> Any:
    return tuple((name, array.shape[1:]) for name, array in sorted(given.items()))


def bits_of(arrays: Arrays) -> dict[str, Any]:
    """What is in them, NaN among it."""
    return {name: array.tolist() if array.dtype == object else array.tobytes() for name, array in arrays.items()}


def memory_of(process: psutil.Process) -> int:
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not glibc
        pass
    return int(process.memory_info().rss)


def check_shapes_known(served: Served, case: Case, what: str) -> None:
    """A load must fail, with a reason that names the file and says what to do."""
    error = refusal(served.load, case.name)
    assert isinstance(error, InvalidArgument | FailedPrecondition | NotFound), f"{what}: {error!r}"
    state, reason = served.state(case.name)
    assert state is State.UNAVAILABLE
    assert any(part in reason for part in Path(case.model_file).parts), f"{what}: no file named: {reason}"
    remedies = (*REMEDIES, "Error: ", "has no class") if case.is_code else REMEDIES
    assert any(word in reason for word in remedies), f"{what}: nothing to do is told: {reason}"
    assert len(reason) < 1000 and "Traceback" not in reason, f"{what}: {reason}"
    assert case.is_code or "\n" not in reason, f"{what}: {reason}"


def replace_file(file: Path, content: bytes | None) -> None:
    """As people do it: a new file in place of the old one."""
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)
