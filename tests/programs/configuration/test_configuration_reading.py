# SPDX-License-Identifier: Apache-2.0
"""What a configuration file says, and every mistake in it with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.programs.configuration.resolution import OptionValues, SettingsError, configure
from headrace.programs.configuration.sections import access_settings, predict_settings, traffic_settings
from headrace.programs.configuration.sources import read_file

SEED = """# config/inference.yaml
server:
  host: 0.0.0.0
  port: 8080
  workers: 4
model:
  path: models/production
  version: v1.2.0
  device: cuda
  precision: fp16
performance:
  max_batch_size: 64
  batch_timeout_ms: 50
  inference_timeout_s: 30
safeguards:
  max_request_size_mb: 10
  rate_limit:
    enabled: true
    requests_per_minute: 1000
  input_validation:
    enabled: true
    max_sequence_length: 512
"""


def values(folder: Path, text: str) -> dict[str, Any]:
    (folder / "c.yaml").write_text(text)
    found = read_file(str(folder / "c.yaml"))
    assert [str(problem) for problem in found.problems] == []
    return {path: value for path, (value, _) in found.values.items()}


def mistakes(folder: Path, text: str) -> list[str]:
    """Without the folder's name in front."""
    (folder / "c.yaml").write_text(text)
    try:
        configure({"config": str(folder / "c.yaml")}, (), {})
    except SettingsError as error:
        return [str(problem).removeprefix(f"{folder}/") for problem in error.problems]
    return []


def configured(folder: Path, text: str) -> OptionValues:
    (folder / "c.yaml").write_text(text)
    return configure({"config": str(folder / "c.yaml")}, (), {})


def test_the_file_of_the_page_this_was_written_for(tmp_path: Path) -> None:
    found = values(tmp_path, SEED)
    assert (found["server.host"], found["server.port"], found["server.workers"]) == ("0.0.0.0", 8080, 4)
    assert (found["model.path"], found["model.version"]) == ("models/production", "v1.2.0")
    assert (found["model.device"], found["model.precision"]) == ("cuda", "fp16")
    configuration = configured(tmp_path, SEED)
    assert configuration.int("max-body-bytes") == 10 * 1024 * 1024
    access, predict = access_settings(configuration), predict_settings(configuration)
    assert [(limit.requests, limit.seconds, limit.by) for limit in access.rates.limits] == [(1000, 60.0, "address")]
    assert predict is not None
    assert (predict.timeout_seconds, predict.checks.longest_sequence, predict.checks.enabled) == (30, 512, True)
    # Nobody said a word of gRPC.
    assert configuration.get("server.grpc_port") == 8001 and not configuration.has("server.grpc_port")


def test_yaml_types_of_strings_and_numbers(tmp_path: Path) -> None:
    text = "safeguards:\n  input_validation: {enabled: no, allow_nan: yes, max_inputs: 1_000, min: -1.5, max: 1e3}\n"
    found = values(tmp_path, text)
    start = "safeguards.input_validation"
    assert (found[f"{start}.enabled"], found[f"{start}.allow_nan"]) == (False, True)
    assert (found[f"{start}.max_inputs"], found[f"{start}.min"], found[f"{start}.max"]) == (1000, -1.5, 1000.0)
    assert values(tmp_path, 'server: {port: "8080"}\nmodel: {version: 3}') == {
        "server.port": 8080,
        "model.version": "3",
    }
    assert values(tmp_path, "server:\nmodel:\n  path:\n") == {}
    assert values(tmp_path, "models: one") == values(tmp_path, "models: [one]") == {"models": ("one",)}
    assert values(tmp_path, "model: {device: cuda:1, precision: FP16}")["model.precision"] == "fp16"


