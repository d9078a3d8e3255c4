# SPDX-License-Identifier: Apache-2.0
"""Check cores, memory and process limits; GPUs, their driver and the packages for them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace.core.machine import control_groups, cpu_quota, memory_limit
from headrace.programs.doctor.finding import Finding, ok, problem, size, warning

_MIB = 1024 * 1024
_FILES = 4096
"""Each connection needs one, and each model some."""
_LOCKED = 64 * _MIB
_MEMORY_LOW, _MEMORY_LEAST = 1024 * _MIB, 128 * _MIB
_THREADS = "OMP_NUM_THREADS"
_PROC = Path("/proc")


def check_limits(gpus: int) -> Iterator[Finding]:
    """Check the limits of open files, and of locked memory if there are GPUs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    if unlimited or soft >= _FILES:
        yield ok("open files", "no limit" if unlimited else f"{soft} at most")
    else:
        more = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        fix = f"ulimit -n {more}" if more > soft else "sudo prlimit --nofile=65536:65536 --pid $$"
        yield warning(
            "open files", f"{soft} at most; each connection takes one, and further connections are refused", fix
        )
    locked, maximum = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY:
        yield ok("locked memory", "no limit")
    elif not gpus or locked >= _LOCKED:
        yield ok("locked memory", f"{size(locked)} at most" + ("" if gpus else "; only GPUs need more"))
    else:
        fix = (
            "ulimit -l unlimited" if maximum == resource.RLIM_INFINITY else "sudo prlimit --memlock=unlimited --pid $$"
        )
        yield warning("locked memory", f"{size(locked)} at most; NCCL and GPU copies may need more", fix)


def check_memory(proc: Path = _PROC, within: Iterable[Path] | None = None) -> Iterator[Finding]:
    """Check the free memory of the machine or the control group."""
    fields = {
        name: rest for name, _, rest in (line.partition(":") for line in (proc / "meminfo").read_text().splitlines())
    }
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    owner = "the machine's"
    limit = memory_limit(control_groups() if within is None else within)
    if limit is not None and limit[0] < total:
        total, free, owner = limit[0], min(free, max(0, limit[0] - limit[1])), "the control group's"
    message = f"{size(free)} of {owner} {size(total)} are free"
    if free >= _MEMORY_LOW:
        yield ok("memory", message)
        return
    state = problem if free < _MEMORY_LEAST else warning
    yield state(
        "memory", f"{message}: a model may not fit, and its process be killed", "ps -eo rss,pid,args --sort=-rss | head"
    )


def check_cores(environ: Mapping[str, str], within: Iterable[Path] | None = None) -> Iterator[Finding]:
    """Check the CPU quota: libraries start as many threads as they see cores, whatever the quota is."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(control_groups() if within is None else within)
    if quota is None or quota >= cores:
        yield ok("cores", f"{cores}, and no quota on them")
        return
    wanted = max(1, int(quota))
    message = f"{cores} are visible, but the control group's quota is {quota:g}"
    threads = environ.get(_THREADS, "")
    if threads.isdigit() and int(threads) <= max(1, round(quota)):
        yield ok("cores", f"{message}; {_THREADS} is {threads}")
    else:
        text = f"{message}: libraries start {cores} threads, which the quota then slows down"
        yield warning("cores", text, f"export {_THREADS}={wanted}")


_NVIDIA = "0x10de"
_DEVICE = re.compile(r"nvidia[0-9]+")
_TORCH_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)
_FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The first driver for each major version of CUDA; within one, newer libraries run on older drivers."""
_WHEELS = {12: "cu126", 11: "cu118"}
Version = tuple[int, ...]


def devices(folder: Path = Path("/dev")) -> list[str]:
    """Return the device files of this machine's GPUs."""
    try:
        return sorted(name for name in os.listdir(folder) if _DEVICE.fullmatch(name))
    except OSError:
        return []


