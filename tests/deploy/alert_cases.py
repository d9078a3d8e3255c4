# SPDX-License-Identifier: Apache-2.0
"""For each alert, series that make it fire; and series of healthy programs, with which none does.

Values are promtool's: `0+5x60` is a counter that grows by 5 a minute for an hour.
https://prometheus.io/docs/prometheus/latest/configuration/unit_testing_rules/#series
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """Series by minute, when to look, and the labels of the one alert that then fires."""

    series: dict[str, str]
    at: str
    labels: dict[str, str]


_JOB = 'job="headrace",instance="a:8002"'
_MODEL = f'{_JOB},model="m",version="1"'
_ROUTER = 'job="headrace-router",instance="r:9000"'
_OPERATOR = 'job="headrace-operator",instance="o:8080"'
_OF_JOB = {"job": "headrace"}
_OF_INSTANCE = {**_OF_JOB, "instance": "a:8002"}
_OF_MODEL = {**_OF_JOB, "model": "m"}
_OF_ROUTER = {"job": "headrace-router", "instance": "r:9000"}

FIRING: dict[str, Case] = {
    "HeadraceServerDown": Case({f"up{{{_JOB}}}": "1x5 0x10"}, "10m", _OF_INSTANCE),
    "HeadraceModelGone": Case(
        {f"nv_model_load_duration_secs{{{_MODEL}}}": "2x60 _x60", f"up{{{_JOB}}}": "1x120"}, "80m", _OF_MODEL
    ),
    "HeadraceNoModelLoaded": Case(
        {f"nv_pinned_memory_pool_total_bytes{{{_JOB}}}": "0x30", f"up{{{_JOB}}}": "1x30"}, "20m", _OF_INSTANCE
    ),
    "HeadraceErrorRatioHigh": Case(
        {
            f'nv_inference_request_failure{{{_MODEL},reason="BACKEND"}}': "0+10x30",
            f'nv_inference_request_failure{{{_MODEL},reason="OTHER"}}': "0x30",
            f"nv_inference_request_success{{{_MODEL}}}": "0+90x30",
        },
        "20m",
        _OF_MODEL,
    ),
    "HeadraceLatencyHigh": Case(
        {
            f'nv_inference_request_histogram_us_bucket{{{_MODEL},le="1000000"}}': "0+50x30",
            f'nv_inference_request_histogram_us_bucket{{{_MODEL},le="2500000"}}': "0+100x30",
            f'nv_inference_request_histogram_us_bucket{{{_MODEL},le="+Inf"}}': "0+100x30",
        },
        "20m",
        _OF_MODEL,
    ),
    "HeadraceQueueGrowing": Case({f"nv_inference_pending_request_count{{{_MODEL}}}": "0+5x60"}, "40m", _OF_MODEL),
    "HeadraceRequestsShed": Case({f'headrace_shed_total{{{_JOB},reason="full"}}': "0+60x40"}, "20m", _OF_INSTANCE),
    # The counter appears with its first rollback.
    "HeadraceVersionRolledBack": Case(
        {f"headrace_traffic_rollbacks_total{{{_MODEL}}}": "_x20 1x40"},
        "25m",
        {**_OF_INSTANCE, "model": "m", "version": "1"},
    ),
    "HeadraceRestarting": Case({f"process_start_time_seconds{{{_JOB}}}": "1x5 2x5 3x5 4x20"}, "20m", _OF_INSTANCE),
    "HeadraceDescriptorsLow": Case(
        {f"process_open_fds{{{_JOB}}}": "900x20", f"process_max_fds{{{_JOB}}}": "1000x20"}, "10m", _OF_INSTANCE
    ),
    "HeadraceMachineMemoryLow": Case(
        {f"nv_cpu_memory_used_bytes{{{_JOB}}}": "98x20", f"nv_cpu_memory_total_bytes{{{_JOB}}}": "100x20"},
        "15m",
        _OF_INSTANCE,
    ),
    "HeadraceKVCacheFull": Case(
        {
            f"headrace_llm_kv_cache_usage_ratio{{{_MODEL}}}": "0.99x20",
            f"headrace_llm_requests_waiting{{{_MODEL}}}": "3x20",
        },
        "10m",
        {**_OF_INSTANCE, "model": "m"},
    ),
    "HeadraceFirstTokenSlow": Case(
        {
            f'headrace_llm_time_to_first_token_seconds_bucket{{{_MODEL},le="5"}}': "0+50x30",
            f'headrace_llm_time_to_first_token_seconds_bucket{{{_MODEL},le="10"}}': "0+100x30",
            f'headrace_llm_time_to_first_token_seconds_bucket{{{_MODEL},le="+Inf"}}': "0+100x30",
        },
        "20m",
        _OF_MODEL,
    ),
    "HeadracePreemptions": Case(
        {f"headrace_llm_preemptions_total{{{_MODEL}}}": "0+60x40"}, "30m", {**_OF_INSTANCE, "model": "m"}
    ),
    "HeadraceNoReadyReplica": Case(
        # A router that knows no backend at all.
        {f"headrace_router_leaving{{{_ROUTER}}}": "0x10", f"headrace_router_active{{{_ROUTER}}}": "1x10"},
        "5m",
        _OF_ROUTER,
    ),
    "HeadraceBackendDown": Case(
        {
            f'headrace_router_backend_up{{{_ROUTER},backend="one"}}': "1x30",
            f'headrace_router_backend_up{{{_ROUTER},backend="two"}}': "0x30",
        },
        "15m",
        {**_OF_ROUTER, "backend": "two"},
    ),
    "HeadraceRouterErrorRatioHigh": Case(
        {
            f'headrace_router_requests_total{{{_ROUTER},backend="one",outcome="ok"}}': "0+90x30",
            f'headrace_router_requests_total{{{_ROUTER},backend="one",outcome="failed"}}': "0+10x30",
        },
        "20m",
        {"job": "headrace-router"},
    ),
    "HeadraceRetriesExhausted": Case(
        {f"headrace_router_retries_refused_total{{{_ROUTER}}}": "0+60x30"}, "20m", _OF_ROUTER
    ),
    "HeadraceWaitingRequestsRefused": Case(
        {f"headrace_router_queue_refused_total{{{_ROUTER}}}": "0+1x30"}, "20m", _OF_ROUTER
    ),
    "HeadraceRevisionFailing": Case(
        {
            f'headrace_router_revision_requests_total{{{_ROUTER},revision="old",outcome="ok"}}': "0+100x30",
            f'headrace_router_revision_requests_total{{{_ROUTER},revision="old",outcome="error"}}': "0x30",
            f'headrace_router_revision_requests_total{{{_ROUTER},revision="new",outcome="ok"}}': "0+5x30",
            f'headrace_router_revision_requests_total{{{_ROUTER},revision="new",outcome="error"}}': "0+5x30",
        },
        "20m",
        {"job": "headrace-router", "revision": "new"},
    ),
    "HeadraceOperatorWithoutLeader": Case(
        {f"headrace_operator_leads{{{_OPERATOR}}}": "1x5 0x20"}, "15m", {"job": "headrace-operator"}
    ),
    "HeadraceReconcileFailing": Case(
        {f'headrace_operator_reconciles_total{{{_OPERATOR},outcome="failed"}}': "0+1x60"},
        "40m",
        {"job": "headrace-operator"},
    ),
    "HeadraceWebhookCertificateExpires": Case(
        # promtool's time begins at 0, so this is five days from then.
        {f"headrace_operator_webhook_certificate_expiry_seconds{{{_OPERATOR}}}": f"{5 * 86400}x120"},
        "90m",
        {"job": "headrace-operator", "instance": "o:8080"},
    ),
    "HeadraceModelDownloadFailing": Case(
        {
            'model_agent_downloads_failed_total{job="headrace-model-agent",instance="n:1",model_type="base",'
            'namespace="models",name="big"}': "_x20 1x20"
        },
        "25m",
        {
            "job": "headrace-model-agent",
            "instance": "n:1",
            "model_type": "base",
            "namespace": "models",
            "name": "big",
        },
    ),
    "HeadraceGatewayReconcileFailing": Case(
        {'headrace_gateway_reconcile_failures_total{job="headrace-gateway",instance="g:1"}': "0+1x60"},
        "40m",
        {"job": "headrace-gateway", "instance": "g:1"},
    ),
}

HEALTHY: dict[str, str] = {
    f"up{{{_JOB}}}": "1x120",
    # Not of Headrace: nobody wants to hear of it here.
    'up{job="database",instance="d:1"}': "0x120",
    'process_open_fds{job="database",instance="d:1"}': "99x120",
    'process_max_fds{job="database",instance="d:1"}': "100x120",
    f"nv_pinned_memory_pool_total_bytes{{{_JOB}}}": "0x120",
    f"nv_model_load_duration_secs{{{_MODEL}}}": "2x120",
    # The other model was served by one server and is served by another one now.
    'nv_model_load_duration_secs{job="headrace",instance="a:8002",model="moved",version="1"}': "2x60 _x60",
    'nv_model_load_duration_secs{job="headrace",instance="b:8002",model="moved",version="1"}': "_x60 2x60",
    f'nv_inference_request_failure{{{_MODEL},reason="BACKEND"}}': "0+1x120",
    # Clients that leave, or send what does not fit.
    f'nv_inference_request_failure{{{_MODEL},reason="CANCELED"}}': "0+900x120",
    f'nv_inference_request_failure{{{_MODEL},reason="OTHER"}}': "0+900x120",
    f"nv_inference_request_success{{{_MODEL}}}": "0+99x120",
    f'nv_inference_request_histogram_us_bucket{{{_MODEL},le="1000000"}}': "0+100x120",
    f'nv_inference_request_histogram_us_bucket{{{_MODEL},le="+Inf"}}': "0+100x120",
    # A language model: its requests take long because its answers are.
    f'nv_inference_request_histogram_us_bucket{{{_JOB},model="chat",version="1",le="1000000"}}': "0x120",
    f'nv_inference_request_histogram_us_bucket{{{_JOB},model="chat",version="1",le="2500000"}}': "0+9x120",
    f'nv_inference_request_histogram_us_bucket{{{_JOB},model="chat",version="1",le="+Inf"}}': "0+9x120",
    f'headrace_llm_steps_total{{{_JOB},model="chat",version="1"}}': "0+99x120",
    # Full, and nobody waits.
    f'headrace_llm_kv_cache_usage_ratio{{{_JOB},model="chat",version="1"}}': "1x120",
    f'headrace_llm_requests_waiting{{{_JOB},model="chat",version="1"}}': "0x120",
    f"nv_inference_pending_request_count{{{_MODEL}}}": "30x120",
    # One rollback, long ago.
    f"headrace_traffic_rollbacks_total{{{_MODEL}}}": "1x120",
    f"process_start_time_seconds{{{_JOB}}}": "1x50 2x70",
    f"process_open_fds{{{_JOB}}}": "100x120",
    f"process_max_fds{{{_JOB}}}": "1000x120",
    f"nv_cpu_memory_used_bytes{{{_JOB}}}": "50x120",
    f"nv_cpu_memory_total_bytes{{{_JOB}}}": "100x120",
    # Scaled to zero.
    f'headrace_router_backend_up{{{_ROUTER},backend="one"}}': "0x120",
    f"headrace_router_leaving{{{_ROUTER}}}": "0x120",
    f"headrace_router_active{{{_ROUTER}}}": "0x120",
    f'headrace_router_requests_total{{{_ROUTER},backend="one",outcome="ok"}}': "0+90x120",
    f'headrace_router_requests_total{{{_ROUTER},backend="one",outcome="cancelled"}}': "0+90x120",
    f'headrace_router_revision_requests_total{{{_ROUTER},revision="old",outcome="ok"}}': "0+100x120",
    f'headrace_router_revision_requests_total{{{_ROUTER},revision="old",outcome="error"}}': "0x120",
    # Two operators, one of which leads; and no certificate yet.
    f"headrace_operator_leads{{{_OPERATOR}}}": "1x120",
    'headrace_operator_leads{job="headrace-operator",instance="p:8080"}': "0x120",
    f"headrace_operator_webhook_certificate_expiry_seconds{{{_OPERATOR}}}": "0x120",
}
"""Two hours, looked at after 100 minutes."""
