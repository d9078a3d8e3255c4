# SPDX-License-Identifier: Apache-2.0
"""What fits, who goes, and how large a model is: arithmetic, files and the process table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.engine.repository.memory_budget import MemoryBudget, Resident, add_up
from headrace.engine.repository.model_sizes import MemoryProbe, ModelSize, SizeStore, growth, read_content

BUDGET = MemoryBudget({"host": 100, "gpu0": 50})


def names(victims: list[Resident] | None) -> list[str] | None:
    return None if victims is None else [victim.name for victim in victims]


def test_the_excess_is_by_place() -> None:
    assert BUDGET.excess({"host": 60}, {"host": 40, "gpu0": 50, "gpu1": 999}) == {}
    assert BUDGET.excess({"host": 60}, {"host": 41, "gpu0": 70}) == {"host": 1, "gpu0": 20}
    assert add_up([{"host": 1}, {"host": 2, "gpu0": 3}]) == {"host": 3, "gpu0": 3}


@pytest.mark.parametrize(
    ("excess", "expected"),
    [
        ({"host": 10}, ["old"]),
        ({"host": 30}, ["old", "middle"]),
        ({"gpu0": 5}, ["gpu"]),
        ({"host": 10, "gpu0": 5}, ["old", "gpu"]),
        ({"host": 45}, ["large"]),
        ({"host": 80}, ["old", "middle", "large"]),
        ({"host": 200}, None),
        ({"gpu0": 41}, None),
    ],
)
def test_the_least_recently_used_go_and_no_more_than_needed(excess: dict[str, int], expected: list[str] | None) -> None:
    residents = [
        Resident("large", {"host": 50}, 4),
        Resident("gpu", {"gpu0": 40}, 3),
        Resident("middle", {"host": 20}, 2),
        Resident("old", {"host": 20}, 1),
    ]
    assert names(BUDGET.victims(excess, residents)) == expected


def test_the_error_names_the_sum_that_does_not_fit() -> None:
    text = BUDGET.sum_text({"host": 90, "gpu0": 60}, [("pinned models", {"host": 20})], {"host": 10, "gpu0": 10})
    assert text == (
        "host memory: 90 bytes + 20 bytes (pinned models) is more than the 100 bytes of --host-memory-limit; "
        "memory of GPU 0: 60 bytes is more than the 50 bytes of --gpu-memory-limit"
    )


def test_a_load_counts_what_grew_and_at_least_its_files() -> None:
    assert growth({"host": 100, "gpu0": 7}, {"host": 130, "gpu0": 7}, {"host": 20}) == {"host": 30}
    assert growth({"host": 100}, {"host": 90}, {"host": 20}) == {"host": 20}
    assert growth({"host": 100}, {"host": 90}, {}) == {}


def test_the_key_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    def put(name: str, weights: bytes, extra: str = "") -> Path:
        folder = tmp_path / name
        for version in ("1", "2"):
            (folder / version).mkdir(parents=True)
            (folder / version / "model.bin").write_bytes(weights)
        (folder / "config.pbtxt").write_text(extra)
        return folder

    one, same = put("one", b"a" * 1000), put("same", b"a" * 1000)
    content = read_content(one, [1])
    assert content == read_content(same, [1])
    assert content.version_bytes == 1000
    assert read_content(one, [1, 2]).version_bytes == 2000
    assert read_content(put("other", b"b" * 1000), [1]).key != content.key
    assert read_content(put("configured", b"a" * 1000, "max_batch_size: 8"), [1]).key != content.key
    large = put("large", b"a" * 1_000_000)
    before = read_content(large, [1]).key
    with open(large / "1" / "model.bin", "r+b") as file:
        file.seek(300_001)  # outside the samples: the time of the file tells
        file.write(b"b")
    os.utime(large / "1" / "model.bin", ns=(1, 1))
    assert read_content(large, [1]).key != before


def test_a_size_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "sizes"
    store = SizeStore(folder)
    size = ModelSize({"host": 5, "gpu0": 6}, 1.5)
    assert store.read("k") is None
    store.write("k", "m", size)
    assert store.read("k") == size
    for damaged in ("", "[]", '{"memory": {"host": -1}, "load_seconds": 1}', '{"memory": {"host": 1}}'):
        (folder / "k.json").write_text(damaged)
        assert store.read("k") is None
    left, fresh = folder / f".k.json.{'0' * 16}.new", folder / f".k.json.{'1' * 16}.new"
    left.write_text("half")
    fresh.write_text("half, and perhaps of a server that runs")
    os.utime(left, (time.time() - 3600, time.time() - 3600))
    store.clean()
    assert not left.exists()
    assert fresh.exists()
    folder.chmod(0o500)
    try:
        store.write("other", "m", size)  # logs, and raises nothing
    finally:
        folder.chmod(0o700)
    SizeStore(None).write("k", "m", size)
    assert SizeStore(None).read("k") is None


def test_children_of_this_process_count() -> None:
    probe = MemoryProbe()
    before = probe.read()["host"]
    script = "import sys; data = b'x' * 64_000_000; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"1\n"
        assert probe.read()["host"] - before > 60_000_000
        child.communicate()
