# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a classifying output are called: label files, read once when a version is loaded.

A label file is text with a label in each line, or the config.json of a Hugging Face model, whose `id2label` has them. An
output of an ensemble that has no file has the labels of the step that makes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.models.config.types import EnsembleStep, ModelConfig

_MOST_BYTES = 16 * 1024 * 1024
_MOST_LABELS = 1_000_000


def read_labels(config: ModelConfig, model_folder: Path) -> dict[str, list[str]]:
    """The labels of each output that has a file of them."""
    return {
        output.name: _lines(model_folder / output.label_filename) for output in config.outputs if output.label_filename
    }


Labels = Mapping[str, Sequence[str]]
"""By output, line by line of its file."""

LabelsOf = Callable[[str, str], Labels]
"""The labels of a model in a version ("" for the newest); empty when it does not serve."""


class InheritedLabels(Labels):
    """The labels of an ensemble. Asked anew each time: the models of its steps come and go without it."""

    def __init__(self, own: Labels, steps: Sequence[EnsembleStep], of: LabelsOf) -> None:
        self._own = own
        self._makers = {ours: (step, theirs) for step in steps for theirs, ours in step.output_map.items()}
        self._of = of

    def __getitem__(self, name: str) -> Sequence[str]:
        if name in self._own:
            return self._own[name]
        step, theirs = self._makers[name]
        version = "" if step.model_version < 0 else str(step.model_version)
        return self._of(step.model_name, version).get(theirs, ())

    def __iter__(self) -> Iterator[str]:
        return iter(self._own.keys() | self._makers.keys())

    def __len__(self) -> int:
        return len(self._own.keys() | self._makers.keys())


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FailedPrecondition(f"{path}: a label file may have {_MOST_BYTES} bytes at most")
        text = path.read_text(encoding="utf-8")
        return _id2label(path, text) if path.suffix == ".json" else text.splitlines()
    except OSError as error:
        raise FailedPrecondition(
            f"{path}: the label file cannot be read ({error.strerror}): add it, or remove 'label_filename'"
        ) from None
    except UnicodeDecodeError:
        raise FailedPrecondition(f"{path}: the label file is not UTF-8 text") from None


def _id2label(path: Path, text: str) -> list[str]:
    try:
        named = {int(number): str(label) for number, label in json.loads(text)["id2label"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FailedPrecondition(
            f"{path}: the label file is JSON without an 'id2label' that gives each number a label: correct it, or write the "
            "labels into a text file, one in each line"
        ) from None
    if any(not 0 <= number < _MOST_LABELS for number in named):
        raise FailedPrecondition(f"{path}: the numbers in 'id2label' must be from 0 to {_MOST_LABELS - 1}")
    return [named.get(number, "") for number in range(max(named, default=-1) + 1)]
