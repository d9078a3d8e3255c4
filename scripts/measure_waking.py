# SPDX-License-Identifier: Apache-2.0
"""Wake a real process from zero, over and over, through a router with `activation`: requests lost, and how long they wait.

    .venv/bin/python scripts/measure_waking.py --cycles 1000

Each cycle a process is started by the first of its requests and killed after a moment without any. What is told is the time
from the process's own readiness (it notes when it listens) to the answer, and how many requests had no answer of its own.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "router"))

from routing import ask
from sleeping import ProcessScaler, napping


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Wake a process from zero, over and over.")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--idle-seconds", type=float, default=0.1)
    parser.add_argument("--load-seconds", type=float, default=0.05, help="what the process does before it listens")
    parser.add_argument("--beside", type=int, default=1, help="clients that come at any time, beside the measured one")
    given = parser.parse_args()
    scaler = ProcessScaler(given.load_seconds)
    answers: Counter[str] = Counter()
    waits: list[float] = []
    enough = threading.Event()
    with napping(scaler.port, scaler=scaler, health="/", idle_seconds=given.idle_seconds) as nap:

        def send() -> float | None:
            try:
                answer = ask(nap.port, "POST", "/", b"x" * 100)
            except OSError as error:
                answers[type(error).__name__] += 1
                return None
            answers[str(answer.status)] += 1
            return float(answer.body) if answer.status == 200 else None

        def beside(seed: int) -> None:
            chance = random.Random(seed)
            while not enough.is_set():
                send()
                time.sleep(given.idle_seconds * chance.uniform(0.8, 4.0))

        threads = [threading.Thread(target=beside, args=(seed,)) for seed in range(given.beside)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        while scaler.starts < given.cycles:
            asleep = nap.state == "asleep"
            listening = send()
            if asleep and listening is not None:
                waits.append(time.monotonic() - listening)
            time.sleep(given.idle_seconds * random.uniform(1.0, 3.0))
        enough.set()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
    waits.sort()
    lost = sum(count for status, count in answers.items() if status != "200")
    print(f"{scaler.starts} wakes in {seconds:.0f} s; {sum(answers.values())} requests, {lost} lost: {dict(answers)}")
    if waits:
        p50, p99 = (waits[min(len(waits) - 1, int(len(waits) * part))] * 1000 for part in (0.5, 0.99))
        print(f"readiness to first byte: p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {waits[-1] * 1000:.1f} ms")


if __name__ == "__main__":
    main()
