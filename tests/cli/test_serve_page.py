# SPDX-License-Identifier: Apache-2.0
"""The table of options: complete, without duplicates, and documented."""

from __future__ import annotations

from collections import Counter

from options_page import PAGE, page

from headrace.cli.serve_arguments import IGNORED
from headrace.programs.configuration.option import Option
from headrace.programs.configuration.option_table import FLAGS
from headrace.programs.configuration.sources import parse_scalar

SEED = """model-store http-port grpc-port metrics-port allow-http allow-grpc allow-metrics http-thread-count id
strict-readiness exit-on-error allow-model-load-unload file-system-poll-secs exit-timeout-secs allow-profiling
tf-gpu-memory-fraction tf-allow-soft-placement platform-config-file log-info log-warning log-error log-verbose"""
"""Of the first release whose source is public."""

TODAY = """id exit-timeout-secs model-store model-repository exit-on-error disable-auto-complete-config strict-readiness
model-control-mode repository-poll-secs load-model model-load-thread-count model-load-retry-count model-namespacing
allow-http http-address http-port reuse-http-port http-header-forward-pattern http-thread-count http-restricted-api
http-max-input-size allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern
grpc-infer-allocation-pool-size grpc-max-response-pool-size
grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert
grpc-infer-response-compression-level grpc-keepalive-time grpc-keepalive-timeout grpc-keepalive-permit-without-calls
grpc-http2-max-pings-without-data grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes
grpc-max-connection-age grpc-max-connection-age-grace grpc-restricted-protocol log-verbose log-info log-warning log-error
log-format log-file allow-sagemaker sagemaker-port sagemaker-safe-port-range sagemaker-thread-count allow-vertex-ai
vertex-ai-port vertex-ai-thread-count vertex-ai-default-model allow-metrics allow-gpu-metrics allow-cpu-metrics
metrics-address metrics-port metrics-interval-ms metrics-config trace-config cache-config cache-directory rate-limit
rate-limit-resource pinned-memory-pool-byte-size cuda-memory-pool-byte-size cuda-virtual-address-size
min-supported-compute-capability buffer-manager-thread-count host-policy model-load-gpu-limit backend-directory
backend-config repoagent-directory strict-model-config response-cache-byte-size trace-file trace-level trace-rate
trace-count trace-log-frequency allow-client-shm"""
"""Of Triton."""

NAMES = [name for option in FLAGS.values() for name in option.flags] + [ignored.flag for ignored in IGNORED]


def test_every_option_of_triton_is_known() -> None:
    assert set(SEED.split()) | set(TODAY.split()) <= set(NAMES)


def test_no_name_is_there_twice() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


def test_every_default_could_have_been_given() -> None:
    for option in map(Option.on_command_line, FLAGS.values()):
        if option.default is not None:
            assert parse_scalar(option, str(option.default)) == option.default, option.flag


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "run `python tests/cli/options_page.py`"
