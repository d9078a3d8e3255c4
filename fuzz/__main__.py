# SPDX-License-Identifier: Apache-2.0
"""`python -m fuzz`: list the targets, fuzz one or all of them, replay an input."""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fuzz import libfuzzer
from fuzz.findings import Findings, write_atomically
from fuzz.guided import Figures, fuzz, minimal_corpus
from fuzz.target import CORPUS, TooSlow, bounded, inputs_of
from fuzz.targets.table import TARGETS, target_named

WORK = Path("build/fuzz")
KEPT = Path()
"""Stands for all inputs in fuzz/corpus and fuzz/regressions."""
EXAMPLES = """examples:
  python -m fuzz                                   list the targets and what each checks
  python -m fuzz http2 --seconds 60                one target for a minute
  python -m fuzz all --seconds 300                 all, five minutes each: what `make fuzz` does
  python -m fuzz pbtxt --replay build/fuzz/pbtxt/findings/ValueError-0123456789ab
  python -m fuzz all --replay                      replay every stored input: what `make test` does
  python -m fuzz pbtxt --seconds 60 --keep 30      add the 30 inputs with the highest coverage to fuzz/corpus
"""


def main() -> int:
    """Parse the command line and run. Return 0 without findings, 1 with findings, 2 for wrong arguments."""
    arguments = _parser().parse_args()
    # The width of the terminal; without one, wide enough that lines are not cut in a log.
    console = Console(width=None if sys.stdout.isatty() else 160)
    logging.disable(logging.WARNING)  # thousands of expected warnings
    if arguments.target is None:
        console.print(_listed())
        return 0
    names = list(TARGETS) if arguments.target == "all" else [arguments.target]
    if names[0] not in TARGETS:
        print(f"fuzz: unknown target {arguments.target!r}; python -m fuzz lists the targets", file=sys.stderr)
        return 2
    if arguments.replay is not None:
        return max(_replay(name, arguments.replay) for name in names)
    table = Table("target", "inputs", "a second", "covered", "kept", "findings", box=None)
    found: list[str] = []
    for name in names:
        with console.status(f"fuzzing {name} for {arguments.seconds:g} s"):
            figures, findings = _fuzz_target(name, arguments)
        kinds = list(findings.kinds)
        counted = f"{figures.runs:,}", f"{figures.rate:,.0f}", f"{figures.covered:,}", f"{len(figures.corpus)}"
        table.add_row(name, *counted, "none" if not kinds else f"[bold red]{len(kinds)}")
        found += [f"{kind}\n  python -m fuzz {name} --replay {path}" for kind, path in findings.kinds.items()]
        if len(names) > 1:
            console.print(f"{name}: {figures.runs:,} inputs, {len(kinds)} findings")
    console.print(table)
    for finding in found:
        console.print(finding, style="bold", markup=False)
    return 1 if found else 0


def _fuzz_target(name: str, arguments: argparse.Namespace) -> tuple[Figures, Findings]:
    target, folder = target_named(name), arguments.work / name
    earlier = sorted((folder / "corpus").glob("*"))
    seed_inputs = [path.read_bytes() for path in (*inputs_of(name), *earlier)]
    findings = Findings(folder / "findings")
    if arguments.engine == "atheris" or (arguments.engine == "auto" and libfuzzer.is_available()):
        before = _newest(findings.folder)
        figures = libfuzzer.run(name, target, seed_inputs, arguments.seconds, findings.folder, arguments.seed)
        for path, when in _newest(findings.folder).items():
            if before.get(path) != when:
                findings.kinds[path.with_suffix(".txt").read_text().strip().splitlines()[-1] + f" ({path.name})"] = path
    else:
        figures = fuzz(target, seed_inputs, arguments.seconds, findings, seed=arguments.seed)
    for data in figures.corpus:
        write_atomically(folder / "corpus" / _name(data), data)
    if arguments.keep:
        for data in minimal_corpus(target, [*seed_inputs, *figures.corpus], arguments.keep):
            write_atomically(CORPUS / name / _name(data), data)
    return figures, findings


def _newest(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*") if path.suffix != ".txt"}


def _replay(name: str, given: Path) -> int:
    paths, check = inputs_of(name) if given == KEPT else [given], target_named(name).open()
    status = 0
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            print(f"fuzz: {path} cannot be read: {error.strerror}", file=sys.stderr)
            return 2
        try:
            bounded(check, data)
        except (Exception, TooSlow):
            traceback.print_exc()
            print(f"fuzz: {path} fails the check of {name}", file=sys.stderr)
            status = 1
    if not status:
        print(f"{name}: {len(paths)} inputs, no failure")
    return status


def _listed() -> Table:
    table = Table("target", "input, and what is checked", "inputs kept", box=None)
    for name in TARGETS:
        table.add_row(name, target_named(name).about, str(len(inputs_of(name))))
    return table


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fuzz",
        description="Send malformed input to parsers and servers, and check their invariants.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", help="the target; all: one after the other; none: list them")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each target (60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random generator (0)")
    parser.add_argument(
        "--engine", choices=("auto", "atheris", "own"), default="auto", help="auto: atheris if it is installed"
    )
    parser.add_argument("--work", type=Path, default=WORK, help="folder for findings and the grown corpus (build/fuzz)")
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="add the N best inputs to fuzz/corpus")
    parser.add_argument(
        "--replay",
        type=Path,
        nargs="?",
        const=KEPT,
        metavar="FILE",
        help="check this file once; without a file, all stored inputs",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
