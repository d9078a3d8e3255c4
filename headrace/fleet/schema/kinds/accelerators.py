# SPDX-License-Identifier: Apache-2.0
"""Table of AcceleratorClass: a type of GPU or other accelerator, how to find its nodes, and its capabilities."""

from __future__ import annotations

from headrace.fleet.schema.fields import (
    Column,
    Kind,
    any_value,
    boolean,
    integer,
    list_of,
    mapping,
    number,
    quantity,
    record,
    string,
    strings,
)
from headrace.fleet.schema.kinds.inference_service import CONDITIONS

_CAPABILITIES = record(
    "capabilities",
    "Capabilities of the accelerator.",
    quantity("memoryGB", "Memory of one accelerator."),
    string("computeCapability", 'Version of the architecture, "9.0".'),
    strings("features"),
    string("levelZeroVersion"),
    integer("clockSpeedMHz", minimum=0),
    quantity("memoryBandwidthGBps"),
    record(
        "performance",
        "",
        number("fp32Tflops", minimum=0),
        number("fp16Tflops", minimum=0),
        number("int8Tops", minimum=0),
        number("int4Tops", minimum=0),
        any_value("latency"),
    ),
)

ACCELERATOR_CLASS = Kind(
    "AcceleratorClass",
    "acceleratorclasses",
    False,
    "A kind of accelerator in the cluster.",
    record(
        "spec",
        "Definition of the accelerator.",
        string("vendor"),
        string("family"),
        string("model"),
        record(
            "discovery",
            "How to find its nodes.",
            mapping("nodeSelector"),
            record("affinity", ""),
            list_of("nodeSelectorTerms", "", record("", "")),
            string("pciVendorID"),
            strings("deviceIDs"),
        ),
        _CAPABILITIES,
        list_of(
            "resources",
            "Resources that a pod requests.",
            record("", "", string("name", required=True), quantity("quantity", default="1"), boolean("divisible")),
        ),
        record(
            "cost",
            "Cost of the accelerator.",
            quantity("perHour"),
            quantity("spotPerHour"),
            quantity("perMillionTokens"),
            string("tier"),
        ),
        record("integration", "", string("kueueResourceFlavor"), string("volcanoGPUType")),
    ),
    record(
        "status",
        "Nodes with the accelerator.",
        strings("nodes"),
        integer("availableNodes", minimum=0),
        integer("totalAccelerators", minimum=0),
        integer("availableAccelerators", minimum=0),
        string("lastUpdated"),
        CONDITIONS,
    ),
    columns=(
        Column("Vendor", ".spec.vendor"),
        Column("Family", ".spec.family"),
        Column("Memory", ".spec.capabilities.memoryGB"),
        Column("Nodes", ".status.availableNodes", "integer"),
    ),
)
