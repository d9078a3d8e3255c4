# SPDX-License-Identifier: Apache-2.0
"""Real models behind a real data plane, and what a scrape tells of them."""

from __future__ import annotations

import asyncio
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from metrics_scrape import QUIET, metrics_of, scrape

from headrace.api.metrics.http import Metrics
from headrace.api.metrics.settings import MetricsSettings
from headrace.core.clock import SystemClock
from headrace.core.dtypes import FP32
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.core.requests import InferRequest
from headrace.core.telemetry.exposition import Format
from headrace.core.telemetry.metrics import Registry
from headrace.core.tensors import Tensor
from headrace.engine.cache import ResponseCache
from headrace.engine.engine import EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.models.config.types import DynamicBatching, InputSpec, InstanceGroup, OutputSpec, QueuePolicy
from support.engines import (
    Gate,
    Recorder,
    Streamed,
    answers,
    ask,
    builtin_plane,
    config_of,
    counted,
    ensemble,
    serving_plane,
    step,
    submit,
)

TRITON = {
    "nv_inference_request_success": "counter",
    "nv_inference_request_failure": "counter",
    "nv_inference_count": "counter",
    "nv_inference_exec_count": "counter",
    "nv_inference_pending_request_count": "gauge",
    "nv_inference_request_duration_us": "counter",
    "nv_inference_queue_duration_us": "counter",
    "nv_inference_compute_input_duration_us": "counter",
    "nv_inference_compute_infer_duration_us": "counter",
    "nv_inference_compute_output_duration_us": "counter",
    "nv_model_load_duration_secs": "gauge",
    "nv_pinned_memory_pool_total_bytes": "gauge",
    "nv_pinned_memory_pool_used_bytes": "gauge",
    # Of version 0.7, and of our own.
    "nv_inference_compute_duration_us": "counter",
    "nv_inference_load_ratio": "histogram",
    "nv_inference_request_histogram_us": "histogram",
    "nv_inference_queue_histogram_us": "histogram",
    "nv_inference_compute_histogram_us": "histogram",
}
COUNTER_LATENCIES = {name for name in TRITON if "duration" in name and TRITON[name] == "counter"}
HISTOGRAMS = {name for name in TRITON if TRITON[name] == "histogram"}


def row(number: int = 0) -> Any:
    return np.array([[number]])


def test_names_and_types_are_triton_s() -> None:
    async def main() -> None:
        metrics = metrics_of(await builtin_plane())
        scraped = await scrape(metrics)
        assert {name: kind for name, kind in scraped.types.items() if name.startswith("nv_")} == TRITON
        assert scraped.text.count("# TYPE nv_inference_count ") == scraped.text.count("# HELP nv_inference_count ") == 1
        openmetrics = await scrape(metrics, Format.OPENMETRICS)
        assert openmetrics.types["nv_inference_count"] == "unknown"  # so that it keeps its name
        assert {name for name, _ in openmetrics.samples} == {name for name, _ in scraped.samples}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("setting", "gone"), [("counter_latencies", COUNTER_LATENCIES), ("histogram_latencies", HISTOGRAMS)]
)
def test_what_is_switched_off_is_not_there(setting: str, gone: set[str]) -> None:
    async def main() -> None:
        settings = replace(QUIET, **{setting: False})
        metrics = await scrape(metrics_of(await builtin_plane(), settings))
        assert {name for name in TRITON if name not in metrics.types} == gone

    asyncio.run(main())


