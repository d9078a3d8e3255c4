# SPDX-License-Identifier: Apache-2.0
"""Which instances of a version wait for an answer of that same version: when all of them do, none is left to give it.

Shared by the instances of one version; told by `calls`, in the loop's thread.
"""

from __future__ import annotations

from headrace.core.errors import FailedPrecondition


class SelfCalls:
    """The calls of a version to itself that keep an instance from computing anything else."""

    def __init__(self, model_name: str, version: int) -> None:
        self._model_name = model_name
        self._version = str(version)
        self._instances: set[object] = set()
        self._waiting: dict[object, object] = {}
        """The instance of each call."""

    def opened(self, instance: object) -> None:
        """One more can compute."""
        self._instances.add(instance)

    def closed(self, instance: object) -> None:
        """One less."""
        self._instances.discard(instance)

    def is_own(self, model_name: str, version: str) -> bool:
        """Whether a call is for the version itself."""
        # Without a number it is the newest; while that replaces this one, a call to it may be refused for nothing.
        return model_name == self._model_name and version in ("", self._version)

    def begin(self, caller: object) -> object:
        """An instance is about to wait; returns what `end` is told. Refused if then all of them would, forever."""
        if len({*self._waiting.values(), caller}) >= len(self._instances):
            count = len(self._instances)
            each = "its only instance is the one that calls" if count == 1 else f"all {count} instances do so"
            raise FailedPrecondition(
                f"model '{self._model_name}' calls itself and waits, but {each}, so none is left to answer: give it one "
                "more instance (count of instance_group) for each level of calls, or call another model"
            )
        call = object()
        self._waiting[call] = caller
        return call

    def end(self, call: object) -> None:
        """It has its answer."""
        self._waiting.pop(call, None)

    def process_died(self, caller: object) -> None:
        """It waits for nothing any more."""
        self._waiting = {call: other for call, other in self._waiting.items() if other is not caller}
