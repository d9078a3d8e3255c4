# SPDX-License-Identifier: Apache-2.0
"""Which accelerator class a component runs on."""

from __future__ import annotations

from typing import Any

import pytest
from selection_documents import Json, accelerator, facts, runtime, service

from headrace.fleet.selection.accelerators import AcceleratorChoice, choose_accelerator
from headrace.fleet.selection.model_match import parse_gigabytes, parse_quantity

LISTED = ("l40", "a100", "h100", "b200")
CLASSES = [
    accelerator("l40", "48Gi", family="ada", cost={"perHour": "1", "spotPerHour": "900m"},
        capabilities={"memoryGB": "48Gi", "computeCapability": "8.9", "memoryBandwidthGBps": "864",
                      "performance": {"fp16Tflops": 362, "int8Tops": 724}}),
    accelerator("a100", "80Gi", family="ampere", cost={"perHour": "2"},
        capabilities={"memoryGB": "80Gi", "computeCapability": "8.0", "memoryBandwidthGBps": "2039",
                      "features": ["NVLink"], "performance": {"fp16Tflops": 312}}),
    accelerator("h100", "80Gi", cost={"perHour": "4"},
        capabilities={"memoryGB": "80Gi", "computeCapability": "9.0", "memoryBandwidthGBps": "3350",
                      "features": ["nvlink", "fp8"], "performance": {"fp16Tflops": 989, "int8Tops": 1979}}),
    accelerator("b200", "180Gi", family="blackwell", cost={"tier": "low"},
        capabilities={"memoryGB": "180Gi", "computeCapability": "10.0", "memoryBandwidthGBps": "8000",
                      "performance": {"fp16Tflops": 2250}}),
]  # fmt: skip


def choice(
    *, upstream: bool = False, component: str = "engine", listed: Any = LISTED, **spec: Any
) -> AcceleratorChoice:
    rt = runtime("rt", acceleratorRequirements={"acceleratorClasses": list(listed)})
    return choose_accelerator(service(**spec), rt, component, facts(*CLASSES, upstream=upstream))


def by(policy: str, *, upstream: bool = False, listed: Any = LISTED, **constraints: Any) -> str:
    return choice(
        upstream=upstream, listed=listed, acceleratorSelector={"policy": policy, "constraints": constraints}
    ).name


def test_without_a_list_a_name_or_a_policy_there_is_none() -> None:
    assert choice().accelerator is None
    assert choice(listed=(), acceleratorSelector={"acceleratorClass": "h100"}).accelerator is None
    assert choose_accelerator(service(), None, "engine", facts(*CLASSES)).accelerator is None


def test_the_component_names_before_the_service() -> None:
    both: Json = {
        "acceleratorSelector": {"acceleratorClass": "a100", "policy": "Cheapest"},
        "engine": {"acceleratorOverride": {"acceleratorClass": "h100"}},
        "decoder": {"acceleratorOverride": {"policy": "MostCapable"}},
    }
    assert choice(**both).name == "h100"
    assert choice(component="decoder", **both).name == "a100"
    del both["acceleratorSelector"]["acceleratorClass"]
    assert choice(component="decoder", **both).name == "b200"


def test_the_annotation_names_one_too_which_ome_forgets() -> None:
    notes = {"ome.io/accelerator-class": "h100"}
    assert choice(notes=notes).name == "h100"
    assert choice(notes=notes, upstream=True).name == ""


def test_a_name_that_is_nowhere_is_a_problem() -> None:
    result = choice(acceleratorSelector={"acceleratorClass": "gone"})
    assert result.accelerator is None and result.problem is not None
    assert result.problem.field == "spec.acceleratorSelector.acceleratorClass"


def test_first_available_is_the_runtimes_first_that_is_there() -> None:
    assert by("FirstAvailable", listed=("gone", "h100", "a100")) == "h100"
    assert by("FirstAvailable", excludedClasses=["l40", "a100"]) == "h100"


