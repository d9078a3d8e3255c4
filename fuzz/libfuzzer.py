# SPDX-License-Identifier: Apache-2.0
"""Fuzz with libFuzzer, by Google's `atheris`: `run` starts this module as a process of its own.

Called by `__main__` where atheris can be imported. It measures the product's code as it is imported, so nothing of the
product may have been; and it ends its process when it is done. Findings are ours: it goes on after one, as `guided` does.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz.findings import Findings
from fuzz.guided import Figures
from fuzz.target import Target, bounded

_RUNS = re.compile(r"Done (\d+) runs in (\d+) second")
_COVERED = re.compile(r"cov: (\d+)")


def is_available() -> bool:
    """Whether atheris is installed."""
    return importlib.util.find_spec("atheris") is not None


def run(name: str, target: Target, seed_inputs: list[bytes], seconds: float, folder: Path, seed: int) -> Figures:
    """Fuzz in another process; its findings lie in the folder then."""
    with tempfile.TemporaryDirectory(prefix="headrace-fuzz-") as temporary:
        corpus, begin, words = (Path(temporary) / name for name in ("corpus", "begin", "words"))
        corpus.mkdir()
        begin.mkdir()
        for number, data in enumerate(seed_inputs):
            (begin / str(number)).write_bytes(data)
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))
        options = [f"-max_total_time={max(int(seconds), 1)}", f"-dict={words}", f"-seed={seed + 1}"]
        options += [f"-max_len={target.most_bytes}", "-rss_limit_mb=0", "-timeout=0", "-print_final_stats=1"]
        command = [sys.executable, "-m", "fuzz.libfuzzer", name, str(folder), *options, str(corpus), str(begin)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        ran = _RUNS.search(done.stderr)
        if ran is None:
            raise RuntimeError(f"atheris ended with {done.returncode}:\n{done.stderr[-4000:]}")
        covered = [int(count) for count in _COVERED.findall(done.stderr)]
        inputs = [path.read_bytes() for path in sorted(corpus.iterdir())]
        return Figures(int(ran[1]), float(ran[2]), max(covered, default=0), inputs)


def _escaped(word: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word)


def main() -> None:
    """What runs in the other process: `TARGET FOLDER` and options of libFuzzer's."""
    import atheris

    name, folder, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["headrace"]):
        from fuzz.targets.table import target_named

        check = target_named(name).open()
    findings = Findings(Path(folder))

    def one_input(data: bytes) -> None:
        # Atheris has a clock of its own, at whose ring it exits; ours is a finding, and it goes on.
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            bounded(check, data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            findings.add(data, error)

    atheris.Setup([sys.argv[0], *options], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
