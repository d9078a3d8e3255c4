# SPDX-License-Identifier: Apache-2.0
"""`python -m soak`: start a server, send mixed traffic for a while, and report whether a resource grows."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import signal
import sys
from pathlib import Path

from rich.console import Console

from soak.report import table_of, verdicts_of, write
from soak.sampling import Samples, sample
from soak.server import NotServed, Running, served, temporary
from soak.traffic import Traffic

EXAMPLES = """examples:
  python -m soak                            an hour, one process
  python -m soak --seconds 600 --workers 2  ten minutes, two
  python -m soak --seconds 60 --no-language a look, without the language model

0: nothing grows, every answer was right. 1: something grows, or an answer was wrong. 2: the server did not start or stop.
"""


def main() -> int:
    """Parse the command line and run."""
    arguments = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    # A plain SIGTERM would leave the server behind; as an exception it passes through every "finally".
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    language = arguments.language and importlib.util.find_spec("torch") is not None
    try:
        with temporary() as folder, served(Path(folder), arguments.workers, language=language) as running:
            traffic, samples = asyncio.run(_soaked(running, arguments, console))
    except NotServed as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("soak: stopped; nothing was judged", file=sys.stderr)
        return 130
    verdicts = verdicts_of(samples)
    page, _ = write(arguments.out, samples, verdicts, traffic.asked, traffic.wrong)
    console.print(table_of(verdicts))
    console.print(f"asked: {', '.join(f'{name} {count:,}' for name, count in sorted(traffic.asked.items()))}")
    for message, count in traffic.wrong.most_common(20):
        console.print(f"wrong, {count} times: {message}", style="bold red", markup=False)
    console.print(f"the picture: {page}")
    return 1 if traffic.wrong or any(verdict.grows for verdict in verdicts) else 0


async def _soaked(running: Running, arguments: argparse.Namespace, console: Console) -> tuple[Traffic, Samples]:
    traffic = Traffic(running, arguments.seed)
    with console.status("soaking") as status:

        def show_progress(samples: Samples) -> None:
            last = {name: f"{values[-1]:.4g}" for name, values in samples.values.items()}
            text = ", ".join(f"{name} {value}" for name, value in last.items())
            status.update(f"{samples.seconds[-1]:.0f} of {arguments.seconds:.0f} s: {text}")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run(arguments.seconds))
            sampling = tasks.create_task(sample(traffic, arguments.every, arguments.seconds, show_progress))
    return traffic, sampling.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m soak",
        description="Mixed traffic, models that come and go, and clients that vanish, on a real server; growth fails it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long (3600)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between looks at the processes (5)")
    parser.add_argument("--workers", type=int, default=1, help="processes of the server (1)")
    parser.add_argument("--no-language", dest="language", action="store_false", help="without a language model")
    parser.add_argument("--seed", type=int, default=0, help="where chance begins (0)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/soak"), help="for the picture and the numbers (build/soak)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
