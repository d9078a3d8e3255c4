# SPDX-License-Identifier: Apache-2.0
"""Flag before environment before file before default; and each value knows where it came from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from configuration_page import GUIDE, keys_table, table_in

from headrace.core.errors import InvalidArgument
from headrace.programs.configuration.option_table import FLAGS, KEYS, PANELS
from headrace.programs.configuration.resolution import OptionValues, SettingsError, as_json, configure
from headrace.programs.configuration.sources import read_environment

ROOT = Path(__file__).parents[3]


def origin(values: OptionValues, key: str) -> str:
    return str(values.settings[key].origin)


def test_precedence_of_the_sources(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server:\n  port: 1\n  workers: 2\n  host: a\n")
    environment = {"INFERENCE_PORT": "11", "INFERENCE_WORKERS": "12"}
    values = configure({"config": str(file), "http-port": "21"}, (), environment)
    assert (values.int("http-port"), values.int("workers"), values.str("host")) == (21, 12, "a")
    assert values.int("grpc-port") == 8001
    assert origin(values, "server.port") == "flag --http-port"
    assert origin(values, "server.workers") == "env INFERENCE_WORKERS"
    assert origin(values, "server.host") == f"{file}:4"
    assert origin(values, "server.grpc_port") == "default"
    assert values.has("host") and not values.has("grpc-port")
    assert values.has("server.host") and not values.has("server.grpc_port")


def test_the_file_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server: {workers: 3}")
    assert configure({}, (), {"INFERENCE_CONFIG": str(file)}).int("workers") == 3
    other = tmp_path / "d.yaml"
    other.write_text("server: {workers: 4}")
    assert configure({"config": str(other)}, (), {"INFERENCE_CONFIG": str(file)}).int("workers") == 4


def test_folders_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("models: [a, b]")
    assert configure({"config": str(file)}, (), {}).strings("model-repository") == ("a", "b")
    assert configure({"config": str(file)}, ("c",), {}).strings("model-repository") == ("c",)
    both = configure({"config": str(file), "model-repository": ["d"]}, ("c",), {})
    assert both.strings("model-repository") == ("c", "d")


def test_sizes_in_both_units() -> None:
    assert configure({}, (), {"INFERENCE_MAX_REQUEST_SIZE_MB": "0.5"}).int("max-body-bytes") == 524288
    values = configure({"max-body-bytes": "1048576"}, (), {"INFERENCE_MAX_REQUEST_SIZE_MB": "0.5"})
    assert (values.int("max-body-bytes"), values.float("safeguards.max_request_size_mb")) == (1048576, 1.0)
    for flag in ("max-body-bytes", "response-cache-byte-size"):
        assert configure({}, (), {}).int(flag) == FLAGS[flag].on_command_line().default == 64 * 1024 * 1024


def test_every_variable_of_the_page_this_was_written_for() -> None:
    environment = {
        "INFERENCE_HOST": "0.0.0.0",
        "INFERENCE_PORT": "8080",
        "INFERENCE_WORKERS": "4",
        "INFERENCE_MODEL_PATH": "models/production",
        "INFERENCE_MODEL_VERSION": "latest",
        "INFERENCE_MAX_BATCH_SIZE": "32",
        "INFERENCE_TIMEOUT_SECONDS": "30.0",
        "INFERENCE_MAX_REQUEST_SIZE_MB": "10",
        "INFERENCE_RATE_LIMIT_PER_MINUTE": "1000",
    }
    found = read_environment(environment)
    assert not found.problems and not found.warnings
    assert {variable for _, variable in found.values.values()} == set(environment)


def test_settings_from_the_environment() -> None:
    environment = {
        "INFERENCE_SAFEGUARDS_RATE_LIMIT_REQUESTS_PER_MINUTE": "7",
        "INFERENCE_MODELS": "a, b",
        "INFERENCE_OPTIONS_METRICS_CONFIG": '["x=1,2", "y=3"]',
        "INFERENCE_TRAFFIC": '{"m": {"weights": {"1": 0.5, "2": 0.5}}}',
        "INFERENCE_MODEL_INPUTS": '[{"name": "x", "shape": [3]}]',
        "INFERENCE_CACHE_ENABLED": "on",
        "INFERENCE_SERVER_HOST": "",
        "OTHER": "1",
    }
    values = {path: value for path, (value, _) in read_environment(environment).values.items()}
    assert values == {
        "safeguards.rate_limit.requests_per_minute": 7,
        "models": ("a", "b"),
        "options.metrics-config": ("x=1,2", "y=3"),
        "traffic": {"m": {"weights": {"1": 0.5, "2": 0.5}}},
        "model.inputs": ({"name": "x", "dtype": "FP32", "shape": (3,)},),
        "cache.enabled": True,
    }


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("INFERENCE_PORT", "x", "environment: INFERENCE_PORT: takes a whole number from 0 to 65535, not 'x'"),
        ("INFERENCE_PORT", "-1", "takes a whole number from 0 to 65535, not -1"),
        ("INFERENCE_TRAFFIC", "[", "takes a mapping as JSON"),
        ("INFERENCE_TRAFFIC", "5", "takes a mapping"),
        ("INFERENCE_MODEL_INPUTS", '[{"nam": 1}]', "did you mean name?"),
        ("INFERENCE_CACHE_ENABLED", "2", "takes true or false, not '2'"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        configure({}, (), {variable: text})
    assert told in caught.value.message


def test_two_variables_for_one_key() -> None:
    configure({}, (), {"INFERENCE_PORT": "1", "INFERENCE_SERVER_PORT": "1"})
    with pytest.raises(SettingsError, match="INFERENCE_PORT, and both mean server.port: keep one"):
        configure({}, (), {"INFERENCE_PORT": "1", "INFERENCE_SERVER_PORT": "2"})


def test_an_unknown_variable_is_a_warning_with_the_nearest() -> None:
    values = configure({}, (), {"INFERENCE_WORKRES": "1", "INFERENCE_ZZZZZZZZ": "\n"})
    assert values.warnings == (
        "the environment's INFERENCE_WORKRES is not known: did you mean INFERENCE_WORKERS?",
        "the environment's INFERENCE_ZZZZZZZZ is not known: 'headrace config show' lists what can be set",
    )


def test_a_wrong_device_by_its_flag() -> None:
    with pytest.raises(InvalidArgument, match="--device must be cpu, cuda, cuda:NUMBER or auto, not 'tpu'"):
        configure({"device": "tpu"}, (), {})


def test_a_choice_in_capitals() -> None:
    assert configure({"precision": "FP16"}, (), {}).str("model.precision") == "fp16"
    assert configure({}, (), {"INFERENCE_MODEL_PRECISION": "FP16"}).str("precision") == "fp16"


def test_mistakes_of_file_and_environment_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server: {prot: 1}")
    with pytest.raises(SettingsError) as caught:
        configure({"config": str(file)}, (), {"INFERENCE_PORT": "x"})
    assert len(caught.value.problems) == 2 and caught.value.message.startswith("the configuration has 2 mistakes:\n")


def test_passwords_are_not_shown() -> None:
    environment = {
        "INFERENCE_SAFEGUARDS_RATE_LIMIT_REDIS_URL": "redis://me:s3:cret@h:1/0?password=s3cret&db=1",
        "INFERENCE_OPTIONS_TRACE_ENDPOINT": "http://s3cret@collector/x",
        "INFERENCE_OPTIONS_HTTP_RESTRICTED_API": "statistics:key=s3cret",
    }
    told = as_json(configure({}, (), environment))
    assert told["safeguards.rate_limit.redis_url"]["value"] == "redis://me:***@h:1/0?password=***&db=1"
    assert told["options.trace-endpoint"]["value"] == "http://***@collector/x"
    assert told["options.http-restricted-api"]["value"] == ["statistics:key=***"]
    assert "cret" not in str(told)


# The table itself.


def test_every_option_can_be_reached_by_a_key() -> None:
    assert {option.flag for option in KEYS.values() if option.flag} == set(FLAGS) - {"config"}


def test_no_two_options_share_a_key_a_variable_or_a_flag() -> None:
    options = KEYS.values()
    names = [name for option in options for name in (option.key, option.flag) if name]  # one object knows both
    variables = [variable for option in options for variable in set(option.variables)]
    assert [name for name, count in Counter([*names, *variables]).items() if count > 1] == []
    assert len(KEYS) + 1 == sum(len(options) for options in PANELS.values())


def test_the_table_of_the_guide_is_that_of_the_code() -> None:
    assert table_in(GUIDE.read_text()) == keys_table(), (
        "run `python tests/programs/configuration/configuration_page.py`"
    )


def test_the_example_is_right() -> None:
    configure({"config": str(ROOT / "examples/config/inference.yaml")}, (), {})
