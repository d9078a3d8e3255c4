# SPDX-License-Identifier: Apache-2.0
"""Run tiers of tests one after the other, and report how long each took.

    python scripts/run_tests.py check quick                        what `make test` does
    python scripts/run_tests.py check quick slow -- tests/net     the same and the slow tests, of one folder
    python scripts/run_tests.py --order random quick               in random order; the seed is printed
    python scripts/run_tests.py --coverage quick slow              with line and branch coverage after each tier
    python scripts/run_tests.py --retry slow                       what `.ci/run` does: up to five failed tests run once more

docs/testing.md says which test belongs to which tier.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_MOST_WORKERS = 6
_MOST_RETRIES = 5
"""More failed tests than this are not bad luck, and are not run again."""
_CLOSING = re.compile(r"^=* ?((?:\d+ \w+,? ?)+) in [\d.]+s")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py.*?)(?:@[^ ]*)?(?: - .*)?$")
"""A line of pytest's summary; pytest-xdist puts the group behind the test's name."""
_TESTS_FAILED = 1
"""pytest's exit code where tests failed."""
_NO_TESTS = 5
"""pytest's exit code where nothing was selected: a folder may have no slow test."""


CHECK = "check"
MARKS = {
    "quick": "not slow and not platform",
    "slow": "slow and not platform",
    "platforms": "platform and not ray and not node",
    "node": "node",
    "ray": "ray",
}
"""Each tier of tests and what pytest selects for it."""


@dataclass
class Outcome:
    """How a tier ended."""

    name: str
    seconds: float
    passed: bool
    counts: str


def main() -> int:
    """Run the tiers of the command line. 0: all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiers", nargs="+", choices=(CHECK, *MARKS))
    parser.add_argument(
        "--workers", type=int, help="processes that run tests side by side (default: one for each core)"
    )
    parser.add_argument("--order", choices=("file", "random"), default="file")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--retry", action="store_true", help="run a few failed tests once more, by themselves")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:cut])
    if arguments.coverage:
        _coverage("erase")
    outcomes = []
    for test in words[cut + 1 :]:
        if not test.startswith("-") and not (ROOT / test.partition("::")[0]).exists():
            parser.error(f"{test} does not exist")  # pytest-xdist would find no test, which is no error
    for name in arguments.tiers:
        outcomes.append(_run(name, words[cut + 1 :], arguments))
        if arguments.coverage:
            _coverage("combine", "--append", "--quiet")
            _coverage("report", "--format=total")
    print()
    for outcome in outcomes:
        minutes, seconds = divmod(round(outcome.seconds), 60)
        state = "passed" if outcome.passed else "FAILED"
        print(f"{outcome.name:<10} {state}  {minutes:>3} min {seconds:02} s   {outcome.counts}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _run(name: str, tests: list[str], arguments: argparse.Namespace) -> Outcome:
    began = time.monotonic()
    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # programs start half a second sooner with compiled files
    if name == CHECK:
        code = subprocess.run(("make", "--no-print-directory", "check"), cwd=ROOT, env=environ, check=False).returncode
        return Outcome(name, time.monotonic() - began, passed=code == 0, counts="")
    workers = arguments.workers or min(_MOST_WORKERS, os.cpu_count() or 1)
    command = [sys.executable, *(("-m", "coverage", "run") if arguments.coverage else ()), "-m", "pytest", "-q"]
    command += ["-m", MARKS[name], "--durations=15"]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "loadgroup"]
    if arguments.order == "random":
        command += ["-p", "randomly"]
    code, counts, failed = _follow([*command, *tests], environ)
    if code == _TESTS_FAILED and arguments.retry and 0 < len(failed) <= _MOST_RETRIES:
        print(f"\n{name}: running the failed tests once more, by themselves: {', '.join(failed)}", flush=True)
        code, second, failed_again = _follow([sys.executable, "-m", "pytest", "-q", *failed], environ)
        passed_now = [test for test in failed if test not in failed_again]
        counts += f"; once more: {second}" + (f"; UNSTABLE: {', '.join(passed_now)}" if passed_now else "")
    return Outcome(name, time.monotonic() - began, passed=code in (0, _NO_TESTS), counts=counts)


def _follow(command: list[str], environ: dict[str, str]) -> tuple[int, str, list[str]]:
    """Run pytest and pass its output on. Return the exit code, the line that counts the tests, and those that failed."""
    counts = ""
    failed: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            text = line.decode(errors="replace").rstrip()
            closing = _CLOSING.match(text)
            if closing:
                counts = closing[1].strip()
            failure = _FAILED.match(text)
            if failure:
                failed.append(failure[1])
    return process.returncode, counts, failed


def _coverage(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=False)


if __name__ == "__main__":
    sys.exit(main())
