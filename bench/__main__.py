# SPDX-License-Identifier: Apache-2.0
"""`make bench`: install what is needed, measure Headrace and its peers, write the results."""

import argparse
import json
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import venvs
from bench.errors import BenchError
from bench.machine import REPOSITORY, describe_machine, short_name
from bench.report import markdown, put_into_page
from bench.runs import Plan, Results, Run
from bench.screen import bar, console, show
from bench.servers import SERVERS
from bench.summary import summary_of
from bench.tools import ensure_load_generators
from bench.verdicts import verdicts_of
from bench.workloads import NAMES

RESULTS = Path(__file__).parent / "results"
LATEST = RESULTS / "latest.md"
PAGE = REPOSITORY / "docs" / "performance.md"
"""Shows the summary of the last full run."""
QUICK_SECONDS, QUICK_ROUNDS = 2, 1
EXAMPLES = """examples:
  python -m bench                                    everything, about 40 minutes, writes bench/results/
  python -m bench --quick                            a look: one round of 2 seconds each
  python -m bench --only headrace triton-python      two servers, all their workloads
  python -m bench --workload json16 --keep-going     one workload, whoever can do it
  python -m bench --workload mlp mlp-grpc            a small ONNX network on one core, Headrace and Triton
  python -m bench --workload overhead-binary idle    what the engine costs, and what it costs when idle
  python -m bench --workload resnet50-onnx load-100mb-onnx   ResNet-50, Headrace and the framework's own call
  python -m bench --workload start idle-memory       seconds to the first answer, and memory with nothing loaded
  python -m bench --workload predict router overload the REST route, the router, and three times too many requests
  python -m bench --publish                          measure nothing, put the last full run into docs/performance.md
"""


def main() -> int:
    """Parse the command line and run; the exit status says whether everything asked for was measured."""
    arguments = _parser().parse_args()
    terminal = console()
    # A plain SIGTERM would leave servers behind; as an exception it passes through every "finally".
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if arguments.publish:
            put_into_page(PAGE, LATEST)
            return 0
        return _bench(_plan(arguments), terminal)
    except BenchError as error:
        terminal.print(f"[red]bench:[/red] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        terminal.print("bench: stopped; nothing was written")
        return 130


def _bench(plan: Plan, terminal: Console) -> int:
    ensure_load_generators()
    _install_peers(plan, terminal)
    machine = describe_machine()
    with bar(terminal, plan.measurements()) as progress:
        results = Run(plan, progress.tell, progress.tick).all_rounds()
    summary = summary_of(results)
    verdicts = verdicts_of(summary)
    document = _document(plan, machine, results)
    document |= {
        "figures": [asdict(figure) for figure in summary.figures],
        "loading_figures": [asdict(loading) for loading in summary.loadings],
        "idle_figure": asdict(summary.idle) if summary.idle else None,
        "start_figure": asdict(summary.start) if summary.start else None,
        "memory_figure": asdict(summary.memory) if summary.memory else None,
        "overload_figure": asdict(summary.overload) if summary.overload else None,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    show(terminal, summary, verdicts, results.refused)
    for server in plan.not_installed():
        terminal.print(f"{server.name}: not installed, so not measured", highlight=False)
    _write(plan, document, markdown(document, summary, verdicts), terminal)
    return 1 if results.refused else 0


def _install_peers(plan: Plan, terminal: Console) -> None:
    wanted = dict.fromkeys(server.venv for server in plan.chosen() if server.is_peer)
    missing = [peer for peer in wanted if not venvs.is_installed(peer)]
    if not missing:
        return
    with bar(terminal, len(missing)) as progress:
        for peer in missing:
            progress.tell(f"installing {peer} into {venvs.venv_of(peer).relative_to(REPOSITORY)}")
            venvs.install(peer)
            progress.tick()


def _document(plan: Plan, machine: dict[str, object], results: Results) -> dict[str, Any]:
    environments = {s.venv: venvs.venv_of(s.venv) for s in plan.chosen() if s.is_peer}
    if any(not server.is_peer for server in plan.chosen()):
        environments = {"headrace": Path(sys.prefix)} | environments
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "options": {"rounds": plan.rounds, "seconds": plan.seconds},
        "versions": {server: venvs.package_versions(venv) for server, venv in environments.items()},
        "self_descriptions": results.self_descriptions,
        "refused": results.refused,
        "not_installed": [server.name for server in plan.not_installed()],
        "samples": [asdict(sample) for sample in results.samples],
        "loading_samples": [asdict(sample) for sample in results.loadings],
        "idle_samples": [asdict(sample) for sample in results.idle],
        "start_samples": [asdict(sample) for sample in results.starts],
        "memory_samples": [asdict(sample) for sample in results.memory],
        "overload_samples": [asdict(sample) for sample in results.overloads],
    }


def _write(plan: Plan, document: dict[str, Any], text: str, terminal: Console) -> None:
    RESULTS.mkdir(exist_ok=True)
    # A partial or quick run must not pass for the published figures.
    if not plan.is_full:
        raw, table = RESULTS / "partial.json", RESULTS / "partial.md"
    else:
        raw, table = RESULTS / f"{document['date']}-{short_name(document['machine'])}.json", LATEST
    raw.write_text(json.dumps(document, indent=1) + "\n")
    table.write_text(text)
    terminal.print(f"Written: {raw.relative_to(REPOSITORY)}, {table.relative_to(REPOSITORY)}")
    if plan.is_full:
        put_into_page(PAGE, LATEST)
        terminal.print(f"Updated: {PAGE.relative_to(REPOSITORY)}")


def _plan(arguments: argparse.Namespace) -> Plan:
    quick = arguments.quick
    return Plan(
        servers=tuple(name for name in SERVERS if not arguments.only or name in arguments.only),
        workloads=tuple(name for name in NAMES if not arguments.workload or name in arguments.workload),
        rounds=QUICK_ROUNDS if quick else arguments.rounds,
        seconds=QUICK_SECONDS if quick else arguments.seconds,
        keep_going=arguments.keep_going,
        is_full=not (quick or arguments.only or arguments.workload),
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure Headrace beside other inference servers: CPU per request first of all.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=_positive, default=5, help="length of each measurement (default 5)")
    parser.add_argument("--rounds", type=_positive, default=3, help="how often each is repeated (default 3)")
    parser.add_argument("--only", nargs="+", choices=SERVERS, metavar="SERVER", help=f"of {', '.join(SERVERS)}")
    parser.add_argument("--workload", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="one round of 2 seconds each")
    parser.add_argument("--keep-going", action="store_true", help="note a server or workload that fails, go on")
    parser.add_argument("--publish", action="store_true", help="put the last full run into docs/performance.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