def count_pci_gpus(pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """Return the number of NVIDIA GPUs on the bus, with or without a driver."""
    count = 0
    for device in pci.iterdir() if pci.is_dir() else ():
        try:
            is_nvidia = (device / "vendor").read_text().strip() == _NVIDIA
            count += is_nvidia and (device / "class").read_text().startswith("0x03")
        except OSError:
            continue
    return count


def check_gpus(
    environ: Mapping[str, str], folder: Path = Path("/dev"), proc: Path = Path("/proc")
) -> Iterator[Finding]:
    """Check the GPUs, from the cards to the libraries; stop at the first problem, which causes others."""
    files, pci_count = devices(folder), count_pci_gpus()
    if not files:
        if pci_count:
            message = f"{pci_count} on the PCI bus, but no driver is loaded for them: no /dev/nvidia0"
            fix = "docker run --gpus all ..." if Path("/.dockerenv").exists() else "sudo modprobe nvidia"
            yield problem("GPUs", message, fix)
        else:
            yield ok("GPUs", "none: models run on the CPU")
        return
    closed = [name for name in files if not os.access(folder / name, os.R_OK | os.W_OK)]
    if closed:
        message = f"{folder / closed[0]} may not be used by this user"
        yield problem("GPUs", message, "sudo usermod -aG $(stat -c %G /dev/nvidia0) $(id -un)")
        return
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and (not hidden.strip() or hidden.strip().startswith("-")):
        yield warning(
            "GPUs",
            f"{len(files)} found, but CUDA_VISIBLE_DEVICES={hidden!r} hides them",
            "unset CUDA_VISIBLE_DEVICES",
        )
        return
    driver = driver_version(proc)
    cuda: Version = ()
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        yield ok("GPUs", f"{len(files)} found")
        message = "pynvml is not installed: no GPU metrics"
        yield warning("GPU metrics", message, "pip install 'headrace[gpu]'")
    else:
        message, cuda, driver = _query_driver(library, driver)
        if not cuda:
            yield problem("GPUs", message, "nvidia-smi")
            return
        yield ok("GPUs", message)
    yield from check_libraries(driver, cuda)


def check_libraries(driver: str, cuda: Version) -> Iterator[Finding]:
    """Compare the driver with the CUDA versions of PyTorch and ONNX Runtime."""
    cuda = cuda or cuda_of(driver)
    yield ok("GPU driver", f"{driver or 'of an unknown version'}, for CUDA {'.'.join(map(str, cuda)) or '?'}")
    torch = _version("torch")
    if torch:
        yield _torch(torch, torch_cuda(), cuda)
    runtime = _version("onnxruntime")
    if runtime and not _version("onnxruntime-gpu"):
        message = f"onnxruntime {runtime} runs on the CPU only"
        yield warning("ONNX Runtime and CUDA", message, "pip uninstall -y onnxruntime && pip install onnxruntime-gpu")


def _torch(torch: str, built: Version | None, cuda: Version) -> Finding:
    name = "PyTorch and CUDA"
    if built is None:
        index = f"https://download.pytorch.org/whl/{_WHEELS.get(cuda[0] if cuda else 12, 'cu130')}"
        message = f"torch {torch} is built without CUDA: models run on the CPU"
        return warning(name, message, f"pip install --force-reinstall torch --index-url {index}")
    text = ".".join(map(str, built))
    if cuda and built[0] > cuda[0]:
        needed = _FIRST_DRIVERS.get(built[0])
        message = f"torch {torch} is built for CUDA {text}, and the driver has {'.'.join(map(str, cuda))} at most"
        message += f": update the driver to {needed} or newer, or" if needed else ":"
        wheels = _WHEELS.get(cuda[0], "cu126")
        fix = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheels}"
        return problem(name, f"{message} use another build", fix)
    return ok(name, f"torch {torch} for CUDA {text}")


def _query_driver(library: Any, driver: str) -> tuple[str, Version, str]:
    """Return the driver's GPUs, CUDA and version. If it does not answer: the reason, and no CUDA."""
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        reason = f"the driver does not answer ({error})"
        if "mismatch" in str(error).lower():
            reason += ": it was updated since the machine started: restart the machine"
        return reason, (), driver
    try:
        reported = library.nvmlSystemGetDriverVersion()
        driver = reported.decode() if isinstance(reported, bytes) else reported
        number = library.nvmlSystemGetCudaDriverVersion()
        names = []
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            name, memory = library.nvmlDeviceGetName(handle), library.nvmlDeviceGetMemoryInfo(handle)
            name = name.decode() if isinstance(name, bytes) else name
            names.append(f"{name} ({size(memory.free)} of {size(memory.total)} free)")
    except library.NVMLError as error:
        return f"the driver does not answer ({error})", (), driver
    finally:
        library.nvmlShutdown()
    return ", ".join(names), (number // 1000, number % 1000 // 10), driver


def driver_version(proc: Path = Path("/proc")) -> str:
    """Return the version of the loaded driver; "" if unknown."""
    try:
        first = (proc / "driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    match = re.search(r"\s([0-9]{3,}\.[0-9.]+)\s", first)
    return match[1] if match else ""


def cuda_of(driver: str) -> Version:
    """Return the newest major version of CUDA that a driver supports."""
    numbers = _numbers(driver)
    fit = [major for major, first in _FIRST_DRIVERS.items() if numbers and numbers[0] >= first]
    return (max(fit),) if fit else ()


def torch_cuda() -> Version | None:
    """Return the CUDA version of the installed PyTorch; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            match = _TORCH_CUDA.search(Path(folder, "version.py").read_text())
        except OSError:
            continue
        if match:
            return _numbers(match[1])
    return None


def _numbers(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"[0-9]+", text))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