def test_requests_of_a_model_are_counted() -> None:
    async def main() -> None:
        async with serving_plane([(config_of("m", max_batch_size=8), Recorder())]) as plane:
            await answers([submit(plane, "m", INPUT0=np.zeros((count, 1))) for count in (1, 2, 4)])
            with pytest.raises(InvalidArgument):
                submit(plane, "m", INPUT0=np.zeros((9, 1)))
            metrics = await scrape(metrics_of(plane))
            assert metrics.labels("nv_inference_count") == [{"model": "m", "version": "1"}]
            assert metrics("nv_inference_request_success") == 3
            assert metrics("nv_inference_count") == 7
            assert metrics("nv_inference_exec_count") == 1
            failures = {
                labels["reason"]: metrics("nv_inference_request_failure", reason=labels["reason"])
                for labels in metrics.labels("nv_inference_request_failure")
            }
            assert failures == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 1}
            for name in ("request", "queue", "compute"):
                assert metrics(f"nv_inference_{name}_histogram_us_count") == 3
                assert sum(metrics.buckets(f"nv_inference_{name}_histogram_us")) == 3
            assert metrics("nv_inference_load_ratio_count") == 3
            assert metrics("nv_inference_request_histogram_us_sum") == pytest.approx(
                counted(plane, "m").total().success_ns / 1000
            )
            assert not metrics.labels("nv_cache_num_hits_per_model")
            assert not metrics.labels("nv_inference_first_response_histogram_ms_count")

    asyncio.run(main())


def test_the_quickest_way_is_counted_too() -> None:
    async def main() -> None:
        config = config_of(
            "m",
            max_batch_size=0,
            inputs=(InputSpec("INPUT0", FP32, (2,)),),
            outputs=(OutputSpec("OUTPUT0", FP32, (2,)),),
            scheduling=None,
        )
        async with serving_plane([(config, Recorder())]) as plane:
            for _ in range(5):
                assert plane.answer(InferRequest("m", [Tensor.of("INPUT0", np.zeros(2, np.float32))])) is not None
            metrics = await scrape(metrics_of(plane))
            assert metrics("nv_inference_request_success") == metrics("nv_inference_count") == 5
            for name in ("request", "queue", "compute"):
                assert metrics(f"nv_inference_{name}_histogram_us_count") == 5
            assert metrics.buckets("nv_inference_load_ratio")[0] == 5

    asyncio.run(main())


def test_those_that_wait_are_pending() -> None:
    async def main() -> None:
        gate = Gate()
        config = config_of(
            "m",
            max_batch_size=1,
            instance_groups=(InstanceGroup("m", runs="thread"),),
            scheduling=DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=3)),
        )
        async with serving_plane([(config, gate)]) as plane:
            metrics = metrics_of(plane)
            requests = [submit(plane, "m", INPUT0=row(n)) for n in range(1)]
            await gate.entered()
            requests += [submit(plane, "m", INPUT0=row(n)) for n in range(3)]
            with pytest.raises(Unavailable):
                submit(plane, "m", INPUT0=row())
            requests[2].pending.cancel()
            scraped = await scrape(metrics)
            assert scraped("nv_inference_pending_request_count") == 2
            assert scraped("nv_inference_request_failure", reason="REJECTED") == 1
            assert scraped("nv_inference_request_failure", reason="CANCELED") == 1
            gate.let(3)
            await answers([requests[0], requests[1], requests[3]])
            assert (await scrape(metrics))("nv_inference_pending_request_count") == 0

    asyncio.run(main())


def test_the_cache_of_a_model() -> None:
    async def main() -> None:
        models = [(config_of("kept", response_cache=True), Recorder()), (config_of("plain"), Recorder())]
        async with serving_plane(models, cache=ResponseCache(1_000_000)) as plane:
            for _ in range(3):
                await ask(plane, "kept", INPUT0=row(1))
            metrics = await scrape(metrics_of(plane))
            assert metrics.labels("nv_cache_num_hits_per_model") == [{"model": "kept", "version": "1"}]
            assert metrics("nv_cache_num_hits_per_model") == 2
            assert metrics("nv_cache_num_misses_per_model") == 1
            assert metrics("nv_inference_request_success", model="kept") == 3
            assert metrics("nv_inference_count", model="kept") == 1  # hits are no inferences
            assert metrics("nv_inference_compute_histogram_us_count", model="kept") == 1

    asyncio.run(main())


def test_tags_become_labels() -> None:
    async def main() -> None:
        tags = {"team": "vision", "a-b": 'say "hi"\\\n', "a.b": "second", "_x": "1", "": "no name", "%d": "100%"}
        async with serving_plane([(config_of("m", metric_tags=tags), Recorder())]) as plane:
            for wanted in Format:
                metrics = await scrape(metrics_of(plane), wanted)
                expected = {
                    "model": "m",
                    "version": "1",
                    "_team": "vision",
                    "_a_b": 'say "hi"\\\n',
                    "_x": "1",
                    "_d": "100%",
                }
                assert metrics.labels("nv_inference_count") == [expected]
                assert metrics.labels("nv_inference_request_histogram_us_count") == [expected]

    asyncio.run(main())


