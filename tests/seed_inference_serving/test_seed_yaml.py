# SPDX-License-Identifier: Apache-2.0
"""The seed's `config/inference.yaml`, word for word, with a real server; only its device and ports are other ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from seed_models import expected
from seed_programs import ROW, Answer, Server, run, serve, together

SEEDS_YAML = """\
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, seed_models: Path) -> Path:
    """Where the seed's reader stands: `config/inference.yaml` and `models/production`."""
    folder = tmp_path_factory.mktemp("yaml")
    (folder / "config").mkdir()
    (folder / "config/inference.yaml").write_text(SEEDS_YAML)
    (folder / "models").symlink_to(seed_models / "versions")
    return folder


@contextmanager
def serving(folder: Path, **env: str) -> Iterator[Server]:
    options = ("--config", folder / "config/inference.yaml", "--device", "cpu", "--workers", "1")
    with serve(*options, "--model-path", folder / "models/production", env=env) as running:
        yield running


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as running:
        yield running


def test_the_file_has_no_mistakes(folder: Path) -> None:
    assert run("config", "check", "config/inference.yaml", folder=folder) == (
        0,
        "config/inference.yaml: no mistakes\n",
    )


def test_config_show_origin(folder: Path) -> None:
    code, shown = run(
        *("config", "show", "--origin", "--config", "config/inference.yaml", "--http-port", "9000"),
        folder=folder,
        env={"INFERENCE_WORKERS": "2", "INFERENCE_PORT": "9001"},
    )
    assert code == 0, shown
    rows = {line.split()[0]: line.split(None, 2)[1:] for line in shown.splitlines() if len(line.split()) > 2}
    for key, value, origin in (
        ("server.port", "9000", "flag --http-port"),
        ("server.workers", "2", "env INFERENCE_WORKERS"),
        ("server.host", "0.0.0.0", "config/inference.yaml:2"),
        ("model.version", "v1.2.0", "config/inference.yaml:7"),
        ("model.precision", "fp16", "config/inference.yaml:9"),
        ("performance.batch_timeout_ms", "50", "config/inference.yaml:12"),
        ("safeguards.rate_limit.requests_per_minute", "1000", "config/inference.yaml:18"),
        ("safeguards.input_validation.max_sequence_length", "512", "config/inference.yaml:21"),
        ("cache.enabled", "false", "default"),
    ):
        assert [word.strip() for word in rows[key]] == [value, origin], shown


def test_a_typo_names_the_file_and_the_line(folder: Path) -> None:
    wrong = SEEDS_YAML.replace("batch_timeout_ms: 50", "batch_timout_ms: 50").replace("workers: 4", "workers: four")
    (folder / "config/wrong.yaml").write_text(wrong)
    code, output = run("serve", "--config", "config/wrong.yaml", folder=folder)
    assert code == 2
    assert "config/wrong.yaml:4: server.workers: takes a whole number" in output
    assert "config/wrong.yaml:12: performance.batch_timout_ms: is not known: did you mean batch_timeout_ms?" in output


def test_cuda_without_a_gpu_is_refused(folder: Path) -> None:
    code, output = run("serve", "--config", "config/inference.yaml", folder=folder, env={"CUDA_VISIBLE_DEVICES": ""})
    assert code == 2
    assert "config/inference.yaml:8: model.device: cuda asks for a GPU" in output


def test_the_named_version_answers_in_half_precision(server: Server) -> None:
    answer = server.ask(body={"inputs": ROW})
    assert answer.status == 200
    assert answer.document["model_version"] == "v1.2.0"
    assert answer.document["predictions"] == pytest.approx(expected(ROW, "v1.2.0"), rel=2e-3)
    assert server.ask("/healthz").document == {"status": "healthy", "model_version": "v1.2.0"}


def test_a_version_that_is_not_served(server: Server) -> None:
    answer = server.ask(body={"inputs": ROW, "model_version": "v1.0.0"})
    assert answer.status == 404
    assert answer.error.startswith("model 'production' has no version 'v1.0.0': it has v1.2.0")


def test_concurrent_predictions_are_joined(folder: Path) -> None:
    rows = [[float(number % 50), 1.0, 2.0, 3.0] for number in range(100)]
    with serving(folder, TRITONSERVER_DELAY_SCHEDULER="100") as server:
        requests = [lambda row=row: server.ask(body={"inputs": row}) for row in rows]
        for row, answer in zip(rows, together(requests), strict=True):
            assert answer.status == 200
            # Each gets the answer to its own question.
            assert answer.document["predictions"] == pytest.approx(expected(row, "v1.2.0"), rel=2e-3)
        # A full batch, and the rest.
        assert server.counted("production") == {"rows": 100, "batches": 2, "largest": 64}


def test_a_part_batch_does_not_wait_for_ever(server: Server) -> None:
    answer = server.ask(body={"inputs": ROW})
    assert answer.status == 200
    assert answer.document["latency_ms"] >= 45


def test_one_wrong_prediction_does_not_disturb_those_it_could_be_joined_with(server: Server) -> None:
    requests = [lambda row=row: server.ask(body={"inputs": row}) for row in (ROW, [1.0, 2.0]) for _ in range(10)]
    answers = together(requests)
    assert [answer.status for answer in answers] == [200] * 10 + [400] * 10
    assert "does not accept these inputs" in answers[-1].error
    assert "mat1" not in answers[-1].error


def test_max_sequence_length(server: Server) -> None:
    answer = server.ask(body={"inputs": [1.0] * 513})
    assert answer.status == 413
    assert "513" in answer.error and "max_sequence_length, 512" in answer.error


def test_max_request_size(server: Server) -> None:
    answer = server.ask(body=b'{"inputs": [' + b"1.0, " * 2_200_000 + b"1.0]}")
    assert answer.status == 413


def test_a_thousand_requests_a_minute(server: Server) -> None:
    """From an address of its own, so that the other tests have theirs."""

    def ask_until_refused() -> list[Answer]:
        with server.client("127.0.0.77") as client:
            answers = [client.ask(body={"inputs": []})]
            while answers[-1].status == 400:
                answers.append(client.ask(body={"inputs": []}))
            return answers

    began = time.monotonic()
    answers = [answer for part in together([ask_until_refused] * 16) for answer in part]
    came_meanwhile = (time.monotonic() - began) * 1000 / 60
    counts = Counter(answer.status for answer in answers)
    assert set(counts) == {400, 429}
    assert 1000 <= counts[400] <= 1020 + came_meanwhile
    for answer in answers:
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["ratelimit-limit"] == "1000"
    assert server.ask(body={"inputs": ROW}).status == 200
