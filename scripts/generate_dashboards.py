# SPDX-License-Identifier: Apache-2.0
"""Write the Grafana dashboards in `deploy/grafana/` from the tables of panels below; `--check` fails on a difference.

Run by hand after a table has changed and, with `--check`, by `make check`. `tests/deploy` checks that every metric and label
in the dashboards is one that Headrace emits.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from generated_files import write_or_check

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "grafana"
SCHEMA_VERSION = 39
"""Of the classic dashboard model. Grafana migrates dashboards of older numbers when it loads them."""
WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHTS = {"timeseries": 8, "stat": 4}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

SELECTORS = {
    "MODEL": 'job=~"$job",instance=~"$instance",model=~"$model",version=~"$version"',
    "INSTANCE": 'job=~"$job",instance=~"$instance"',
    "SERVERS": 'job=~"$server_job"',
}
"""In an expression, `{MODEL}` and `{MODEL,reason="x"}` stand for these label matchers."""
_SELECTOR = re.compile(r"\{(" + "|".join(SELECTORS) + r")\b")


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: expressions with their legends."""

    title: str
    unit: str
    """One of Grafana's unit ids."""
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    stacked: bool = False
    max: float | None = None
    min: float | None = 0


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: rows of panels, and variables as (name, label, query)."""

    uid: str
    title: str
    help: str
    variables: tuple[tuple[str, str, str], ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def _stat(title: str, unit: str, expression: str, help: str = "", width: int = 4) -> Panel:
    return Panel(title, unit, ((expression, ""),), help, "stat", width)


def _one(title: str, unit: str, expression: str, legend: str, help: str = "", **more: Any) -> Panel:
    return Panel(title, unit, ((expression, legend),), help, **more)


def _quantiles(title: str, unit: str, bucket: str, help: str = "", scale: str = "", width: int = 8) -> Panel:
    """p50, p95 and p99 over all series of a histogram. bucket: its `_bucket` series with a selector."""
    queries = tuple(
        (f"histogram_quantile(0.{percent}, sum by (le) (rate({bucket}[$__rate_interval]))){scale}", f"p{percent}")
        for percent in (50, 95, 99)
    )
    return Panel(title, unit, queries, help, width=width)


def _quantile_by(
    label: str, title: str, unit: str, percent: int, bucket: str, help: str = "", scale: str = ""
) -> Panel:
    """One quantile for each value of a label."""
    total = f"sum by ({label}, le) (rate({bucket}[$__rate_interval]))"
    return _one(title, unit, f"histogram_quantile(0.{percent}, {total}){scale}", f"{{{{{label}}}}}", help)


def _rate_by(label: str, title: str, unit: str, series: str, help: str = "", **more: Any) -> Panel:
    """The rate of a counter for each value of one or two labels."""
    legend = " ".join(f"{{{{{name}}}}}" for name in label.split(", "))
    return _one(title, unit, f"sum by ({label}) (rate({series}[$__rate_interval]))", legend, help, **more)


def _ratio_by(label: str, title: str, part: str, whole: str, help: str = "", unit: str = "percentunit") -> Panel:
    """The rate of one counter divided by that of another, for each value of a label."""
    expression = (
        f"sum by ({label}) (rate({part}[$__rate_interval])) / sum by ({label}) (rate({whole}[$__rate_interval]))"
    )
    return _one(title, unit, expression, f"{{{{{label}}}}}", help, max=1 if unit == "percentunit" else None)


_FAILED = 'nv_inference_request_failure{MODEL,reason=~"REJECTED|BACKEND"}'
_ALL_SERVERS = "label_values(nv_pinned_memory_pool_total_bytes, job)"
_LOADED = "count by (job, model) (nv_model_load_duration_secs{MODEL})"
_LOADED_BEFORE = "count by (job, model) (nv_model_load_duration_secs{MODEL} offset 1h)"

SERVER = Dashboard(
    uid="headrace-server",
    title="Headrace / Server",
    help="Requests, latency, batches, cache and machine of `headrace serve`.",
    variables=(
        # Every server has this metric, whatever its options and models.
        ("job", "Job", _ALL_SERVERS),
        ("instance", "Instance", 'label_values(nv_pinned_memory_pool_total_bytes{job=~"$job"}, instance)'),
        ("model", "Model", "label_values(nv_inference_request_success{INSTANCE}, model)"),
        ("version", "Version", 'label_values(nv_inference_request_success{INSTANCE,model=~"$model"}, version)'),
    ),
    rows=(
        (
            "Overview",
            (
                _stat("Servers up", "short", "sum(up{INSTANCE})"),
                _stat("Model versions loaded", "short", "count(nv_model_load_duration_secs{MODEL}) or vector(0)"),
                _stat(
                    "Models no longer loaded",
                    "short",
                    f"count({_LOADED_BEFORE} unless {_LOADED}) or vector(0)",
                    "Models that a job served one hour ago and does not serve now: unloaded, or failed to load.",
                ),
                _stat("Requests", "reqps", "sum(rate(nv_inference_request_success{MODEL}[$__rate_interval]))"),
                _stat(
                    "Error ratio",
                    "percentunit",
                    f"sum(rate({_FAILED}[$__rate_interval])) / (sum(rate({_FAILED}[$__rate_interval]))"
                    " + sum(rate(nv_inference_request_success{MODEL}[$__rate_interval])))",
                    "Rejected requests and failures of models. Cancelled and invalid requests are not counted.",
                ),
                _stat("Requests waiting", "short", "sum(nv_inference_pending_request_count{MODEL})"),
            ),
        ),
        (
            "Requests",
            (
                _rate_by("model", "Requests per second by model", "reqps", "nv_inference_request_success{MODEL}"),
                _rate_by(
                    "model, reason",
                    "Failed requests per second",
                    "reqps",
                    "nv_inference_request_failure{MODEL}",
                    "REJECTED: the queue was full or the request waited too long. CANCELED: the client left. "
                    "BACKEND: the model failed. OTHER: the request does not fit the model.",
                ),
                _one(
                    "Error ratio by model",
                    "percentunit",
                    f"sum by (model) (rate({_FAILED}[$__rate_interval])) / "
                    f"(sum by (model) (rate({_FAILED}[$__rate_interval]))"
                    " + sum by (model) (rate(nv_inference_request_success{MODEL}[$__rate_interval])))",
                    "{{model}}",
                    "Rejected requests and failures of models. Cancelled and invalid requests are not counted.",
                    max=1,
                ),
                _one(
                    "Requests in flight by model (mean)",
                    "short",
                    "sum by (model) (rate(nv_inference_request_duration_us{MODEL}[$__rate_interval])) / 1e6",
                    "{{model}}",
                    "Total duration of the requests that ended, divided by the time in which they ended.",
                ),
                _one(
                    "Requests waiting by model",
                    "short",
                    "sum by (model) (nv_inference_pending_request_count{MODEL})",
                    "{{model}}",
                    "Received and not being computed yet. A number that keeps growing means too little capacity.",
                ),
                Panel(
                    "Requests refused before a model",
                    "reqps",
                    (
                        ("sum by (reason) (rate(headrace_shed_total{INSTANCE}[$__rate_interval]))", "shed: {{reason}}"),
                        (
                            "sum by (by) (rate(headrace_rate_limited_total{INSTANCE}[$__rate_interval]))",
                            "rate limit: {{by}}",
                        ),
                        (
                            "sum by (reason) (rate(headrace_unauthorized_total{INSTANCE}[$__rate_interval]))",
                            "unauthorized: {{reason}}",
                        ),
                    ),
                    "Too many requests in flight, over a rate limit, or without a valid API key.",
                ),
            ),
        ),
        (
            "Latency",
            (
                _quantiles(
                    "Latency of requests", "s", "nv_inference_request_histogram_us_bucket{MODEL}", scale=" / 1e6"
                ),
                _quantile_by(
                    "model",
                    "Latency by model (p99)",
                    "s",
                    99,
                    "nv_inference_request_histogram_us_bucket{MODEL}",
                    scale=" / 1e6",
                ),
                _quantiles("Time in the queue", "s", "nv_inference_queue_histogram_us_bucket{MODEL}", scale=" / 1e6"),
                _quantile_by(
                    "model",
                    "Time in the queue by model (p99)",
                    "s",
                    99,
                    "nv_inference_queue_histogram_us_bucket{MODEL}",
                    scale=" / 1e6",
                ),
                _quantile_by(
                    "model",
                    "Compute time by model (p99)",
                    "s",
                    99,
                    "nv_inference_compute_histogram_us_bucket{MODEL}",
                    scale=" / 1e6",
                ),
                Panel(
                    "Where the time goes",
                    "short",
                    tuple(
                        (f"sum(rate(nv_inference_{part}_duration_us{{MODEL}}[$__rate_interval])) / 1e6", legend)
                        for part, legend in (
                            ("queue", "queue"),
                            ("compute_input", "join the batch"),
                            ("compute_infer", "run the model"),
                            ("compute_output", "split the batch"),
                        )
                    ),
                    "Requests that are in each stage at once, on average.",
                    stacked=True,
                ),
                _quantile_by(
                    "model",
                    "Time to the first response, decoupled models (p95)",
                    "ms",
                    95,
                    "nv_inference_first_response_histogram_ms_bucket{MODEL}",
                ),
            ),
        ),
        (
            "Batches and response cache",
            (
                _ratio_by(
                    "model",
                    "Batch size by model (mean)",
                    "nv_inference_count{MODEL}",
                    "nv_inference_exec_count{MODEL}",
                    "Small batches and long queue times: add instances, or turn on dynamic_batching.",
                    unit="short",
                ),
                _rate_by("model", "Executions per second by model", "ops", "nv_inference_exec_count{MODEL}"),
                _rate_by("model", "Inferences per second by model", "ops", "nv_inference_count{MODEL}"),
                _one(
                    "Cache hit ratio by model",
                    "percentunit",
                    "sum by (model) (rate(nv_cache_num_hits_per_model{MODEL}[$__rate_interval])) / "
                    "(sum by (model) (rate(nv_cache_num_hits_per_model{MODEL}[$__rate_interval]))"
                    " + sum by (model) (rate(nv_cache_num_misses_per_model{MODEL}[$__rate_interval])))",
                    "{{model}}",
                    "Models with response_cache only.",
                    max=1,
                ),
                _one(
                    "Memory of the response cache",
                    "bytes",
                    "sum by (instance) (headrace_response_cache_used_bytes{INSTANCE})",
                    "{{instance}}",
                ),
                Panel(
                    "Entries removed from the response cache",
                    "ops",
                    (
                        (
                            "sum(rate(headrace_response_cache_evictions_total{INSTANCE}[$__rate_interval]))",
                            "to make room",
                        ),
                        ("sum(rate(headrace_response_cache_expired_total{INSTANCE}[$__rate_interval]))", "too old"),
                    ),
                ),
            ),
        ),
        (
            "Models and traffic splits",
            (
                _one(
                    "Model versions loaded by instance",
                    "short",
                    "count by (instance) (nv_model_load_duration_secs{MODEL})",
                    "{{instance}}",
                ),
                _one(
                    "Duration of the last load by model",
                    "s",
                    "max by (model, version) (nv_model_load_duration_secs{MODEL})",
                    "{{model}} {{version}}",
                ),
                _rate_by(
                    "model, version",
                    "Requests by version of a split",
                    "reqps",
                    "headrace_traffic_requests_total{MODEL}",
                ),
                _rate_by(
                    "model, version", "Errors by version of a split", "reqps", "headrace_traffic_errors_total{MODEL}"
                ),
                _one(
                    "Rollbacks by version of a split",
                    "short",
                    "max by (model, version) (headrace_traffic_rollbacks_total{MODEL})",
                    "{{model}} {{version}}",
                    "Times that the server stopped sending requests to a version because it failed too often.",
                ),
                _rate_by(
                    "model, outcome",
                    "Shadow requests by outcome",
                    "reqps",
                    "headrace_traffic_shadow_requests_total{MODEL}",
                ),
            ),
        ),
        (
            "Process and machine",
            (
                _rate_by("instance", "CPU cores used", "short", "process_cpu_seconds_total{INSTANCE}"),
                _one(
                    "Resident memory",
                    "bytes",
                    "sum by (instance) (process_resident_memory_bytes{INSTANCE})",
                    "{{instance}}",
                ),
                _one(
                    "File descriptors in use",
                    "percentunit",
                    "sum by (instance) (process_open_fds{INSTANCE}) / sum by (instance) (process_max_fds{INSTANCE})",
                    "{{instance}}",
                    max=1,
                ),
                _one(
                    "CPU utilization of the machine",
                    "percentunit",
                    "max by (instance) (nv_cpu_utilization{INSTANCE})",
                    "{{instance}}",
                    max=1,
                ),
                _one(
                    "Memory of the machine in use",
                    "percentunit",
                    "max by (instance) (nv_cpu_memory_used_bytes{INSTANCE} / nv_cpu_memory_total_bytes{INSTANCE})",
                    "{{instance}}",
                    max=1,
                ),
                _one(
                    "Uptime",
                    "s",
                    "time() - min by (instance) (process_start_time_seconds{INSTANCE})",
                    "{{instance}}",
                ),
                _one(
                    "GPU utilization",
                    "percentunit",
                    "max by (instance, gpu_uuid) (nv_gpu_utilization{INSTANCE})",
                    "{{instance}} {{gpu_uuid}}",
                    max=1,
                ),
                _one(
                    "GPU memory in use",
                    "percentunit",
                    "max by (instance, gpu_uuid) (nv_gpu_memory_used_bytes{INSTANCE} / nv_gpu_memory_total_bytes{INSTANCE})",
                    "{{instance}} {{gpu_uuid}}",
                    max=1,
                ),
                _one(
                    "GPU power",
                    "watt",
                    "max by (instance, gpu_uuid) (nv_gpu_power_usage{INSTANCE})",
                    "{{instance}} {{gpu_uuid}}",
                ),
            ),
        ),
    ),
)

LANGUAGE_MODELS = Dashboard(
    uid="headrace-language-models",
    title="Headrace / Language models",
    help="Models of the `llm` backend: time to first token, inter-token latency, KV cache, tokens.",
    variables=(
        ("job", "Job", "label_values(headrace_llm_steps_total, job)"),
        ("instance", "Instance", 'label_values(headrace_llm_steps_total{job=~"$job"}, instance)'),
        ("model", "Model", "label_values(headrace_llm_steps_total{INSTANCE}, model)"),
        ("version", "Version", 'label_values(headrace_llm_steps_total{INSTANCE,model=~"$model"}, version)'),
    ),
    rows=(
        (
            "Overview",
            (
                _stat("Running sequences", "short", "sum(headrace_llm_sequences_running{MODEL})"),
                _stat("Waiting requests", "short", "sum(headrace_llm_requests_waiting{MODEL})"),
                _stat("KV cache in use (highest)", "percentunit", "max(headrace_llm_kv_cache_usage_ratio{MODEL})"),
                _stat(
                    "Generated tokens per second",
                    "short",
                    "sum(rate(headrace_llm_generated_tokens_total{MODEL}[$__rate_interval]))",
                ),
                _stat(
                    "Prefix cache hit rate",
                    "percentunit",
                    "sum(rate(headrace_llm_prefix_cache_hit_tokens_total{MODEL}[$__rate_interval])) / "
                    "sum(rate(headrace_llm_prefix_cache_looked_tokens_total{MODEL}[$__rate_interval]))",
                ),
                _stat(
                    "Requests",
                    "reqps",
                    "sum(rate(headrace_llm_time_to_first_token_seconds_count{MODEL}[$__rate_interval]))",
                    "Requests that have got their first token.",
                ),
            ),
        ),
        (
            "Latency",
            (
                _quantiles("Time to first token", "s", "headrace_llm_time_to_first_token_seconds_bucket{MODEL}"),
                _quantile_by(
                    "model",
                    "Time to first token by model (p95)",
                    "s",
                    95,
                    "headrace_llm_time_to_first_token_seconds_bucket{MODEL}",
                ),
                _ratio_by(
                    "model",
                    "Time to first token by model (mean)",
                    "headrace_llm_time_to_first_token_seconds_sum{MODEL}",
                    "headrace_llm_time_to_first_token_seconds_count{MODEL}",
                    unit="s",
                ),
                _quantiles("Inter-token latency", "s", "headrace_llm_inter_token_latency_seconds_bucket{MODEL}"),
                _quantile_by(
                    "model",
                    "Inter-token latency by model (p95)",
                    "s",
                    95,
                    "headrace_llm_inter_token_latency_seconds_bucket{MODEL}",
                ),
                _ratio_by(
                    "model",
                    "Inter-token latency by model (mean)",
                    "headrace_llm_inter_token_latency_seconds_sum{MODEL}",
                    "headrace_llm_inter_token_latency_seconds_count{MODEL}",
                    unit="s",
                ),
            ),
        ),
        (
            "Scheduler and KV cache",
            (
                _one(
                    "Running sequences by model",
                    "short",
                    "sum by (model) (headrace_llm_sequences_running{MODEL})",
                    "{{model}}",
                ),
                _one(
                    "Waiting requests by model",
                    "short",
                    "sum by (model) (headrace_llm_requests_waiting{MODEL})",
                    "{{model}}",
                ),
                _one(
                    "KV cache in use",
                    "percentunit",
                    "max by (instance, model) (headrace_llm_kv_cache_usage_ratio{MODEL})",
                    "{{instance}} {{model}}",
                    "Full, with requests waiting: raise kv_cache_bytes or add a replica.",
                    max=1,
                ),
                _ratio_by(
                    "model",
                    "Prefix cache hit rate by model",
                    "headrace_llm_prefix_cache_hit_tokens_total{MODEL}",
                    "headrace_llm_prefix_cache_looked_tokens_total{MODEL}",
                    "Prompt tokens found in the prefix cache, of those looked up.",
                ),
                _rate_by(
                    "model",
                    "Preemptions per second by model",
                    "ops",
                    "headrace_llm_preemptions_total{MODEL}",
                    "Sequences that lost their KV cache pages to others and are computed again.",
                ),
                _rate_by("model", "Steps per second by model", "ops", "headrace_llm_steps_total{MODEL}"),
            ),
        ),
        (
            "Tokens",
            (
                _rate_by(
                    "model",
                    "Generated tokens per second by model",
                    "short",
                    "headrace_llm_generated_tokens_total{MODEL}",
                ),
                _rate_by(
                    "model", "Prompt tokens per second by model", "short", "headrace_llm_prompt_tokens_total{MODEL}"
                ),
                _ratio_by(
                    "model",
                    "Tokens per step by model",
                    "headrace_llm_generated_tokens_total{MODEL}",
                    "headrace_llm_steps_total{MODEL}",
                    "How many tokens a step adds, on average: one for each sequence, and accepted drafts.",
                    unit="short",
                ),
                _ratio_by(
                    "model",
                    "Accepted share of drafted tokens by model",
                    "headrace_llm_speculation_accepted_tokens_total{MODEL}",
                    "headrace_llm_speculation_draft_tokens_total{MODEL}",
                    "Speculative decoding: drafts below a fifth or so are switched off by themselves.",
                ),
            ),
        ),
        (
            "KV transfer between prefill and decode servers",
            (
                _rate_by("side, way", "Transferred prompts per second", "ops", "headrace_llm_handings_total{MODEL}"),
                _rate_by("side", "Transferred bytes per second", "Bps", "headrace_llm_handing_bytes_total{MODEL}"),
                _quantile_by("side", "Time of a transfer (p95)", "s", 95, "headrace_llm_handing_seconds_bucket{MODEL}"),
                _rate_by(
                    "side, reason",
                    "Prompts computed without a transfer",
                    "ops",
                    "headrace_llm_handing_fallbacks_total{MODEL}",
                ),
            ),
        ),
    ),
)

_REQUESTS = "headrace_router_requests_total{INSTANCE}"
_ERRORS = 'headrace_router_requests_total{INSTANCE,outcome=~"erred|refused|failed"}'
_BACKENDS = (
    ("job", "Job", "label_values(headrace_router_leaving, job)"),
    ("instance", "Instance", 'label_values(headrace_router_leaving{job=~"$job"}, instance)'),
    ("server_job", "Job of the servers", _ALL_SERVERS),
)

ROUTER = Dashboard(
    uid="headrace-router",
    title="Headrace / Router",
    help="`headrace router`: requests, retries, health of the backends, latency, choices, scale to zero.",
    variables=_BACKENDS,
    rows=(
        (
            "Overview",
            (
                _stat("Requests", "reqps", f"sum(rate({_REQUESTS}[$__rate_interval]))"),
                _stat(
                    "Error ratio",
                    "percentunit",
                    f"sum(rate({_ERRORS}[$__rate_interval])) / sum(rate({_REQUESTS}[$__rate_interval]))",
                    "Responses with status 5xx, and requests without a response.",
                ),
                _stat("Backends up", "short", "sum(headrace_router_backend_up{INSTANCE}) or vector(0)"),
                _stat(
                    "Backends down",
                    "short",
                    "count(headrace_router_backend_up{INSTANCE} == 0) or vector(0)",
                ),
                _stat("Open requests", "short", "sum(headrace_router_outstanding{INSTANCE})"),
                _stat(
                    "Retries",
                    "reqps",
                    "sum(rate(headrace_router_retries_total{INSTANCE}[$__rate_interval]))",
                ),
            ),
        ),
        (
            "Requests",
            (
                _rate_by("backend", "Requests per second by backend", "reqps", _REQUESTS),
                _rate_by(
                    "outcome",
                    "Requests per second by outcome",
                    "reqps",
                    _REQUESTS,
                    "refused: 502, 503 or 504. erred: another 5xx. failed: no response. cancelled: the client left.",
                ),
                _ratio_by("backend", "Error ratio by backend", _ERRORS, _REQUESTS),
                Panel(
                    "Retries per second",
                    "reqps",
                    (
                        (
                            "sum by (backend) (rate(headrace_router_retries_total{INSTANCE}[$__rate_interval]))",
                            "to {{backend}}",
                        ),
                        (
                            "sum(rate(headrace_router_retries_refused_total{INSTANCE}[$__rate_interval]))",
                            "refused for lack of budget",
                        ),
                    ),
                ),
                _rate_by("outcome", "Hedged requests by outcome", "reqps", "headrace_router_hedges_total{INSTANCE}"),
                _rate_by("policy, why", "Choices by reason", "reqps", "headrace_router_decisions_total{INSTANCE}"),
            ),
        ),
        (
            "Backends",
            (
                _one(
                    "Backend up",
                    "bool_yes_no",
                    "min by (backend) (headrace_router_backend_up{INSTANCE})",
                    "{{backend}}",
                    "No: at least one router sends it no requests.",
                    max=1,
                ),
                _one(
                    "Open requests by backend",
                    "short",
                    "sum by (backend) (headrace_router_outstanding{INSTANCE})",
                    "{{backend}}",
                ),
                _one(
                    "Connections by backend",
                    "short",
                    "sum by (backend) (headrace_router_connections{INSTANCE})",
                    "{{backend}}",
                ),
                _one(
                    "Draining backends",
                    "short",
                    "sum by (instance) (headrace_router_leaving{INSTANCE})",
                    "{{instance}}",
                ),
                _rate_by(
                    "revision, outcome",
                    "Requests by revision",
                    "reqps",
                    "headrace_router_revision_requests_total{INSTANCE}",
                ),
            ),
        ),
        (
            "Latency",
            (
                _quantiles(
                    "Latency of backends",
                    "s",
                    "headrace_router_backend_seconds_bucket{INSTANCE}",
                    "From the choice of a backend to the end of its response.",
                ),
                _quantile_by(
                    "backend",
                    "Latency by backend (p95)",
                    "s",
                    95,
                    "headrace_router_backend_seconds_bucket{INSTANCE}",
                ),
                _one(
                    "Time added outside the models (mean)",
                    "s",
                    "sum(rate(headrace_router_backend_seconds_sum{INSTANCE}[$__rate_interval])) / "
                    "sum(rate(headrace_router_backend_seconds_count{INSTANCE}[$__rate_interval])) - "
                    "sum(rate(nv_inference_request_histogram_us_sum{SERVERS}[$__rate_interval])) / "
                    "sum(rate(nv_inference_request_histogram_us_count{SERVERS}[$__rate_interval])) / 1e6",
                    "router, network and HTTP",
                    "The routers' mean time of a request less the servers' mean time. Choose the job of the servers "
                    "behind these routers; requests that reach the servers another way make it wrong.",
                    min=None,
                ),
            ),
        ),
        (
            "Queue and scale to zero",
            (
                Panel(
                    "Requests that wait in the router",
                    "short",
                    (
                        ("sum by (instance) (headrace_router_queued_requests{INSTANCE})", "queued: {{instance}}"),
                        ("sum by (instance) (headrace_router_held_requests{INSTANCE})", "held: {{instance}}"),
                    ),
                    "Queued: every backend has max_outstanding requests. Held: the service is being started.",
                ),
                Panel(
                    "Waiting requests that were refused",
                    "reqps",
                    (
                        ("sum(rate(headrace_router_queue_refused_total{INSTANCE}[$__rate_interval]))", "queue"),
                        ("sum(rate(headrace_router_held_refused_total{INSTANCE}[$__rate_interval]))", "held"),
                    ),
                ),
                _quantiles("Cold start", "s", "headrace_router_wake_seconds_bucket{INSTANCE}"),
                _ratio_by(
                    "part",
                    "Parts of a cold start (mean)",
                    "headrace_router_wake_part_seconds_sum{INSTANCE}",
                    "headrace_router_wake_part_seconds_count{INSTANCE}",
                    unit="s",
                ),
            ),
        ),
        (
            "Prefill and decode",
            (
                _rate_by("outcome", "Prompts by outcome", "reqps", "headrace_router_handings_total{INSTANCE}"),
                _one(
                    "Prefill requests in flight (mean)",
                    "short",
                    "sum(rate(headrace_router_prefill_seconds_total{INSTANCE}[$__rate_interval]))",
                    "prefill",
                ),
            ),
        ),
    ),
)

FLEET = Dashboard(
    uid="headrace-fleet",
    title="Headrace / Fleet",
    help="All services: replicas, scaling, rollouts, restarts; the operator, the model agents and the gateway. "
    "A service is one job of Prometheus.",
    variables=_BACKENDS,
    rows=(
        (
            "Overview",
            (
                _stat("Services", "short", "count(count by (job) (headrace_router_leaving{INSTANCE}))"),
                _stat(
                    "Services without a ready replica",
                    "short",
                    "count((max by (job) (headrace_router_backend_up{INSTANCE}) or "
                    "max by (job) (headrace_router_leaving{INSTANCE} * 0)) == 0) or vector(0)",
                    "Services that are scaled to zero are among them.",
                ),
                _stat(
                    "Services scaled to zero",
                    "short",
                    "count(max by (job) (headrace_router_active{INSTANCE}) == 0) or vector(0)",
                ),
                _stat("Servers up", "short", "sum(up{SERVERS}) or vector(0)"),
                _stat("Servers down", "short", "count(up{SERVERS} == 0) or vector(0)"),
                _stat("Operators that lead", "short", "sum(headrace_operator_leads) or vector(0)", "One, always."),
            ),
        ),
        (
            "Replicas and scaling",
            (
                Panel(
                    "Replicas by service",
                    "short",
                    (
                        (
                            "max by (job) (sum by (job, instance) (headrace_router_backend_up{INSTANCE}))",
                            "ready: {{job}}",
                        ),
                        (
                            "max by (job) (count by (job, instance) (headrace_router_backend_up{INSTANCE}))",
                            "all: {{job}}",
                        ),
                    ),
                    "As the routers see them: all backends, and those that get requests.",
                ),
                _one(
                    "Service active",
                    "bool_yes_no",
                    "max by (job) (headrace_router_active{INSTANCE})",
                    "{{job}}",
                    "No: scaled to zero.",
                    max=1,
                ),
                _one(
                    "Starts from zero in the last hour",
                    "short",
                    "sum by (job) (increase(headrace_router_wakes_total{INSTANCE}[1h]))",
                    "{{job}}",
                ),
                _quantile_by(
                    "job", "Cold start by service (p95)", "s", 95, "headrace_router_wake_seconds_bucket{INSTANCE}"
                ),
                _one(
                    "Requests held for a cold start",
                    "short",
                    "sum by (job) (headrace_router_held_requests{INSTANCE})",
                    "{{job}}",
                ),
                _one(
                    "Restarts of servers in the last hour",
                    "short",
                    "sum by (job, instance) (changes(process_start_time_seconds{SERVERS}[1h]))",
                    "{{job}} {{instance}}",
                ),
            ),
        ),
        (
            "Requests by service",
            (
                _rate_by("job", "Requests per second by service", "reqps", _REQUESTS),
                _ratio_by("job", "Error ratio by service", _ERRORS, _REQUESTS),
                _quantile_by(
                    "job", "Latency by service (p95)", "s", 95, "headrace_router_backend_seconds_bucket{INSTANCE}"
                ),
            ),
        ),
        (
            "Rollouts",
            (
                _rate_by(
                    "job, revision",
                    "Requests per second by revision",
                    "reqps",
                    "headrace_router_revision_requests_total{INSTANCE}",
                    stacked=True,
                ),
                _one(
                    "Error ratio by revision",
                    "percentunit",
                    'sum by (job, revision) (rate(headrace_router_revision_requests_total{INSTANCE,outcome="error"}'
                    "[$__rate_interval])) / sum by (job, revision) "
                    "(rate(headrace_router_revision_requests_total{INSTANCE}[$__rate_interval]))",
                    "{{job}} {{revision}}",
                    max=1,
                ),
                _one(
                    "Rollbacks of model versions",
                    "short",
                    "max by (job, model, version) (headrace_traffic_rollbacks_total{SERVERS})",
                    "{{job}} {{model}} {{version}}",
                    "Versions that a server's traffic split has taken out.",
                ),
            ),
        ),
        (
            "Operator",
            (
                _rate_by("outcome", "Reconciliations per second", "ops", "headrace_operator_reconciles_total"),
                _quantiles("Duration of a reconciliation", "s", "headrace_operator_reconcile_seconds_bucket"),
                _rate_by("kind", "Calls to the API server", "ops", "headrace_operator_api_calls_total"),
                _rate_by("kind, outcome", "Admission reviews", "ops", "headrace_operator_reviews_total"),
                _one(
                    "Webhook certificate expires in",
                    "s",
                    "min by (instance) ((headrace_operator_webhook_certificate_expiry_seconds > 0) - time())",
                    "{{instance}}",
                ),
            ),
        ),
        (
            "Model agents",
            (
                Panel(
                    "Downloads in the last hour",
                    "short",
                    (
                        ("sum(increase(model_agent_downloads_success_total[1h]))", "complete"),
                        (
                            "sum by (namespace, name) (increase(model_agent_downloads_failed_total[1h]))",
                            "failed: {{namespace}}/{{name}}",
                        ),
                    ),
                ),
                _rate_by("instance", "Downloaded bytes per second", "Bps", "model_agent_download_bytes_total"),
                _quantiles("Duration of a download", "s", "model_agent_download_duration_seconds_bucket"),
            ),
        ),
        (
            "Gateway",
            (
                _rate_by("status", "Responses per second by status", "reqps", "headrace_gateway_requests_total"),
                _quantiles("Latency of inference requests", "s", "headrace_gateway_inference_seconds_bucket"),
                Panel(
                    "Inference requests in flight, and services",
                    "short",
                    (
                        ("sum(headrace_gateway_inference_in_flight)", "requests in flight"),
                        ("sum(headrace_gateway_services_reached)", "services with recent requests"),
                    ),
                ),
                _one(
                    "Failed reconcile rounds in the last hour",
                    "short",
                    "sum by (instance) (increase(headrace_gateway_reconcile_failures_total[1h]))",
                    "{{instance}}",
                ),
            ),
        ),
    ),
)

DASHBOARDS = {
    "server.json": SERVER,
    "language-models.json": LANGUAGE_MODELS,
    "fleet.json": FLEET,
    "router.json": ROUTER,
}


def with_selectors(expression: str) -> str:
    """Replace `{MODEL` and the like by label matchers."""
    return _SELECTOR.sub(lambda match: "{" + SELECTORS[match[1]], expression)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana reads it."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.help,
        "tags": ["headrace"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [_LINKS],
        "templating": {"list": [_DATASOURCE_VARIABLE, *(_variable(*words) for words in dashboard.variables)]},
        "panels": _panels(dashboard.rows),
    }


_LINKS = {
    "type": "dashboards",
    "title": "Headrace",
    "tags": ["headrace"],
    "asDropdown": True,
    "includeVars": False,
    "keepTime": True,
    "targetBlank": False,
}
_DATASOURCE_VARIABLE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
    "current": {},
    "hide": 0,
    "includeAll": False,
    "multi": False,
    "options": [],
    "refresh": 1,
    "regex": "",
}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a variable with the values of a label. All is the default, and also matches series without the label."""
    query = with_selectors(query)
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": f"variable-{name}"},
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "allValue": ".*",
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def _panels(rows: Sequence[tuple[str, Sequence[Panel]]]) -> list[dict[str, Any]]:
    """Return the panels and the headings of rows, placed from left to right and from top to bottom."""
    placed: list[dict[str, Any]] = []
    top = 0
    for title, panels in rows:
        grid = {"x": 0, "y": top, "w": WIDTH, "h": 1}
        placed.append(
            {"id": len(placed) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []}
        )
        top, left, height = top + 1, 0, 0
        for panel in panels:
            if left + panel.width > WIDTH:
                top, left, height = top + height, 0, 0
            grid = {"x": left, "y": top, "w": panel.width, "h": HEIGHTS[panel.kind]}
            placed.append(_panel(len(placed) + 1, panel, grid))
            left, height = left + panel.width, max(height, HEIGHTS[panel.kind])
        top += height
    return placed


def _panel(number: int, panel: Panel, grid: dict[str, int]) -> dict[str, Any]:
    bounds = {"min": panel.min, "max": panel.max}
    defaults: dict[str, Any] = {"unit": panel.unit, **{name: at for name, at in bounds.items() if at is not None}}
    options: dict[str, Any]
    if panel.kind == "stat":
        options = {
            "colorMode": "none",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    else:
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.stacked else 0,
            "lineWidth": 1,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": stacking,
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": with_selectors(expression),
                "legendFormat": legend or "__auto",
                "range": True,
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Write, or compare."""
    fresh = {FOLDER / name: json.dumps(document(board), indent=2) + "\n" for name, board in DASHBOARDS.items()}
    return write_or_check(fresh, FOLDER.glob("*.json"))


if __name__ == "__main__":
    sys.exit(main())