def test_options_by_their_own_names(tmp_path: Path) -> None:
    found = values(tmp_path, "options: {http_address: 0.0.0.0, metrics-config: [a=b], max-body-bytes: 1048576, Id: x}")
    assert found["options.http-address"] == "0.0.0.0" and found["options.id"] == "x"
    assert found["options.metrics-config"] == ("a=b",)
    assert found["safeguards.max_request_size_mb"] == 1.0  # the same thing by another name
    assert mistakes(tmp_path, "server: {port: 1}\noptions: {http-port: 2}") == [
        "c.yaml:2: options.http-port: says the same as line 1; remove one"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("server:\n  prot: 1", "c.yaml:2: server.prot: is not known: did you mean port?"),
        ("sevrer: {}", "c.yaml:1: sevrer: is not known: did you mean server?"),
        ("max_batch_size: 3", "c.yaml:1: max_batch_size: is not known here: write it as performance.max_batch_size"),
        ("timeout_seconds: 3", "is not known here: write it as performance.inference_timeout_s"),
        ("server:\n  port: yes", "c.yaml:2: server.port: takes a whole number from 0 to 65535, not true"),
        ("server:\n  port: 80.5", "takes a whole number from 0 to 65535, not '80.5'"),
        ("server:\n  port: 70000", "takes a whole number from 0 to 65535, not 70000"),
        ("server: {port: [1]}", "takes a whole number from 0 to 65535, not a list"),
        ("server: {port: {a: 1}}", "not a mapping"),
        ("server: [1]", "c.yaml:1: server: takes a mapping"),
        ("server: {host: yes}", "write it in quotes"),
        ("model: {version: 1.10}", "takes a text, and YAML reads 1.1 here: write it in quotes"),
        ("model: {device: cdua}", "takes cpu, cuda, cuda:NUMBER or auto, not 'cdua'"),
        ("model: {precision: fp17}", "did you mean fp16?"),
        ("cache: {enabled: maybe}", "takes true or false, not 'maybe'"),
        ("cache: {enabled: 1}", "takes true or false, not 1"),
        ("cache: {ttl_s: .inf}", "takes a number of 0 or more, not 'inf'"),
        ("server:\n  port: 1\n  port: 2", "c.yaml:3: server.port: is there twice, first in line 2; remove one"),
        ("server: {port: 1}\nserver: {host: x}", "c.yaml:2: server: is there twice"),
        (
            "model:\n  inputs:\n  - name: a\n    dtyp: x",
            "c.yaml:4: model.inputs[0].dtyp: is not known: did you mean dtype?",
        ),
        ("model: {inputs: [{dtype: FP32}]}", "model.inputs[0]: needs name"),
        ("model: {inputs: {name: x}}", "takes a list"),
        ("model: {inputs: [x]}", "takes a mapping with name, dtype, shape"),
        ("safeguards: {rate_limit: {limits: [{requests: 0}]}}", "takes a whole number from 1"),
        ("safeguards: {input_validation: {min: 2, max: 1}}", "no number would be taken"),
        ("safeguards: {api_keys_file: /no/such/file}", "there is no file '/no/such/file'"),
        ("safeguards: {rate_limit: {redis_url: localhost}}", "redis://localhost:6379/0"),
        ("safeguards: {rate_limit: {enabled: true, requests_per_minute: 0}}", "is 0, which is not a limit"),
        ("traffic: {m: {weigths: {}}}", "did you mean 'weights'?"),
        ("traffic: 5", "takes a mapping"),
        ("traffic: {m: {weights: {1: 0.5, 2: 0.6}}}", "sum to 1.1"),
        ("logging: {level: loud}", "takes debug, info, warning or error"),
        ("traffic: {m: {weights: {a: 1, a: 2}}}", "is there twice"),
        ("options: {http-adress: x}", "did you mean http-address?"),
        ("options: {config: x}", "options.config: is not known"),
        ("a: &b {c: 1}\nserver: *b", "aliases"),
        ("server: {port: 1", "',' or '}' is missing"),
        ("\tserver: 1", "tab"),
        ("- a\n", "a configuration is a mapping"),
        ("!!python/object/apply:os.system [echo]", "a configuration is a mapping"),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    said = mistakes(tmp_path, text)
    assert len(said) >= 1 and any(told in line for line in said), said


def test_mistakes_are_reported_together_up_to_a_limit(tmp_path: Path) -> None:
    text = "server: {prot: 1, port: x, workers: 0}\nmodel: {devise: cpu}\nsafeguards: {input_validation: {min: 2, max: 1}}\n"
    assert len(mistakes(tmp_path, text)) == 5
    assert len(mistakes(tmp_path, "\n".join(f"k{n}: 1" for n in range(500)))) == 50


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for name, told in (("none.yaml", "No such file"), ("", "Is a directory"), ("a\0b", "not a name")):
        (problem,) = read_file(str(tmp_path / name)).problems
        assert told in str(problem)
    (tmp_path / "latin").write_bytes(b"server:\n  host: \xff\n")
    (problem,) = read_file(str(tmp_path / "latin")).problems
    assert "latin:2: is not UTF-8" in str(problem)
    (tmp_path / "big").write_bytes(b"#" * (1 << 21))
    assert "more than" in str(read_file(str(tmp_path / "big")).problems[0])


@given(st.text(max_size=200))
def test_whatever_a_file_has_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    found = read_file(str(path))
    assert all("\n" not in str(problem) for problem in found.problems)


def test_rates(tmp_path: Path) -> None:
    def limits(text: str) -> list[tuple[int, float, str, int]]:
        settings = access_settings(configured(tmp_path, f"safeguards: {{rate_limit: {text}}}"))
        return [(each.requests, each.seconds, each.by, each.burst) for each in settings.rates.limits]

    assert limits("{}") == []
    assert limits("{enabled: true}") == [(1000, 60.0, "address", 0)]
    assert limits("{requests_per_minute: 5, by: key, burst: 2}") == [(5, 60.0, "key", 2)]
    assert limits("{enabled: false, requests_per_minute: 5}") == []
    assert limits("{requests_per_minute: 0}") == []
    assert limits("{limits: [{requests: 3, seconds: 1, by: user}]}") == [(3, 1.0, "user", 0)]
    assert len(limits("{requests_per_minute: 5, limits: [{requests: 3}]}")) == 2


def test_the_rest_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    text = f"""
safeguards:
  api_keys_file: {tmp_path}/keys
  concurrency: {{max_in_flight: 7}}
  rate_limit: {{redis_url: "redis://h/0", trusted_proxies: [10.0.0.0/8], user_header: X-User}}
  input_validation: {{max_inputs: 5, max_rows: 6, min: -1, max: 1, allow_nan: true}}
stream: {{idle_timeout_s: 3, messages_per_second: 4, binary: false}}
predict: {{model: m}}
traffic: {{m: {{weights: {{v1.0.0: 0.9, 2: 0.1}}, sticky: {{header: x-user}}}}}}
"""
    configuration = configured(tmp_path, text)
    access, predict = access_settings(configuration), predict_settings(configuration)
    assert (access.keys_file, access.concurrency.in_flight) == (tmp_path / "keys", 7)
    assert (access.rates.redis_url, access.rates.trusted_proxies) == ("redis://h/0", ("10.0.0.0/8",))
    assert access.rates.user_header == "x-user"
    assert predict is not None and predict.model == "m"
    checks, stream = predict.checks, predict.stream
    assert (checks.most_numbers, checks.most_rows, checks.least, checks.most, checks.allow_nan) == (5, 6, -1, 1, True)
    assert (stream.idle_seconds, stream.messages_per_second, stream.binary) == (3, 4, False)
    split = traffic_settings(configuration).splits["m"]
    assert dict(split.weights) == {"v1.0.0": 0.9, "2": 0.1} and split.sticky.header == "x-user"
    assert predict_settings(configured(tmp_path, "predict: {enabled: false}")) is None
