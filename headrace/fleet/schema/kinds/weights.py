# SPDX-License-Identifier: Apache-2.0
"""FineTunedWeight: what was trained on top of a model."""

from __future__ import annotations

from headrace.fleet.schema.fields import Column, Kind, anything, record, text
from headrace.fleet.schema.kinds.models import ABOUT, STATUS, STORAGE

FINE_TUNED_WEIGHT = Kind(
    "FineTunedWeight",
    "finetunedweights",
    False,
    "Weights trained on top of a model.",
    record(
        "spec",
        "What they are.",
        record("baseModelRef", "The model they belong to.", text("name"), text("namespace")),
        text("modelType", "LoRA, Adapter, Distillation, Tfew."),
        anything("hyperParameters", "`strategy` is read: lora, tfew."),
        anything("configuration", "`merged_weights: true`: the base model is not needed."),
        STORAGE,
        record("trainingJobRef", "", text("name"), text("namespace")),
        *ABOUT,
    ),
    STATUS,
    columns=(
        Column("Disabled", ".spec.disabled", "boolean"),
        Column("Version", ".spec.version"),
        Column("Vendor", ".spec.vendor"),
        Column("CompartmentID", ".spec.compartmentID", wide=True),
        Column("ModelType", ".spec.modelType"),
        Column("Ready", ".status.state"),
        Column("Age", ".metadata.creationTimestamp", "date"),
    ),
)
