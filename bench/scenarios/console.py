# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU of the consoles and of the command line: `python bench/scenarios/console.py [--models 100]`.

Opens the page of a server with that many small models, of a gateway and of a machine's fleet in Chromium, each with an empty
cache, and reads what came and when something was painted. Compares the processor time of the server's process while nobody
looks with that while the page is open, which asks once a second. Prints a table with the goal of each figure, and ends with
1 if one is missed. Needs what `scripts/platforms/browser.sh install` brings.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_HEADRACE = Path(sys.executable).parent / "headrace"
_CONFIG = """name: "{name}" backend: "identity" max_batch_size: 8
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }} ]
"""
_BODY = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
_SERVER = re.compile(r"listening on 127\.0\.0\.1:(\d+)[\s\S]*model\(s\)")
_GATEWAY = re.compile(r"console: http://127\.0\.0\.1:(\d+)/console")
_FLEET = re.compile(r"http://127\.0\.0\.1:(\d+)/console(#key=\S+)")
_LOADED = """() => {
    const files = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
        .filter(({ name }) => !name.includes("/api/") && !name.includes("/v2/") && !name.includes("/admin/"));
    const sum = (field) => files.reduce((all, file) => all + file[field], 0);
    const painted = performance.getEntriesByName("first-contentful-paint")[0].startTime;
    return { plain: sum("decodedBodySize"), packed: sum("encodedBodySize"), files: files.length, painted };
}"""
_HELPS = 21


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    measured: float
    goal: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether it is below its goal."""
        return self.measured < self.goal


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else "")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, _chromium() as browser:
        figures = [
            *_server(browser, Path(scratch), options.models, options.seconds),
            *_gateway(browser, Path(scratch)),
            *_fleet(browser, Path(scratch)),
        ]
    figures.append(_help())
    if options.json:
        document = [{**figure._asdict(), "met": figure.met} for figure in figures]
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write("| what | measured | goal | |\n| --- | --- | --- | --- |\n")
        for figure in figures:
            state = "pass" if figure.met else "MISSED"
            sys.stdout.write(f"| {figure.what} | {figure.measured:.3g} {figure.unit} | < {figure.goal:g} | {state} |\n")
    sys.exit(not all(figure.met for figure in figures))


def _server(browser: Any, scratch: Path, models: int, seconds: int) -> Iterator[Figure]:
    folder, names = scratch / "models", [f"model-{place:03}" for place in range(models)]
    for name in names:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_CONFIG.format(name=name))
    with _running(_SERVER, scratch / "server", "serve", folder, "--http-port", "0", "--grpc-port", "0") as (pid, match):
        url = f"http://127.0.0.1:{match[1]}"
        for name in names:  # so that each has numbers
            _ask(f"{url}/v2/models/{name}/infer", json.dumps(_BODY).encode())
        alone = _share(pid, seconds)
        with _page(browser, f"{url}/console#/models") as page:
            yield from _weight("a server's page", page)
            page.wait_for_function(f"() => document.querySelectorAll('tbody tr').length === {models}")
            watched = _share(pid, seconds)
        subject = f"its numbers each second, {models} models (idle: {alone:.2f} %)"
        yield Figure(subject, watched - alone, 3, "% of a core")


def _gateway(browser: Any, scratch: Path) -> Iterator[Figure]:
    arguments = ("gateway", "--port", "0", "--data-dir", scratch / "data")
    with (
        _running(_GATEWAY, scratch / "gateway", *arguments) as (_, match),
        _page(browser, f"http://127.0.0.1:{match[1]}/console") as page,
    ):
        page.get_by_role("heading", name="Log in").wait_for()
        yield from _weight("the gateway's page", page)


def _fleet(browser: Any, scratch: Path) -> Iterator[Figure]:
    arguments = ("up", "--state-dir", scratch / "state", "--console", "127.0.0.1:0")
    with (
        _running(_FLEET, scratch / "fleet", *arguments) as (_, match),
        _page(browser, f"http://127.0.0.1:{match[1]}/console{match[2]}") as page,
    ):
        page.get_by_text("No services.").wait_for()
        yield from _weight("a fleet's page", page)


def _weight(name: str, page: Any) -> Iterator[Figure]:
    """What came until it was there, and when it could first be seen."""
    page.wait_for_function("() => document.querySelector('#status').textContent !== 'connecting'")
    weights = page.evaluate(_LOADED)
    packed = f"{name}, {weights['files']} files ({weights['packed'] / 1000:.0f} kB compressed)"
    yield Figure(packed, weights["plain"] / 1000, 200, "kB")
    yield Figure(f"{name}, first paint", weights["painted"], 1000, "ms")


@contextmanager
def _running(ready: re.Pattern[str], log: Path, *arguments: str | Path) -> Iterator[tuple[int, re.Match[str]]]:
    """A program of ours: its process, and what it says when it is ready."""
    with log.open("wb") as output:
        process = subprocess.Popen([_HEADRACE, *arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        while (match := ready.search(log.read_text())) is None:
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.1)
        yield process.pid, match
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _chromium() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "build/browser/python"))
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("a browser is needed: run 'bash scripts/platforms/browser.sh install' first")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield running
        running.close()


@contextmanager
def _page(browser: Any, url: str) -> Iterator[Any]:
    """A tab whose cache is empty."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()


def _share(pid: int, seconds: int) -> float:
    """Percent of a core that a process takes for some time."""
    before, began = _processor_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (_processor_seconds(pid) - before) / (time.monotonic() - began)


def _processor_seconds(pid: int) -> float:
    # In nanoseconds, where ticks of a hundredth of a second would be coarser than what is measured.
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _help() -> Figure:
    took, before = [], _of_children()
    for _ in range(_HELPS):
        began = time.perf_counter()
        subprocess.run([_HEADRACE, "--help"], stdout=subprocess.DEVNULL, check=True)
        took.append(1000 * (time.perf_counter() - began))
    # On a machine with other work, the processor time says what it would take alone.
    alone = 1000 * (_of_children() - before) / _HELPS
    return Figure(f"headrace --help, median of {_HELPS} ({alone:.0f} ms of CPU)", statistics.median(took), 150, "ms")


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ask(url: str, body: bytes) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
        answer.read()


if __name__ == "__main__":
    main()
