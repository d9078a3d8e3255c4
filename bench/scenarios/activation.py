# SPDX-License-Identifier: Apache-2.0
"""Scale local services from zero repeatedly: count lost requests, and the time added to a replica's own start.

    .venv/bin/python bench/scenarios/activation.py --cycles 1000

All of it is real: the daemon of `headrace up`, a `headrace router` for each service, and a process for each replica, which
the first request starts and which sleeps after a second without any. The replica is the lightest there is
(`tests/fleet/local/light_server.py`, some 20 ms from its start to its first answer), so that what is told is what waking
adds, and not what a model takes to load. `--load-seconds` makes it take longer, as a model would.

Added is the time from sending the request to its first byte, less what the same replica takes from its start to its first
answer when nobody but this script starts it, by the median of `--alone` tries made in between.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))
sys.path.insert(0, str(TESTS / "fleet" / "local"))

from local_site import LocalSite, runtime, service  # noqa: E402

from support.ports import free_port  # noqa: E402

REPLICA = TESTS / "fleet" / "local" / "light_server.py"
WORDS = [sys.executable, "-I", "-S", str(REPLICA)]
PARTS = ("decided", "started", "loading", "seen", "connected", "first_byte")


class Tally:
    """What came of all requests."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.waits: list[float] = []
        self.tails: list[float] = []
        self.parts: dict[str, list[float]] = {part: [] for part in PARTS}
        self.wakes = 0
        self.lock = threading.Lock()


def ask(port: int, path: str = "/") -> tuple[int, bytes]:
    """Status and body of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def send(port: int, tally: Tally) -> float | None:
    """When the replica that answered began to listen; None for a request that was lost."""
    try:
        status, body = ask(port)
    except (OSError, http.client.HTTPException) as error:
        outcome, listening = type(error).__name__, None
    else:
        outcome, listening = str(status), float(body) if status == 200 else None
    with tally.lock:
        tally.answers[outcome] += 1
    return listening


def sleeping(port: int) -> bool:
    """Whether what is behind a router sleeps."""
    with suppress(OSError, ValueError, http.client.HTTPException):
        status = json.loads(ask(port, "/router/status")[1])
        return bool(status["waking"]["state"] == "asleep")
    return False


def wake_again(port: int, tally: Tally, cycles: int, seed: int) -> None:
    """Wait until it sleeps, ask, and note how long it took; until there have been enough in all."""
    chance = random.Random(seed)
    while tally.wakes < cycles:
        if not sleeping(port):
            time.sleep(0.05)
            continue
        time.sleep(chance.uniform(0.0, 0.2))
        began = time.monotonic()
        listening = send(port, tally)
        ended = time.monotonic()
        if listening is None or listening < began:
            continue  # lost, or somebody else had woken it
        last = json.loads(ask(port, "/router/status")[1])["waking"].get("last_wake") or {}
        with tally.lock:
            tally.wakes += 1
            tally.waits.append(ended - began)
            tally.tails.append(ended - listening)
            for name in PARTS:
                if isinstance(last.get(name), int | float):
                    tally.parts[name].append(last[name])


def come_beside(ports: Sequence[int], tally: Tally, enough: threading.Event, seed: int) -> None:
    """Ask at any time: while it falls asleep, too."""
    chance = random.Random(seed)
    while not enough.is_set():
        send(chance.choice(ports), tally)
        time.sleep(chance.uniform(0.2, 3.0))


def alone(load: float) -> float:
    """What a replica takes from its start to its first answer, without Headrace."""
    port = free_port()
    began = time.monotonic()
    process = subprocess.Popen([*WORDS, f"--port={port}", f"--load={load}"], stdin=subprocess.DEVNULL)
    try:
        while True:
            with suppress(OSError, http.client.HTTPException):
                ask(port)
                return time.monotonic() - began
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Wake services from zero, over and over.")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--services", type=int, default=8, help="that sleep and wake beside each other")
    parser.add_argument("--load-seconds", type=float, default=0.0, help="what a replica does before it listens")
    parser.add_argument("--beside", type=int, default=2, help="clients that come at any time, beside the measured ones")
    parser.add_argument("--alone", type=int, default=50, help="starts of the replica alone, to compare with")
    options = parser.parse_args()
    tally, enough, own = Tally(), threading.Event(), list[float]()
    with tempfile.TemporaryDirectory(prefix="headrace-waking-") as folder:
        site = LocalSite(Path(folder), 15_600)
        site.up()
        try:
            arguments = ["--port=8080", f"--load={options.load_seconds}"]
            site.apply(site.model, runtime(command=WORDS, args=arguments))
            for number in range(options.services):
                document = service(f"light-{number}", minReplicas=0, maxReplicas=1)
                document["metadata"]["annotations"] = {"ome.io/scale-to-zero-idle-seconds": "1"}
                site.apply(document)
            ports = [int(site.url(f"light-{number}").rpartition(":")[2]) for number in range(options.services)]
            workers = [
                threading.Thread(target=wake_again, args=(port, tally, options.cycles, port), daemon=True)
                for port in ports
            ]
            beside = [
                threading.Thread(target=come_beside, args=(ports, tally, enough, seed), daemon=True)
                for seed in range(options.beside)
            ]
            began = time.monotonic()
            for process in (*workers, *beside):
                process.start()
            while any(worker.is_alive() for worker in workers):
                if len(own) < options.alone and tally.wakes >= len(own) * options.cycles / options.alone:
                    own.append(alone(options.load_seconds))
                time.sleep(0.1)
            enough.set()
            for process in beside:
                process.join()
            seconds = time.monotonic() - began
        finally:
            site.close()
    tell(tally, own, seconds)


def tell(tally: Tally, own: Sequence[float], seconds: float) -> None:
    """Print what was found."""
    lost = sum(count for outcome, count in tally.answers.items() if outcome != "200")
    requests = sum(tally.answers.values())
    print(f"{tally.wakes} measured wakes in {seconds:.0f} s; {requests} requests, {lost} lost: {dict(tally.answers)}")
    print(f"a replica alone, start to first answer:   {shown(own)}")
    print(f"a request that wakes one, to first byte:  {shown(tally.waits)}")
    base = statistics.median(own)
    print(f"added by waking:                          {shown([wait - base for wait in tally.waits])}")
    print(f"the replica listens, to first byte:       {shown(tally.tails)}")
    for name, values in tally.parts.items():
        if values:
            print(f"  part {name + ':':34} {shown(values)}")


def shown(values: Sequence[float]) -> str:
    """Percentiles in milliseconds."""
    ordered = sorted(values)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 for share in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {ordered[-1] * 1000:.1f} ms"


if __name__ == "__main__":
    main()
