# SPDX-License-Identifier: Apache-2.0
"""The names that people gave to versions: `version_labels` of a model's configuration, such as `1=v1.0.0,2=v1.2.0`.

Called by `lanes` for splits, and by any protocol that takes or tells labels.
"""

from __future__ import annotations

from headrace.engine.repository.directory import ServedModel
from headrace.models.config.types import ModelConfig

PARAMETER = "version_labels"


def labels_of(config: ModelConfig) -> dict[str, str]:
    """Label by number. What is not `NUMBER=LABEL` is left out."""
    pairs = (pair.partition("=") for pair in config.parameters.get(PARAMETER, "").split(","))
    return {number.strip(): label.strip() for number, _, label in pairs if number.strip() and label.strip()}


def labels_served(model: ServedModel) -> dict[str, str]:
    """The same for all versions that serve; the newest knows best."""
    made: dict[str, str] = {}
    for version in model.versions.values():
        made.update(labels_of(version.config))
    return made


def number_of(version: str, labels: dict[str, str]) -> str:
    """The number of a version that is written as a number or as a label; "" if it is neither."""
    if version.isascii() and version.isdigit():
        return str(int(version)) if len(version) < 20 else ""
    return next((number for number, label in labels.items() if label == version), "")
