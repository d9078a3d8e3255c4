# SPDX-License-Identifier: Apache-2.0
"""Label files: what the numbers of a classifying output are called. Read once, when a version is loaded."""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import FailedPrecondition
from headrace.modelconfig.types import ModelConfig

_MOST_BYTES = 16 * 1024 * 1024


def read_labels(config: ModelConfig, model_folder: Path) -> dict[str, list[str]]:
    """The labels of each output that has a file of them."""
    return {
        output.name: _lines(model_folder / output.label_filename) for output in config.outputs if output.label_filename
    }


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FailedPrecondition(f"{path}: a label file may have {_MOST_BYTES} bytes at most")
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FailedPrecondition(
            f"{path}: the label file cannot be read ({error.strerror}): add it, or remove 'label_filename'"
        ) from None
    except UnicodeDecodeError:
        raise FailedPrecondition(f"{path}: the label file is not UTF-8 text") from None
