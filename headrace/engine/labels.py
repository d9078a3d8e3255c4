# SPDX-License-Identifier: Apache-2.0
"""Class labels of classification outputs, read from label files when a version is loaded.

A label file is text with one label per line, or the config.json of a Hugging Face model with `id2label`. An output of an
ensemble without a label file has the labels of the step that produces it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.models.config.types import EnsembleStep, ModelConfig

_MAX_BYTES = 16 * 1024 * 1024
_MAX_LABELS = 1_000_000


def read_labels(config: ModelConfig, model_folder: Path) -> dict[str, list[str]]:
    """Return the labels of each output with a label file."""
    return {
        output.name: _lines(model_folder / output.label_filename) for output in config.outputs if output.label_filename
    }


Labels = Mapping[str, Sequence[str]]
"""By output, in the order of its label file."""

LabelLookup = Callable[[str, str], Labels]
"""Returns the labels of a model and version ("" for the newest); empty if it does not serve."""


class EnsembleLabels(Labels):
    """The labels of an ensemble, looked up for each access: the models of its steps are loaded and unloaded separately."""

    def __init__(self, own: Labels, steps: Sequence[EnsembleStep], lookup: LabelLookup) -> None:
        self._own = own
        self._producers = {name: (step, output) for step in steps for output, name in step.output_map.items()}
        self._lookup = lookup

    def __getitem__(self, name: str) -> Sequence[str]:
        if name in self._own:
            return self._own[name]
        step, output = self._producers[name]
        version = "" if step.model_version < 0 else str(step.model_version)
        return self._lookup(step.model_name, version).get(output, ())

    def __iter__(self) -> Iterator[str]:
        return iter(self._own.keys() | self._producers.keys())

    def __len__(self) -> int:
        return len(self._own.keys() | self._producers.keys())


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise FailedPrecondition(f"{path}: a label file may have {_MAX_BYTES} bytes at most")
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
        labels = {int(number): str(label) for number, label in json.loads(text)["id2label"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FailedPrecondition(
            f"{path}: the label file is JSON without an 'id2label' that gives each number a label: correct it, or write the "
            "labels into a text file, one per line"
        ) from None
    if any(not 0 <= number < _MAX_LABELS for number in labels):
        raise FailedPrecondition(f"{path}: the numbers in 'id2label' must be from 0 to {_MAX_LABELS - 1}")
    return [labels.get(number, "") for number in range(max(labels, default=-1) + 1)]
