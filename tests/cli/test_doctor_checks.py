# SPDX-License-Identifier: Apache-2.0
"""Checks of `headrace doctor` on simulated machines: folders replace /proc, /dev and control groups."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.machine import control_groups, cpu_quota
from headrace.programs.doctor import folders, machine, packages
from headrace.programs.doctor.finding import Finding, diagnose, ok
from headrace.programs.doctor.servers import Holder, holder_of


def states(findings: Any) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


# Isolation


def test_a_check_that_fails_leaves_the_others() -> None:
    over = threading.Event()

    def raises() -> list[Finding]:
        raise RuntimeError("no such\nthing")

    def hangs() -> list[Finding]:
        over.wait()
        return []

    result = diagnose({"first": raises, "second": hangs, "third": lambda: [ok("fine", "yes")]}, 0.2)
    over.set()
    assert [(item.name, item.state) for item in result] == [("first", "warning"), ("second", "warning"), ("fine", "ok")]
    assert "RuntimeError: no such" in result[0].message and "\n" not in result[0].message
    assert "0.2 s" in result[1].message


# Folders


def test_repositories(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert states(folders.check_repository(tmp_path / "none")) == {"repository": "problem"}
    assert states(folders.check_repository(tmp_path / "file")) == {"repository": "problem"}
    folder = tmp_path / "my models"
    folder.mkdir()
    assert states(folders.check_repository(folder)) == {"repository": "warning"}
    (folder / "one" / "1").mkdir(parents=True)
    (found,) = folders.check_repository(folder)
    assert found.state == "ok" and found.fix == f"headrace models check '{folder}'"
    late = folder / "one" / "1" / "model.onnx"
    late.write_text("")
    os.utime(late, (time.time() + 3600,) * 2)
    assert states(folders.check_repository(folder)) == {"repository": "ok", "clock and files": "warning"}
    (folder / "one" / "config.pbtxt").symlink_to(tmp_path / "gone")
    found = next(folders.check_repository(folder))
    assert found.state == "problem" and f"config.pbtxt is a link to {tmp_path}/gone" in found.message


def test_what_this_user_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read everything: the answer is given here."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.pbtxt").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "config.pbtxt")
    (found,) = folders.check_repository(tmp_path)
    assert found.state == "problem" and found.fix == f"sudo chmod -R a+rX {tmp_path}"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (found,) = folders.check_repository(tmp_path)
    assert found.state == "problem" and f"{tmp_path} cannot be read" in found.message


def test_folders_that_are_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open" / "headrace").mkdir(parents=True)
    (tmp_path / "open" / "headrace").chmod(0o777)
    result = states(
        folders.check_writable({"XDG_CACHE_HOME": f"{tmp_path}/file/x", "XDG_STATE_HOME": f"{tmp_path}/open"})
    )
    assert result == {"cache folder": "problem", "state folder": "warning", "temporary folder": "ok"}
    result = states(
        folders.check_writable({"XDG_CACHE_HOME": f"{tmp_path}/a/b", "HEADRACE_STATE_DIR": str(tmp_path / "file")})
    )
    assert result["cache folder"] == "ok" and result["state folder"] == "problem"
    assert not (tmp_path / "a").exists()


def test_each_disk_once(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    names = [item.name for item in folders.check_disk_space(environ, tmp_path, tmp_path / "none")]
    assert names[0] == f"disk of {tmp_path}" and names[-1] == "shared memory"
    assert sum(name.startswith(f"disk of {tmp_path}") for name in names) == 1


# The machine


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_control_group(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_quota([tmp_path]) == cores


def test_the_group_of_this_process_and_those_around_it(tmp_path: Path) -> None:
    """As systemd makes them: a service's CPUQuota and its slice's; the smallest counts."""
    inner = tmp_path / "sys" / "a.slice" / "b.service"
    inner.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:name=systemd:/\n0::/a.slice/b.service\n")
    result = control_groups(tmp_path / "sys", tmp_path / "proc")
    assert result == [tmp_path / "sys", tmp_path / "sys" / "a.slice", inner]
    (inner / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "sys" / "a.slice" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(result) == 1.5
    assert control_groups(tmp_path / "sys", tmp_path / "none") == [tmp_path / "sys"]


def test_threads_and_the_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (found,) = machine.check_cores({}, [tmp_path])
    assert (found.state, found.fix) == ("warning", "export OMP_NUM_THREADS=1")
    (found,) = machine.check_cores({"OMP_NUM_THREADS": "1"}, [tmp_path])
    assert found.state == "ok"


def test_memory_of_the_machine_and_of_the_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n")
    (found,) = machine.check_memory(tmp_path, [tmp_path])
    assert found == ok("memory", "4.0 GiB of the machine's 8.0 GiB are free")
    (tmp_path / "memory.max").write_text(f"{512 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{500 << 20}\n")
    (found,) = machine.check_memory(tmp_path, [tmp_path])
    assert found.state == "problem" and found.message.startswith("12.0 MiB of the control group's 512.0 MiB")


def test_the_owner_of_a_port_is_not_always_visible(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1\n"
    (tmp_path / "net" / "tcp").write_text("head\n" + row)
    assert holder_of(8000, tmp_path) == Holder("root")
    assert holder_of(8001, tmp_path) is None
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "3").symlink_to("socket:[4711]")
    (tmp_path / "7" / "cmdline").write_bytes(b"/usr/bin/python3\0/opt/bin/headrace\0serve\0--key=secret\0x\0")
    holder = holder_of(8000, tmp_path)
    assert holder is not None and holder.pid == 7 and holder.is_headrace
    assert str(holder).startswith("headrace serve (process 7, user ")


# Packages


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("1.20", ">=1.20", True),
        ("1.9.3", ">=1.20", False),
        ("2.13.0+cpu", ">=2.6", True),
        ("7.35.0", "<8,>=6.31.1", True),
        ("8.0", "<8,>=6.31.1", False),
        ("1.4.5", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False),
        ("1.0", "==1.0.0", True),
        ("1.0", "!=1.0", False),
        ("1.0", "==2.*", True),
        ("1.0", "", True),
    ],
)
def test_bounds(version: str, bounds: str, fits: bool) -> None:
    assert packages.satisfies(version, bounds) is fits


def test_lines_of_metadata() -> None:
    read = packages.parse_requirement
    assert read("protobuf<8,>=6.31.1") == ("protobuf", "<8,>=6.31.1", "", False)
    assert read('PyYAML (>=6.0) ; extra == "x"') == ("pyyaml", ">=6.0", "x", False)
    assert read("numpy<2; python_version < '3.9'") == ("numpy", "<2", "", True)
    assert read("thing @ https://example.org/thing.whl") is None


def add_package(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_incompatible_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(tmp_path, "onnxruntime", "1.20.0")
    add_package(tmp_path, "onnxruntime-gpu", "1.20.0")
    add_package(tmp_path, "tensorflow", "2.16.0", "protobuf<5,>=3.20.3", "numpy<2; python_version < '3.9'")
    monkeypatch.syspath_prepend(str(tmp_path))
    results = {check_pair.name: check_pair for check_pair in packages.check_pairs(["tensorflow"])}
    assert states(results.values()) == {
        "onnxruntime and onnxruntime-gpu": "problem",
        "tensorflow and protobuf": "warning",
    }
    assert results["tensorflow and protobuf"].fix == "pip install 'protobuf<5,>=3.20.3' tensorflow"


def test_extras_that_are_missing_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=1.26", "nosuch>=1; extra == 'moon'", "oldone>=2; extra == 'sun'", "headrace[sun]; extra == 'all'"]
    add_package(tmp_path, "headrace", "9", *wanted)
    add_package(tmp_path, "oldone", "1.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    results = {check_package.name: check_package for check_package in packages.check_packages()}
    assert states(results.values()) == {
        "packages": "ok",
        "extra moon": "ok",
        "extra sun": "warning",
        "packages together": "ok",
    }
    assert results["extra moon"].fix == "pip install 'headrace[moon]'"
    assert "oldone 1.5 is installed, but >=2 is needed" in results["extra sun"].message


# GPUs


class NvmlError(Exception): ...


def nvml(**answers: Any) -> SimpleNamespace:
    """A driver that answers, but where told otherwise."""
    usual: dict[str, Any] = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"550.90.07",
        "nvmlSystemGetCudaDriverVersion": lambda: 12040,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(free=2**30, total=2**31),
    }
    return SimpleNamespace(**{**usual, **answers})


def with_gpu(tmp_path: Path) -> Path:
    (tmp_path / "nvidia0").write_text("")
    (tmp_path / "nvidiactl").write_text("")
    return tmp_path


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_pci_gpus", lambda: 0)
    assert states(machine.check_gpus({}, tmp_path)) == {"GPUs": "ok"}
    monkeypatch.setattr(machine, "count_pci_gpus", lambda: 2)
    (found,) = machine.check_gpus({}, tmp_path)
    assert found.state == "problem" and found.message.startswith("2 on the PCI bus")


def test_cards_on_the_bus(tmp_path: Path) -> None:
    for name, vendor, kind in (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300"), ("2", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert machine.count_pci_gpus(tmp_path) == 1


def test_a_gpu_that_is_hidden(tmp_path: Path) -> None:
    (found,) = machine.check_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, with_gpu(tmp_path))
    assert (found.state, found.fix) == ("warning", "unset CUDA_VISIBLE_DEVICES")


def test_a_gpu_with_its_library_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    results = {check_gpu.name: check_gpu for check_gpu in machine.check_gpus({}, with_gpu(tmp_path), tmp_path)}
    assert results["GPUs"] == ok("GPUs", "NVIDIA H200 (1.0 GiB of 2.0 GiB free)")
    assert results["GPU driver"] == ok("GPU driver", "550.90.07, for CUDA 12.4")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    results = {check_gpu.name: check_gpu for check_gpu in machine.check_gpus({}, tmp_path, tmp_path)}
    assert results["GPU metrics"].fix == "pip install 'headrace[gpu]'"


def test_a_driver_that_was_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise NvmlError("Driver/library version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=mismatch))
    (found,) = machine.check_gpus({}, with_gpu(tmp_path), tmp_path)
    assert found.state == "problem" and "restart the machine" in found.message


def test_pytorch_against_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_package(tmp_path, "torch", "2.13.0")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, module)

    def check_cuda(cuda: str) -> Finding:
        (tmp_path / "torch" / "version.py").write_text(
            f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip = '9'\n"
        )
        return {check_library.name: check_library for check_library in machine.check_libraries("550.90", (12, 4))}[
            "PyTorch and CUDA"
        ]

    assert check_cuda("'12.8'").state == "ok"
    wrong = check_cuda("'13.0'")
    assert wrong.state == "problem" and "580 or newer" in wrong.message and wrong.fix.endswith("/cu126")
    assert check_cuda("None").state == "warning"


def test_the_driver_in_proc(tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build  (root@x)\nGCC\n"
    (tmp_path / "driver/nvidia/version").write_text(text)
    assert machine.driver_version(tmp_path) == "570.133.20"
    assert machine.cuda_of("570.133.20") == (12,) and machine.cuda_of("580.1") == (13,) and machine.cuda_of("") == ()
    assert machine.driver_version(tmp_path / "none") == ""