@pytest.mark.parametrize("upstream", [False, True])
@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        ({"minMemory": 80}, "a100"),
        ({"minMemory": 81}, "b200"),
        ({"maxMemory": 50}, "l40"),
        ({"architectureFamilies": ["hopper"]}, "h100"),
        ({"architectureFamilies": ["NVIDIA-Ampere"]}, "a100"),
        ({"architectureFamilies": ["amd-hopper", "ada"]}, "l40"),
        ({"requiredFeatures": ["NVLINK"]}, "a100"),
        ({"requiredFeatures": ["nvlink", "fp8"]}, "h100"),
        ({"minArchitectureVersion": "8.5"}, "l40"),
    ],
)
def test_constraints(constraints: Json, expected: str, upstream: bool) -> None:
    assert by("FirstAvailable", upstream=upstream, **constraints) == expected


def test_compute_capabilities_are_numbers() -> None:
    assert by("FirstAvailable", minArchitectureVersion="9.5") == "b200"
    assert by("FirstAvailable", minArchitectureVersion="9.5", upstream=True) == ""


def test_constraints_that_nothing_satisfies_are_a_problem_with_all_reasons() -> None:
    result = choice(acceleratorSelector={"policy": "BestFit", "constraints": {"minMemory": 500}})
    assert result.problem is not None and result.problem.field == "spec.acceleratorSelector.constraints"
    assert "b200: its memory of 180 GB is below 500" in result.problem.message
    assert (
        choice(upstream=True, acceleratorSelector={"policy": "BestFit", "constraints": {"minMemory": 500}}).problem
        is None
    )


def test_the_components_constraints_override_the_services_which_ome_ignores() -> None:
    spec: Json = {
        "acceleratorSelector": {"policy": "FirstAvailable", "constraints": {"minMemory": 60}},
        "engine": {"acceleratorOverride": {"constraints": {"minMemory": 100}}},
    }
    assert choice(**spec).name == "b200"
    assert choice(upstream=True, **spec).name == "a100"


def test_best_fit() -> None:
    # 0.7 for memory that is not too much, 0.3 for speed that is enough.
    assert by("BestFit", minMemory=40) == "l40"
    assert by("BestFit", minMemory=70, minComputePerformanceTFLOPS=900) == "h100"
    # Without fp8, what is left of the speed is half: 0.7*40/48 + 0.3 against 0.7*40/80 + 0.15.
    assert by("BestFit", minMemory=40, preferredPrecisions=["fp8"]) == "l40"
    assert by("BestFit", minMemory=80, preferredPrecisions=["fp8"]) == "h100"
    # OME fails here.
    assert choice(acceleratorSelector={"policy": "BestFit"}).name == "l40"


def test_most_capable() -> None:
    assert by("MostCapable") == "b200"
    assert by("MostCapable", excludedClasses=["b200"]) == "h100"
    # Only two have numbers for int8, but memory and bandwidth count for more.
    assert by("MostCapable", preferredPrecisions=["int8"]) == "b200"


def test_cheapest_compares_prices_of_one_kind() -> None:
    assert by("Cheapest") == "l40"
    assert by("Cheapest", excludedClasses=["l40"]) == "a100"
    # A tier of 1 is less than 2 dollars to OME.
    assert by("Cheapest", excludedClasses=["l40"], upstream=True) == "b200"


def test_cheapest_without_prices() -> None:
    rt = runtime("rt", acceleratorRequirements={"acceleratorClasses": ["x", "y"]})
    selector = {"acceleratorSelector": {"policy": "Cheapest"}}
    for upstream, expected in ((False, "x"), (True, "")):
        known = facts(accelerator("x"), accelerator("y"), upstream=upstream)
        assert choose_accelerator(service(**selector), rt, "engine", known).name == expected


@pytest.mark.parametrize(
    ("written", "number"),
    [("500m", 0.5), ("2Gi", 2**31), ("3k", 3000), (4, 4.0), ("1e3", 1000.0), ("x", None), (None, None), (True, None)],
)
def test_quantities(written: Any, number: float | None) -> None:
    assert parse_quantity(written) == pytest.approx(number) if number is not None else parse_quantity(written) is None


def test_memory_without_a_unit_is_in_gigabytes() -> None:
    assert parse_gigabytes("80") == parse_gigabytes(80) == parse_gigabytes("80Gi") == 80
    assert parse_gigabytes("80", upstream=True) == pytest.approx(0, abs=1e-6)