def test_an_ensemble_is_a_model_among_others() -> None:
    async def main() -> None:
        models = [
            (config_of("double"), Recorder(lambda rows: rows * 2)),
            ensemble(step("double", "INPUT0=IN", "OUTPUT0=OUT")),
        ]
        async with serving_plane(models) as plane:
            await ask(plane, "ensemble", IN=row(2))
            metrics = await scrape(metrics_of(plane))
            for model in ("double", "ensemble"):
                assert metrics("nv_inference_count", model=model) == 1
                assert metrics("nv_inference_compute_histogram_us_count", model=model) == 1
                assert metrics("nv_inference_pending_request_count", model=model) == 0

    asyncio.run(main())


class DecoupledModel:
    """A decoupled model: as many answers as INPUT0 says; for 0 none."""

    def execute(self, works: Any, finished: Any) -> None:
        for work in works:
            count = int(work.request.inputs[0].array.item())
            for _ in range(count):
                work.reply([Tensor.of("OUTPUT0", row())], final=False)
            work.reply(None)
        finished()

    def close(self) -> None:
        pass


def buckets(*bounds: float) -> Any:
    """A configuration's `model_metrics`, as far as it is read."""
    control = SimpleNamespace(
        metric_identifier=SimpleNamespace(family="nv_inference_first_response_histogram_ms"),
        histogram_options=SimpleNamespace(buckets=bounds),
    )
    return SimpleNamespace(model_metrics=SimpleNamespace(metric_control=[control]))


def test_the_first_response_of_decoupled_models() -> None:
    async def main() -> None:
        models = [
            (config_of("plain", decoupled=True), DecoupledModel()),
            (config_of("own", decoupled=True, proto=buckets(1, 60_000)), DecoupledModel()),
        ]
        async with serving_plane(models) as plane:
            for model in ("plain", "own"):
                for count in (3, 1, 0):
                    await Streamed(plane, model, INPUT0=row(count)).all()
            name = "nv_inference_first_response_histogram_ms"
            assert name not in (await scrape(metrics_of(plane))).types
            metrics = await scrape(metrics_of(plane, replace(QUIET, first_response_histogram=True)))
            assert {labels["le"] for labels in metrics.labels(f"{name}_bucket") if labels["model"] == "plain"} == {
                "100.0",
                "500.0",
                "2000.0",
                "5000.0",
                "+Inf",
            }
            assert {labels["le"] for labels in metrics.labels(f"{name}_bucket") if labels["model"] == "own"} == {
                "1.0",
                "60000.0",
                "+Inf",
            }
            for model in ("plain", "own"):
                assert metrics(f"{name}_count", model=model) == 2  # one had no response at all
                assert metrics("nv_inference_request_success", model=model) == 3

    asyncio.run(main())


def test_wrong_buckets_are_the_configuration_s_fault() -> None:
    async def main() -> None:
        with pytest.raises(InvalidArgument, match="model_metrics of model 'm'"):
            async with serving_plane([(config_of("m", decoupled=True, proto=buckets(-1)), DecoupledModel())]):
                pass

    asyncio.run(main())


def test_summaries_are_there_when_enabled() -> None:
    async def main() -> None:
        settings = replace(QUIET, summary_latencies=True, summary_quantiles=(0.5, 0.99))
        engine = open_engine(EngineSettings(summary_quantiles=settings.engine_quantiles))
        await engine.start()
        for _ in range(3):
            await ask(engine.plane, "identity", INPUT0=row())
        metrics = await scrape(Metrics(engine.plane, engine.metrics, settings))
        for part in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
            name = f"nv_inference_{part}_summary_us"
            assert metrics.types[name] == "summary"
            assert metrics(f"{name}_count", model="identity") == 3
            quantiles = [labels["quantile"] for labels in metrics.labels(name) if labels["model"] == "identity"]
            assert quantiles == ["0.5", "0.99"]
        assert metrics("nv_inference_request_summary_us", model="identity", quantile="0.5") > 0
        await engine.close(1)

    asyncio.run(main())


