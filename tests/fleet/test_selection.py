# SPDX-License-Identifier: Apache-2.0
"""Which runtime is chosen, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
from fleet_documents import document
from selection_documents import Json, entry, facts, model, runtime, service

from headrace.fleet.explain import shipped_runtimes
from headrace.fleet.selection import Selection, select
from headrace.fleet.selection.model_match import size_in_name
from headrace.fleet.selection.runtimes import runtime_index
from headrace.platforms.kubernetes_client.objects import name_of


def chosen(selection: Selection) -> str:
    return name_of(selection.runtime) if selection.runtime is not None else ""


def reasons(selection: Selection) -> dict[str, str]:
    return {rejection.name: rejection.reason for rejection in selection.rejected}


def one(rt: Json, told: Json | None = None, *, upstream: bool = False, **spec: Any) -> Selection:
    return select(service(**spec), facts(told or model(), rt, upstream=upstream))


def test_the_fitting_runtime_is_selected_and_the_others_state_the_reason() -> None:
    selection = select(
        service(),
        facts(
            model(),
            runtime("other-architecture", entry(modelArchitecture="MistralForCausalLM")),
            runtime("fits"),
            runtime("off", disabled=True),
            runtime("by-name-only", entry(autoSelect=False)),
            runtime("too-large", size=("30B", "80B")),
        ),
    )
    assert chosen(selection) == "fits"
    assert selection.problem is None
    assert reasons(selection) == {
        "other-architecture": "architecture mismatch (model=LlamaForCausalLM, runtime=MistralForCausalLM)",
        "off": "the runtime is disabled",
        "by-name-only": "it fits, but none of its formats has autoSelect: true",
        "too-large": "model size 8B is below the runtime's minimum, 30B",
    }


@pytest.mark.parametrize("upstream", [False, True])
@pytest.mark.parametrize(
    ("told", "offered", "reason"),
    [
        ({"modelArchitecture": None}, {}, "the model has no architecture, and the runtime wants LlamaForCausalLM"),
        (
            {},
            {"modelArchitecture": None},
            "the model has the architecture LlamaForCausalLM, and the runtime names none",
        ),
        ({"quantization": "fp8"}, {}, "the model has the quantization fp8, and the runtime names none"),
        ({"quantization": "fp8"}, {"quantization": "int4"}, "quantization mismatch (model=fp8, runtime=int4)"),
        ({}, {"modelFormat": None}, "the runtime's entry names no model format"),
        ({}, {"modelFormat": {"name": "onnx"}}, "format mismatch (model=safetensors, runtime=onnx)"),
        (
            {},
            {"modelFormat": {"name": "safetensors"}},
            "the model has the format version 1.0.0, and the runtime names none",
        ),
        ({"modelFramework": None}, {}, "the model has no framework, and the runtime wants transformers"),
        ({}, {"modelFramework": None}, "the model has the framework transformers, and the runtime names none"),
        (
            {},
            {"modelFramework": {"name": "transformers", "version": "3.0.0"}},
            "framework version mismatch (model=4.43.0, runtime=Equal 3.0.0)",
        ),
        (
            {},
            {"diffusionPipeline": {"className": "FluxPipeline"}},
            "the runtime wants a diffusion pipeline, and the model has none",
        ),
    ],
)
def test_every_difference_has_its_reason(told: Json, offered: Json, reason: str, upstream: bool) -> None:
    selection = one(runtime("rt", entry(**offered)), model(**told), upstream=upstream)
    assert chosen(selection) == ""
    assert reasons(selection) == {"rt": reason}
    assert selection.failure == "NoSupportingRuntime"
    assert selection.problem is not None and reason in selection.problem.message


def test_both_without_architecture_or_framework_agree() -> None:
    bare = {"modelArchitecture": None, "modelFramework": None}
    assert chosen(one(runtime("rt", entry(**bare)), model(**bare))) == "rt"


def test_pipelines_agree_by_class_library_and_type() -> None:
    flux = {"className": "FluxPipeline", "vae": {"library": "diffusers", "type": "AutoencoderKL"}}
    created_model = model(diffusionPipeline=flux)
    assert chosen(one(runtime("rt", entry(diffusionPipeline=flux)), created_model)) == "rt"
    assert chosen(one(runtime("rt", entry(diffusionPipeline={"className": "FluxPipeline"})), created_model)) == "rt"
    for offered, part in [
        ({"vae": {"type": "Other"}}, "type of vae mismatch"),
        ({"transformer": {"type": "X"}}, "pipeline component transformer"),
        ({"additionalComponents": {"clip": {"type": "X"}}}, "pipeline component clip"),
        ({"className": "Other"}, "pipeline class mismatch"),
    ]:
        assert part in reasons(one(runtime("rt", entry(diffusionPipeline=offered)), created_model))["rt"]


@pytest.mark.parametrize(
    ("operator", "theirs", "ours", "fits", "fits_upstream"),
    [
        ("", "1.0.0", "1.0.0", True, True),
        ("Equal", "1.0.0", "1.0.1", False, False),
        ("Equal", "1.0", "1.0.0", True, False),
        ("Equal", "v1.0.0", "1.0.0", True, False),
        # The runtime's version is the greater one: a ceiling.
        ("GreaterThan", "1.0.0", "1.1.0", True, True),
        ("GreaterThan", "1.1.0", "1.1.0", False, False),
        ("GreaterThan", "1.2.0", "1.1.0", False, False),
        ("GreaterThanOrEqual", "1.1.0", "1.1.0", True, True),
        ("GreaterThanOrEqual", "1.2.0", "1.1.0", False, False),
        ("GreaterThan", "9.0.0", "10.0.0", True, True),
        # A suffix on either side makes it Equal.
        ("GreaterThanOrEqual", "1.0.0-dev", "1.1.0", False, False),
        ("GreaterThanOrEqual", "1.1.0-dev", "1.1.0-dev", True, True),
    ],
)
def test_versions(operator: str, theirs: str, ours: str, fits: bool, fits_upstream: bool) -> None:
    offered = entry(modelFormat={"name": "safetensors", "version": ours, "operator": operator or None})
    created_model = model(modelFormat={"name": "safetensors", "version": theirs})
    assert bool(chosen(one(runtime("rt", offered), created_model))) is fits
    assert bool(chosen(one(runtime("rt", offered), created_model, upstream=True))) is fits_upstream


def test_a_new_transformers_version_does_not_leave_a_model_without_runtimes() -> None:
    created_model = model(modelFramework={"name": "transformers", "version": "4.51.3"})
    selection = one(runtime("rt"), created_model)
    assert chosen(selection) == "rt"
    assert "framework version mismatch (model=4.51.3, runtime=Equal 4.43.0)" in selection.reason
    assert chosen(one(runtime("rt"), created_model, upstream=True)) == ""


def test_an_exact_fit_precedes_a_near_fit_at_any_priority() -> None:
    near = entry(modelFramework={"name": "transformers", "version": "4.51.3"}, priority=9)
    selection = select(service("team"), facts(model(), runtime("near", near, namespace="team"), runtime("exact")))
    assert chosen(selection) == "exact"
    assert "exact fits exactly" in reasons(selection)["near"]


def test_an_operator_that_is_a_bound_stays_one() -> None:
    bounded = {"name": "transformers", "version": "4.40.0", "operator": "GreaterThanOrEqual"}
    assert chosen(one(runtime("rt", entry(modelFramework=bounded)))) == ""


@pytest.mark.parametrize(
    ("size", "told", "fits"),
    [
        (("7B", "9B"), "8B", True),
        (("8B", "8B"), "8B", True),
        (("500M", "1B"), "0.6B", True),
        (("1T", "2T"), "1200B", True),
        (("9B", "70B"), "8B", False),
        (("1B", "7B"), "8B", False),
        (("1B", "7B"), None, True),
        # A size that cannot be read counts as 0.
        (("1B", "7B"), "huge", False),
    ],
)
@pytest.mark.parametrize("upstream", [False, True])
def test_sizes(size: tuple[str, str], told: str | None, fits: bool, upstream: bool) -> None:
    assert bool(chosen(one(runtime("rt", size=size), model(modelParameterSize=told), upstream=upstream))) is fits


@pytest.mark.parametrize(
    ("size", "fits"), [(("7B", ""), True), (("9B", ""), False), (("", "9B"), True), (("", "7B"), False)]
)
def test_a_range_with_one_end_is_a_range(size: tuple[str, str], fits: bool) -> None:
    assert bool(chosen(one(runtime("rt", size=size)))) is fits
    assert "one end only" in reasons(one(runtime("rt", size=size), upstream=True))["rt"]


def test_a_runtime_for_the_size_precedes_one_for_any() -> None:
    # As qwen2.5-72b met a runtime for one GPU, which names no size.
    offered = (runtime("a-any-size"), runtime("b-open", size=("60B", "")), runtime("c-large", size=("65B", "80B")))
    created_model = model(modelParameterSize="72B")
    ours = select(service(), facts(created_model, *offered))
    assert chosen(ours) == "c-large"
    assert reasons(ours)["a-any-size"] == "it fits, but the size range of c-large is closer to the model"
    assert chosen(select(service(), facts(created_model, offered[0], offered[2], upstream=True))) == "a-any-size"


def test_a_model_of_unknown_size_is_reported() -> None:
    selection = select(service(), facts(model(modelParameterSize=""), runtime("small", size=("100M", "15B"))))
    assert chosen(selection) == "small"
    assert selection.reason == (
        "it alone fits the model, whose size is not known and was not compared with at least 100M and at most 15B: set its "
        "modelParameterSize"
    )


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("hf://nvidia/NVIDIA-Nemotron-Nano-9B-v2", "9B"),
        ("hf://Qwen/Qwen2.5-0.5B-Instruct/", "0.5B"),
        ("smollm2-135m", "135M"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "30B"),
        ("Qwen2.5-7B-Instruct-1M", "7B"),
        ("mistralai/Mixtral-8x7B-v0.1", ""),
        ("MiniMax-Text-1M", ""),
        ("7B-models/gpt2", ""),
        ("", ""),
    ],
)
def test_the_size_may_be_in_the_name(name: str, size: str) -> None:
    assert size_in_name(name) == size


def test_a_model_named_9b_is_not_given_a_runtime_for_30b() -> None:
    # OME's nvidia-nemotron-nano-9b-v2 declares no size, and its own runtime is not chosen by itself.
    nano = model(modelParameterSize="", storage={"storageUri": "hf://nvidia/NVIDIA-Nemotron-Nano-9B-v2"})
    large = runtime("nemotron-30b", size=("28B", "32B"))
    own = runtime("nemotron-9b", entry(autoSelect=False), size=("8B", "10B"))
    selection = select(service(), facts(nano, large, own))
    assert selection.runtime is None
    assert reasons(selection) == {
        "nemotron-30b": "the model's name says 9B, below the runtime's minimum, 28B; if wrong, set modelParameterSize",
        "nemotron-9b": "it fits, but none of its formats has autoSelect: true",
    }
    assert chosen(select(service(), facts(nano, large, own, upstream=True))) == "nemotron-30b"
    near = runtime("for-10b", size=("9.5B", "11B"))
    assert chosen(select(service(), facts(nano, large, near))) == "for-10b"
    named = service()
    named["spec"]["runtime"] = {"name": "nemotron-30b"}
    assert chosen(select(named, facts(nano, large))) == "nemotron-30b"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"modelParameterSize": "405B"}, "model size 405B is above the runtime's maximum, 15B"),
        ({"quantization": "fp8"}, "the model has the quantization fp8, and the runtime names none"),
        ({"modelArchitecture": "NemotronHForCausalLM"}, "architecture mismatch"),
    ],
)
def test_our_gpu_runtime_is_not_given_what_it_cannot_serve(spec: Json, reason: str) -> None:
    ours = next(
        shipped_runtime
        for shipped_runtime in shipped_runtimes()
        if shipped_runtime["metadata"]["name"] == "headrace-gpu"
    )
    assert chosen(select(service(), facts(model(), ours))) == "headrace-gpu"
    selection = select(service(), facts(model(**spec), ours))
    assert selection.runtime is None
    assert reason in reasons(selection)["headrace-gpu"]


def test_the_order_is_namespace_then_score_then_size_then_name() -> None:
    offered = [
        runtime("z-own", namespace="team"),
        runtime("y-high", entry(priority=3)),
        runtime("x-close", size=("7B", "9B")),
        runtime("w-wide", size=("1B", "70B")),
        runtime("a-any"),
        runtime("b-any"),
        runtime("elsewhere", namespace="other"),
    ]
    results = []
    while True:
        selection = select(service("team"), facts(model(), *offered))
        if selection.runtime is None:
            break
        results.append(chosen(selection))
        offered = [item for item in offered if item is not selection.runtime]
    assert results == ["z-own", "y-high", "x-close", "w-wide", "a-any", "b-any"]


@pytest.mark.parametrize(
    ("offered", "score"),
    [
        ([entry()], 2),
        ([entry(priority=4)], 8),
        ([entry(modelFormat={"name": "safetensors", "version": "1.0.0", "weight": 5})], 6),
        ([entry(modelFormat={"name": "safetensors", "version": "1.0.0", "weight": 0})], 11),
        ([entry(modelFramework={"name": "transformers", "version": "4.43.0", "weight": 0})], 6),
        # Entries are scored by format and framework alone, whatever their architecture, unless autoSelect is false.
        ([entry(), entry(modelArchitecture="Other", priority=7)], 14),
        ([entry(), entry(priority=7, autoSelect=False)], 2),
        # autoSelect has to be true on some entry; the one that matches may say nothing.
        ([entry(autoSelect=None, priority=2), entry(modelArchitecture="Other")], 4),
    ],
)
@pytest.mark.parametrize("upstream", [False, True])
def test_scores(offered: list[Json], score: int, upstream: bool) -> None:
    created_model = model()
    index = facts(created_model, runtime("rt", *offered), upstream=upstream).derived(runtime_index)
    assert index.match(created_model, index.available("default")[0]).score == score


def test_a_named_runtime_is_used_without_autoselect_but_only_if_it_fits() -> None:
    known = facts(
        model(), runtime("byname", entry(autoSelect=False)), runtime("wrong", entry(quantization="fp8")), runtime("x")
    )
    selection = select(service(runtime={"name": "byname"}), known)
    assert (chosen(selection), selection.problem) == ("byname", None)
    assert reasons(selection) == {"wrong": "the service names byname", "x": "the service names byname"}
    wrong = select(service(runtime={"name": "wrong"}), known)
    assert wrong.runtime is None and wrong.problem is not None
    assert wrong.problem.field == "spec.runtime.name"
    assert "the model has no quantization, and the runtime wants fp8" in wrong.problem.message


def test_a_named_runtime_without_the_services_components_is_used_with_a_warning() -> None:
    selection = select(service(runtime={"name": "pd"}), facts(model(), runtime("pd", **PD)))
    assert chosen(selection) == "pd"
    assert selection.reason == (
        "the service names pd, though the runtime separates prefill from decoding, and the service has no decoder"
    )


def test_failures_have_their_reason() -> None:
    known = facts(model(), runtime("off", disabled=True))
    assert select(service(runtime={"name": "off"}), known).failure == "RuntimeDisabled"
    assert select(service(runtime={"name": "gone"}), known).failure == "RuntimeNotRecognized"
    assert select(service(model={"name": "gone"}), known).failure == "BaseModelNotFound"
    assert select(service(), known).failure == "NoSupportingRuntime"
    assert select(service(model=None), known).failure == "InvalidPredictorSpec"


def test_a_namespaced_runtime_shadows_the_clusters() -> None:
    known = facts(model(), runtime("rt"), runtime("rt", namespace="team"))
    assert (select(service("team", runtime={"name": "rt"}), known).runtime or {})["kind"] == "ServingRuntime"
    assert (select(service("other", runtime={"name": "rt"}), known).runtime or {})["kind"] == "ClusterServingRuntime"


def test_an_engine_with_an_image_needs_no_runtime() -> None:
    alone = {"runner": {"image": "mine:1"}}
    selection = select(service(engine=alone, model=None), facts())
    assert (selection.runtime, selection.problem) == (None, None)
    selection = select(service(engine=alone), facts(model(), runtime("rt", entry(quantization="fp8"))))
    assert (selection.runtime, selection.problem) == (None, None)
    assert list(reasons(selection)) == ["rt"]
    group = {"leader": {"runner": {"image": "a"}}, "worker": {"runner": {"image": "b"}}}
    assert select(service(engine=group, model=None), facts()).problem is None


@pytest.mark.parametrize(
    "spec",
    [
        {"acceleratorSelector": {"acceleratorClass": "h100"}},
        {"engine": {"acceleratorOverride": {"acceleratorClass": "h100"}}},
        {"decoder": {"acceleratorOverride": {"acceleratorClass": "h100"}}},
        {"notes": {"ome.io/accelerator-class": "h100"}},
    ],
)
def test_every_requested_accelerator_class_must_be_supported_by_the_runtime(spec: Json) -> None:
    pd = {"decoderConfig": {"runner": {"image": "x"}}} if "decoder" in spec else {}
    with_class = runtime("with", acceleratorRequirements={"acceleratorClasses": ["a100", "h100"]}, **pd)
    other = runtime("other", acceleratorRequirements={"acceleratorClasses": ["a100"]}, **pd)
    selection = select(service(**spec), facts(model(), with_class, other, runtime("none", **pd)))
    assert chosen(selection) == "with"
    assert reasons(selection) == {
        "other": "accelerator mismatch (service=h100, runtime=a100)",
        "none": "accelerator mismatch (service=h100, runtime=none)",
    }


PD = {"decoderConfig": {"runner": {"image": "d"}}}


@pytest.mark.parametrize(
    ("offered", "spec", "reason"),
    [
        (PD, {}, "separates prefill from decoding"),
        ({}, {"decoder": {}}, "the service has a decoder"),
        ({}, {"router": {}}, "the service has a router"),
        ({}, {"engine": {"worker": {"size": 1}}}, "the engine asks for workers"),
        (PD, {"decoder": {"worker": {"size": 1}}}, "the decoder asks for workers"),
        ({"engineConfig": None}, {}, "the runtime has no engineConfig"),
    ],
)
def test_a_runtime_without_the_services_components_is_left_out(offered: Json, spec: Json, reason: str) -> None:
    selection = one(runtime("rt", **offered), **spec)
    assert chosen(selection) == "" and reason in reasons(selection)["rt"]
    assert chosen(one(runtime("rt", **offered), upstream=True, **spec)) == "rt"


def test_a_component_with_its_own_image_needs_nothing_of_the_runtime() -> None:
    own = {"runner": {"image": "mine"}}
    assert chosen(one(runtime("rt"), decoder=own, router=own)) == "rt"
    assert chosen(one(runtime("rt"), engine={"worker": {"size": 2, **own}})) == "rt"


def test_a_virtual_service_needs_no_runtime() -> None:
    selection = select(service(notes={"ome.io/deploymentMode": "VirtualDeployment"}, model={"name": "gone"}), facts())
    assert (selection.runtime, selection.problem) == (None, None)


def test_a_problem_names_a_few_runtimes_and_counts_the_rest() -> None:
    many = [runtime(f"rt-{number:02}", entry(quantization="fp8")) for number in range(20)]
    selection = select(service(), facts(model(), *many))
    assert selection.problem is not None and "and 15 more" in selection.problem.message
    assert len(selection.rejected) == 20


def test_wrong_types_choose_nothing_and_raise_nothing() -> None:
    odd = document(
        "ClusterServingRuntime", "odd", {"supportedModelFormats": [3, {"modelFormat": "x"}], "modelSizeRange": 4}
    )
    odder = document("ClusterServingRuntime", "odder", {"supportedModelFormats": "x", "acceleratorRequirements": []})
    for upstream in (False, True):
        selection = select(service(), facts(model(), odd, odder, upstream=upstream))
        assert selection.runtime is None and len(selection.rejected) == 2
