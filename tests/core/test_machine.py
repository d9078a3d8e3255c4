# SPDX-License-Identifier: Apache-2.0
"""The memory that a process can still allocate: the machine's, or what its control group leaves."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.core.machine import available_memory, process_memory

GIB = 1 << 30


def test_the_machine_or_its_control_group_limits_memory(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    assert available_memory(tmp_path, [group]) is None
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    assert available_memory(tmp_path, [group]) == 8 * GIB
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "memory.current").write_text(f"{GIB}\n")
    assert available_memory(tmp_path, [group]) == 3 * GIB
    (group / "memory.current").write_text(f"{5 * GIB}\n")
    assert available_memory(tmp_path, [group]) == 0


def test_cached_files_are_free_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    new, old = tmp_path / "new", tmp_path / "old"
    (old / "memory").mkdir(parents=True)
    new.mkdir()
    (new / "memory.max").write_text(f"{4 * GIB}\n")
    (new / "memory.current").write_text(f"{4 * GIB}\n")
    (new / "memory.stat").write_text(f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\nslab 5\n")
    assert available_memory(tmp_path, [new]) == 3 * GIB
    (old / "memory" / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (old / "memory" / "memory.usage_in_bytes").write_text(f"{4 * GIB}\n")
    (old / "memory" / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file 0\n")
    assert available_memory(tmp_path, [old]) == GIB


def test_this_machine_has_memory() -> None:
    assert (available_memory() or 0) > 0


def test_the_memory_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(
        "VmRSS: 99 kB\nRssAnon:\t 3 kB\nRssFile: 9 kB\nRssShmem: 2 kB\nVmSwap: 1 kB\n"
    )
    assert process_memory(7, tmp_path) == 6 * 1024
    assert process_memory(8, tmp_path) == 0
    assert process_memory(os.getpid()) > 1_000_000
