# SPDX-License-Identifier: Apache-2.0
"""`headrace tune` on real servers: finds a setting within the target, writes it, and restores the server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.cli import tune_run
from headrace.client import Client
from headrace.models.config.drafts import read_draft
from support.programs import Finished, run
from support.servers import serve_in_thread
from support.tiny_models import make_models

pytestmark = pytest.mark.worker("matplotlib")

SLOW = """# the handler waits as a database would
backend: "identity"
max_batch_size: 8  # what it was written for
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
parameters { key: "sleep_milliseconds" value { string_value: "5" } }
"""
QUICK = ("--duration", "0.2", "--warm-up", "0.01", "--max-instances", "1", "--max-concurrency", "8")
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")


def run_tune(*arguments: str | Path) -> Finished:
    return run("tune", *arguments)


@pytest.fixture
def server_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The private server of `--repository` is one of this process."""

    @asynccontextmanager
    async def private_server(folder: Path) -> AsyncIterator[str]:
        with serve_in_thread(folder, *EXPLICIT) as server:
            yield server.url

    monkeypatch.setattr(tune_run, "private_server", private_server)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return make_models(tmp_path / "models", slow=SLOW)


def test_it_finds_a_setting_writes_it_and_the_model_loads_with_it(models: Path, tmp_path: Path) -> None:
    numbers, picture = tmp_path / "trials.json", tmp_path / "trials.png"
    done = run_tune(
        "slow", "--repository", models, "--latency-target-ms", "60000", *QUICK, "--write", "--json", numbers,
        "--plot", picture,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(numbers.read_text())
    # Joining requests gives several times as many a second, but on a busy machine a trial this short may say otherwise: what
    # follows holds for whichever setting won.
    delay = document["best"]["max_queue_delay_microseconds"]
    assert document["best"]["mean_requests_per_second"] > 0
    assert 0 < document["best"]["measured"]["latency_ms"]["p99"] <= 60_000
    assert len(document["trials"]) >= 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Trials of slow" in done.stdout
    assert "best: batches of" in done.stdout
    assert "█" in done.stdout
    text = (models / "slow" / "config.pbtxt").read_text()
    assert text.startswith(SLOW[: SLOW.index("max_batch_size")])
    assert "# what it was written for" in text
    assert read_draft(models / "slow").message.HasField("dynamic_batching") == (delay is not None)
    with serve_in_thread(models) as server, Client(server.url) as client:
        assert client.ready("slow")
        assert client.config("slow").get("dynamic_batching", {}).get("max_queue_delay_microseconds") == delay


def test_a_running_server_has_its_own_configuration_afterwards(models: Path) -> None:
    with serve_in_thread(models, *EXPLICIT) as server:
        with Client(server.url) as client:
            before = client.config("slow")
            done = run_tune("slow", "--url", server.url, "--latency-target-ms", "60000", *QUICK)
            assert done.returncode == 0, done.stderr
            assert "for the model's config.pbtxt:" in done.stdout or "nothing to change" in done.stdout
            assert client.config("slow") == before
    assert (models / "slow" / "config.pbtxt").read_text() == SLOW


@pytest.mark.usefixtures("server_in_thread")
def test_an_unreachable_target_is_reported(models: Path) -> None:
    done = run_tune("slow", "--repository", models, "--latency-target-ms", "1", *QUICK, "--write")
    assert done.returncode == 1
    assert "no setting keeps p99 within 1 ms: the lowest p99 was" in done.stdout
    assert (models / "slow" / "config.pbtxt").read_text() == SLOW


def test_a_server_without_explicit_control_is_not_changed(models: Path) -> None:
    with serve_in_thread(models, "--model-control-mode", "none") as server:
        done = run_tune("slow", "--url", server.url, "--latency-target-ms", "60000", *QUICK)
    assert done.returncode == 1
    assert 'try: headrace serve MODELS --model-control-mode explicit --load-model "*"' in done.stderr
    assert "or tune a copy with --repository DIR" in done.stderr


@pytest.mark.usefixtures("server_in_thread")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("slow",), "--repository DIR"),
        (("slow", "--url", "http://127.0.0.1:1", "--write"), "--write needs --repository"),
        (("other", "--repository", "models"), "check --repository"),
        (("slow", "--repository", "models", "--plot", "x.jpg"), ".png"),
        (("slow", "--repository", "models", "--duration", "0"), "above 0"),
        (("slow", "--repository", "models", "--rows", "9"), "at most 8"),
    ],
)
def test_what_makes_no_sense_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(models.parent)
    done = run_tune(*arguments, "--latency-target-ms", "20")
    assert done.returncode == 2
    assert said in done.stderr


def test_help_has_examples() -> None:
    assert "headrace tune resnet50 --repository models --latency-target-ms 20" in run_tune("--help").stdout
