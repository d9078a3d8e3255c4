# SPDX-License-Identifier: Apache-2.0
"""AcceleratorClass: one kind of GPU or other accelerator, how its nodes are found and what it can do."""

from __future__ import annotations

from headrace.fleet.schema.fields import (
    Column,
    Kind,
    anything,
    many,
    mapping,
    number,
    quantity,
    record,
    text,
    texts,
    truth,
    whole,
)
from headrace.fleet.schema.kinds.inference_service import CONDITIONS

_CAPABILITIES = record(
    "capabilities",
    "What it can do.",
    quantity("memoryGB", "Memory of one."),
    text("computeCapability", 'Version of the architecture, "9.0".'),
    texts("features"),
    text("levelZeroVersion"),
    whole("clockSpeedMHz", least=0),
    quantity("memoryBandwidthGBps"),
    record(
        "performance",
        "",
        number("fp32Tflops", least=0),
        number("fp16Tflops", least=0),
        number("int8Tops", least=0),
        number("int4Tops", least=0),
        anything("latency"),
    ),
)

ACCELERATOR_CLASS = Kind(
    "AcceleratorClass",
    "acceleratorclasses",
    False,
    "A kind of accelerator in the cluster.",
    record(
        "spec",
        "What it is.",
        text("vendor"),
        text("family"),
        text("model"),
        record(
            "discovery",
            "How its nodes are found.",
            mapping("nodeSelector"),
            record("affinity", ""),
            many("nodeSelectorTerms", "", record("", "")),
            text("pciVendorID"),
            texts("deviceIDs"),
        ),
        _CAPABILITIES,
        many(
            "resources",
            "What a pod asks for.",
            record("", "", text("name", required=True), quantity("quantity", default="1"), truth("divisible")),
        ),
        record(
            "cost",
            "What it costs.",
            quantity("perHour"),
            quantity("spotPerHour"),
            quantity("perMillionTokens"),
            text("tier"),
        ),
        record("integration", "", text("kueueResourceFlavor"), text("volcanoGPUType")),
    ),
    record(
        "status",
        "Where it is.",
        texts("nodes"),
        whole("availableNodes", least=0),
        whole("totalAccelerators", least=0),
        whole("availableAccelerators", least=0),
        text("lastUpdated"),
        CONDITIONS,
    ),
    columns=(
        Column("Vendor", ".spec.vendor"),
        Column("Family", ".spec.family"),
        Column("Memory", ".spec.capabilities.memoryGB"),
        Column("Nodes", ".status.availableNodes", "integer"),
    ),
)