class FakeSampler:
    """In place of the thread that looks at GPUs."""

    is_ready = True
    samples = ()

    def __init__(self, *uuids: str) -> None:
        self.gpu_uuids = uuids


@pytest.mark.parametrize(
    ("gpus", "label"), [((0,), "GPU-a"), ((1,), "GPU-b"), ((0, 1), None), ((7,), None), ((), None)]
)
def test_a_model_on_one_gpu_has_its_uuid(gpus: tuple[int, ...], label: str | None) -> None:
    async def main() -> None:
        group = InstanceGroup("m", kind="gpu", gpus=gpus) if gpus else InstanceGroup("m")
        async with serving_plane([(config_of("m", instance_groups=(group,)), Recorder())]) as plane:
            metrics = await scrape(metrics_of(plane, sampler=FakeSampler("GPU-a", "GPU-b")))
            for name in ("nv_inference_count", "nv_inference_pending_request_count", "nv_model_load_duration_secs"):
                (labels,) = metrics.labels(name)
                assert labels.get("gpu_uuid") == label

    asyncio.run(main())


MODEL = """
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            self.seen = pb_utils.MetricFamily("my_rows", "Rows seen.", pb_utils.MetricFamily.COUNTER).Metric({"kind": "x"})
            try:
                pb_utils.MetricFamily("nv_inference_count", "Mine.", pb_utils.MetricFamily.COUNTER).Metric({})
                self.refused = 0
            except pb_utils.TritonModelException as error:
                self.refused = "clashes" in str(error)
        def execute(self, requests):
            self.seen.increment(len(requests))
            return [
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() + self.refused)]
                )
                for r in requests
            ]
"""
CONFIG = """
    backend: "python"
    max_batch_size: 4
    input { name: "IN" data_type: TYPE_INT64 dims: 1 }
    output { name: "OUT" data_type: TYPE_INT64 dims: 1 }
    metric_tags { key: "team" value: "a" }
"""


def test_a_python_model_s_own_metrics_and_a_reload(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "1" / "model.py").write_text(textwrap.dedent(MODEL))
        (tmp_path / "m" / "config.pbtxt").write_text(textwrap.dedent(CONFIG))
        repository = RepositorySettings(mode="explicit", load_models=("m",))
        engine = open_engine(EngineSettings((tmp_path,), repository, gpus=0))
        metrics = Metrics(engine.plane, engine.metrics, QUIET)
        await engine.start()
        try:
            response = await ask(engine.plane, "m", IN=row(3))
            assert response.outputs[0].array.item() == 4  # a model cannot take our names
            scraped = await scrape(metrics)
            assert scraped("my_rows", kind="x") == 1
            assert scraped("nv_inference_count", model="m", _team="a") == 1
            assert scraped("nv_model_load_duration_secs", model="m") > 0
            config = textwrap.dedent(CONFIG).replace('"a"', '"b"')
            (tmp_path / "m" / "config.pbtxt").write_text(config)
            await engine.plane.load("m")
            await ask(engine.plane, "m", IN=row(3))
            scraped = await scrape(metrics)
            assert scraped.labels("nv_inference_count") == [{"model": "m", "version": "1", "_team": "b"}]
            assert scraped("nv_inference_count") == 2  # it goes on counting
            await engine.plane.unload("m")
            scraped = await scrape(metrics)
            assert scraped("nv_inference_count", model="m") == 2
            assert not scraped.labels("nv_inference_pending_request_count")
        finally:
            await engine.close(5)

    asyncio.run(main())


def test_one_registry_one_metrics() -> None:
    async def main() -> None:
        registry = Registry(SystemClock())
        plane = await builtin_plane()
        metrics_of(plane, registry=registry)
        with pytest.raises(ValueError, match="clashes"):
            registry.gauge("nv_gpu_utilization", "Mine.")
        with pytest.raises(ValueError, match="clashes"):
            registry.counter("nv_inference_load_ratio_count", "Mine.")
        with pytest.raises(ValueError, match="clashes"):
            Metrics(plane, registry, MetricsSettings())

    asyncio.run(main())
