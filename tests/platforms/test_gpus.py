# SPDX-License-Identifier: Apache-2.0
"""Which GPUs services of one machine get; the machine's devices are files that a test makes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import uuid
from pathlib import Path

import pytest

from headrace.core.errors import ResourceExhausted
from headrace.platforms.contract import PORT, Handle, LaunchSpec
from headrace.platforms.node_resources import choose_gpus, visible_gpus
from headrace.platforms.process import ProcessDriver
from support.ports import service_ports
from support.waiting import eventually, eventually_async

HERE = str(Path(__file__).parent)


def devices(folder: Path, count: int) -> Path:
    folder.mkdir()
    for name in [f"nvidia{index}" for index in range(count)] + ["nvidiactl", "nvidia-uvm", "null"]:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("variable", "here"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        ("GPU-1a, GPU-2b", ("GPU-1a", "GPU-2b")),
        ("1,-1,2", ("1",)),
        ("0,1,2,3,4", ("0", "1", "2")),
    ],
)
def test_the_gpus_here_are_those_that_are_visible(tmp_path: Path, variable: str | None, here: tuple[str, ...]) -> None:
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environ, devices(tmp_path / "dev", 3)) == here
    assert visible_gpus({}, tmp_path / "nowhere") == ()


def test_the_first_free_ones_are_chosen() -> None:
    assert choose_gpus(("0", "1", "2"), {"1"}, 2) == ("0", "2")
    with pytest.raises(ResourceExhausted, match=r"needs 2 GPU\(s\), and of 3 here 1 are free"):
        choose_gpus(("0", "1", "2"), {"1", "2"}, 2)


def driver(tmp_path: Path, gpus: int) -> ProcessDriver:
    folder = tmp_path / "dev"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": HERE}
    return ProcessDriver(
        tmp_path / "root",
        ports=service_ports(),
        environ=environ,
        devices=folder if folder.exists() else devices(folder, gpus),
    )


def spec(gpus: int, *words: str) -> LaunchSpec:
    return LaunchSpec(str(uuid.uuid4()), "launched_programs:serve", ("--port", PORT, *words), gpus=gpus)


def given(tmp_path: Path, handle: Handle) -> str:
    """What its process has in its environment."""
    # The kernel may be about to give it its variables.
    raw = eventually(Path(f"/proc/{handle.data['pid']}/environ").read_bytes)
    results = [part.decode() for part in raw.split(b"\0") if part.startswith(b"CUDA_VISIBLE_DEVICES=")]
    meta = json.loads((tmp_path / "root/jobs" / handle.job_id / "launch.json").read_bytes())
    assert ",".join(meta["gpus"]) == "".join(results).partition("=")[2]
    return ",".join(meta["gpus"])


def test_services_that_start_together_share_no_gpu_and_the_next_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = driver(tmp_path, 3), driver(tmp_path, 3)
        handles = await asyncio.gather(first.start(spec(1)), second.start(spec(1)), first.start(spec(1)))
        assert sorted(given(tmp_path, handle) for handle in handles) == ["0", "1", "2"]
        with pytest.raises(ResourceExhausted, match="0 are free: stop a service"):
            await second.start(spec(1))
        assert len(await first.list_services()) == 3
        without = await first.start(spec(0))
        assert given(tmp_path, without) == ""
        freed = given(tmp_path, handles[1])
        await first.stop(handles[1], 5)
        again = await second.start(spec(1))
        assert given(tmp_path, again) == freed
        for item in (handles[0], handles[2], without, again):
            await first.stop(item, 5)
        await first.close()
        await second.close()

    asyncio.run(main())


def test_the_gpus_of_one_that_died_are_free(tmp_path: Path) -> None:
    async def main() -> None:
        ours = driver(tmp_path, 2)
        dead = await ours.start(spec(2))
        os.kill(dead.data["pid"], 9)

        async def is_dead() -> bool:
            return (await ours.status(dead)).phase != "running"

        await eventually_async(is_dead)
        handle = await ours.start(spec(2))
        assert given(tmp_path, handle) == "0,1"
        for handle_ in (dead, handle):
            await ours.stop(handle_, 5)
        await ours.close()

    asyncio.run(main())


def test_a_machine_without_gpus_starts_it_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ours = driver(tmp_path, 0)
        handle = await ours.start(spec(2))
        assert given(tmp_path, handle) == ""
        await ours.stop(handle, 5)
        await ours.close()

    with caplog.at_level(logging.INFO, "headrace.launch"):
        asyncio.run(main())
    assert "without the 2 requested" in caplog.text
