# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed while KV pages are written to disk or loaded from it: what is on disk is whole."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.fault_points import VARIABLE
from support.llm_models import tiny_llama

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent.parent.parent
FILE_BYTES = 2048 + struct.calcsize(">4sI16s16sQI")
SCRIPT = """
import asyncio, os, signal, sys
from pathlib import Path
from llm_instances import served
from headrace.backends.llm.kv_offload.disk_pages import DiskPages
from headrace.core.generation import Generation, Sampling

dies_at, reads, read_file = int(sys.argv[3]), [], DiskPages._read_file

def read_and_die(self, page_hash, target):
    whole = read_file(self, page_hash, target)
    reads.append(page_hash)
    if len(reads) == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole

DiskPages._read_file = read_and_die

async def main():
    parameters = {"page_size": "4", "kv_cache_bytes": str(2048 * 100), "max_running": "4", "kv_host_min_tokens": "8"}
    parameters |= {"kv_host_bytes": str(2048 * 1000), "kv_disk_path": sys.argv[2]}
    async with served(Path(sys.argv[1]), **parameters) as tiny:
        for number in (*range(6), *range(6)):
            prompt = " ".join(chr(97 + (number * place) % 26) for place in range(60))
            sampling = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
            print(repr((await tiny.ask(Generation(prompt=prompt, sampling=sampling))).text))
        for family in tiny.metrics.families:
            if family.name == "headrace_llm_kv_level_hit_tokens_total":
                print(*(int(series.value) for labels, series in family.collect() if "disk" in labels), file=sys.stderr)

asyncio.run(main())
"""


def visit(folder: Path, disk: Path, *, dies_at_read: int = 0, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Visit some conversations twice in a process of its own."""
    paths = os.pathsep.join([str(TESTS), str(TESTS / "backends"), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, disk, str(dies_at_read)],
        env={**os.environ, "PYTHONPATH": paths, VARIABLE: fault},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.timeout(600)
def test_a_killed_process_leaves_whole_pages_and_the_next_finds_them(tmp_path: Path) -> None:
    folder, disk = tiny_llama(tmp_path / "model" / "1"), tmp_path / "pages"

    def check_pages() -> int:
        sizes = {page.stat().st_size for page in disk.glob("*.kv")}
        assert sizes <= {FILE_BYTES}
        return len(list(disk.glob("*.kv")))

    killed = visit(folder, disk, fault="files.replace:die@30")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert check_pages() == 29
    assert len(list(disk.glob(".*.new"))) == 1, "the page that was being written is under another name"
    whole = visit(folder, disk)
    assert whole.returncode == 0, whole.stderr
    assert list(disk.glob(".*.new")) == []
    count = check_pages()
    assert count > 29
    killed = visit(folder, disk, dies_at_read=10)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert check_pages() >= count
    second = visit(folder, disk)
    assert second.returncode == 0, second.stderr
    assert second.stdout == whole.stdout
    assert int(second.stderr.split()[-1]) > 0, "tokens were found on disk"
