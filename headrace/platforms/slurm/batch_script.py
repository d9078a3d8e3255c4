# SPDX-License-Identifier: Apache-2.0
"""A service as a Slurm batch job: the arguments of `sbatch`, the script, and the variables as text. No I/O.

The script contains no secrets. All variables are in a file `env` beside it, which the script opens and removes first, and
which the service's shell reads as standard input: neither Slurm, a process list nor the container runtime shows them, and
no runtime evaluates them. Options of a job are arguments of `sbatch` rather than `#SBATCH` lines, which Slurm quotes in its
own way.
"""

from __future__ import annotations

import json
import re
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.core.errors import InvalidArgument
from headrace.platforms.contract import Container, LaunchSpec, Mount
from headrace.platforms.slurm.settings import Mode, SlurmSettings

PORT_TAKEN = 98
"""Exit code of the script if another program listens on the service's port."""
NODE_PORTS = (20_000, 29_999)
_MOST_COMMAND_BYTES = 100_000
_INNER = 'eval "$(cat)" && exec /bin/sh -c "$1" "$0" </dev/null'
"""The service's shell: read the variables from standard input, then run the command."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9/.][A-Za-z0-9_./:@#+=-]*")
_CONTROL = re.compile(r"[\x01-\x1f\x7f]")
_MOUNT = re.compile(r"/[^,:\x00-\x1f\x7f]*")
_SCRIPT = """\
#!/bin/bash
# A service of Headrace, job {job_id}. Its variables are not in here: see `env`, which is gone once this runs.
set -u
umask 077
cd -- {folder} || exit 1
exec 9<env || exit 1
rm -f -- env
trap 'code=$?; printf "%s\\n" "$code" >end.new && mv -f -- end.new end' EXIT
trap 'exit 143' TERM
if (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; then
  echo 'port {port} of this node is taken by another program: start the service again'
  exit {taken}
fi
export SLURM_EXPORT_ENV=ALL PYTHONUNBUFFERED=1{nodes}
{command} <&9 &
wait "$!"
"""

_NODES = """
# The service's nodes meet at this one, the first.
MASTER_ADDR=$(scontrol show node -o "$SLURMD_NODENAME" 2>/dev/null | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_ADDR=${{MASTER_ADDR:-$SLURMD_NODENAME}} MASTER_PORT={port}"""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Everything that a job is submitted with."""

    sbatch: tuple[str, ...]
    """The arguments of sbatch, without the path of the script."""
    script: str
    variables: str
    """The content of the file `env`."""
    meta: str
    """One line of JSON: the ports and the start time, stored in the folder."""


def node_port(job_id: str) -> int:
    """Return the port of a service on its node, derived from the job id: Pyxis containers share the ports of their node."""
    first, last = NODE_PORTS
    return first + uuid.UUID(job_id).int % (last - first + 1)


def nodes_port(port: int) -> int:
    """Return the port at which the nodes of a service meet, derived from the service's."""
    return port - 10_000 if port - 10_000 > 1024 else port + 10_000


def build_batch_job(spec: LaunchSpec, settings: SlurmSettings, folder: str, began: float) -> BatchJob:
    """Return the job. `folder`: its own, as the cluster's machines see it. Raises InvalidArgument for unusable values."""
    container = spec.container
    if container is None:
        raise InvalidArgument("slurm runs commands: give the service a container")
    check_container(container)
    mode: Mode = settings.mode if container.image else "bare"
    # `began` to the microsecond also distinguishes two starts of a job.
    meta = {"port": container.port, "host_port": spec.host_port, "began": began}
    command = " ".join(map(quote_arg, srun_args(spec.job_id, container, mode, settings, spec.gpus, spec.nodes)))
    script = _SCRIPT.format(
        job_id=spec.job_id,
        folder=shlex.quote(folder),
        port=container.port,
        taken=PORT_TAKEN,
        nodes=_NODES.format(port=nodes_port(container.port)) if spec.nodes > 1 else "",
        command=command,
    )
    return BatchJob(
        sbatch_args(spec.job_id, settings, folder, spec.gpus, spec.nodes),
        script,
        export_lines({**spec.environment, **spec.secret_environment}),
        json.dumps(meta, separators=(",", ":")),
    )


def sbatch_args(job_id: str, settings: SlurmSettings, folder: str, gpus: int, nodes: int = 1) -> tuple[str, ...]:
    """Return the arguments of sbatch. `folder` must not contain a percent sign: `--output` would read it as a pattern."""
    if gpus < 0:
        raise InvalidArgument("a service takes 0 or more GPUs")
    optional = {
        "account": settings.account,
        "time": settings.time_limit,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "reservation": settings.reservation,
        "gres": f"gpu:{gpus}" if gpus else "",
    }
    return (
        "--parsable",
        f"--job-name={job_id}",
        f"--comment=headrace service {job_id}",
        f"--partition={settings.partition}",
        *_tasks(nodes),
        f"--cpus-per-task={settings.cpus}",
        f"--mem={settings.memory}",
        f"--chdir={folder}",
        f"--output={folder}/log",
        "--open-mode=append",
        # The script removes its variables, so it cannot run twice.
        "--no-requeue",
        # The environment has been cleaned: see `login_node`.
        "--export=ALL",
        *(f"--{name}={value}" for name, value in optional.items() if value),
    )


def _tasks(nodes: int) -> tuple[str, ...]:
    """Return the options for a task on each node."""
    return (f"--nodes={nodes}", f"--ntasks={nodes}", *(("--ntasks-per-node=1",) if nodes > 1 else ()))


def srun_args(
    job_id: str, container: Container, mode: Mode, settings: SlurmSettings, gpus: int, nodes: int = 1
) -> list[str]:
    """Return the command of the job's single step: srun, with or without a container."""
    # Since 22.05 srun does not inherit the number of CPUs from the job.
    args = [
        "srun",
        *_tasks(nodes),
        f"--cpus-per-task={settings.cpus}",
        "--kill-on-bad-exit=1",
        "--mpi=none",
    ]
    mounts = _mounts(container, mode, settings)
    if mode == "pyxis":
        args += [f"--container-image={pyxis_image(container.image)}", "--no-container-mount-home"]
        args += [f"--container-mounts={','.join(mounts)}"] if mounts else []
    elif mode == "apptainer":
        args += ["apptainer", "exec", "--no-home", "--writable-tmpfs", *(["--nv"] if gpus else [])]
        args += [arg for mount in mounts for arg in ("--bind", mount)] + [apptainer_image(container.image)]
    # The job id is an argument, so that `ps` on the node shows which job it is.
    return [*args, "/bin/sh", "-c", _INNER, f"headrace-{job_id}", container.command]


def pyxis_image(image: str) -> str:
    """Return the image in Enroot's form, REGISTRY#IMAGE:TAG; the path of a squashfs file is unchanged."""
    if image.startswith(("/", "./")):
        return image
    name = image.removeprefix("docker://")
    registry, slash, rest = name.partition("/")
    if slash and "#" not in name and ("." in registry or ":" in registry or registry == "localhost"):
        return f"{registry}#{rest}"
    return name


def apptainer_image(image: str) -> str:
    """Return the image in Apptainer's form: the path of a file is unchanged, a name gets docker://."""
    if image.startswith(("/", "./")) or "://" in image:
        return image
    return "docker://" + image.replace("#", "/", 1)


def export_lines(variables: Mapping[str, str]) -> str:
    """Return lines of POSIX shell that export exactly these values."""
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise InvalidArgument(f"{name[:64]!a} cannot be a variable's name: use letters, digits and _")
        if "\0" in value:
            raise InvalidArgument(f"the variable {name} has a zero byte, which no variable can have")
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def quote_arg(arg: str) -> str:
    """Quote an argument for bash on one line: sbatch refuses carriage returns and interprets lines with #SBATCH."""
    if not _CONTROL.search(arg):
        return shlex.quote(arg)
    escaped = arg.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\{ord(match[0]):03o}", escaped) + "'"


def check_container(container: Container) -> None:
    """Raise InvalidArgument for values that Slurm would not pass on unchanged."""
    if not container.command.strip() or "\0" in container.command:
        raise InvalidArgument("a service's command is a line for a shell, without a zero byte")
    if len(container.command.encode(errors="replace")) > _MOST_COMMAND_BYTES:
        raise InvalidArgument(f"a service's command has at most {_MOST_COMMAND_BYTES} bytes on Slurm")
    if not 1024 <= container.port <= 65535:
        raise InvalidArgument("slurm: a service listens at a port from 1024 to 65535")
    if container.image and not _IMAGE.fullmatch(container.image):
        raise InvalidArgument(
            f"{container.image[:100]!a} cannot be an image: write NAME:TAG, or the path of an image file"
        )
    for mount in container.mounts:
        for path in (mount.host, mount.inside):
            if not _MOUNT.fullmatch(path):
                raise InvalidArgument(f"{path[:100]!a} cannot be mounted on Slurm: an absolute path without , and :")


def _mounts(container: Container, mode: Mode, settings: SlurmSettings) -> list[str]:
    if mode == "bare":
        for mount in container.mounts:
            if mount.host != mount.inside:
                raise InvalidArgument(
                    f"without a container {mount.host[:100]!a} cannot be seen as {mount.inside[:100]!a}: use one path"
                )
        return []
    extra = [part for part in settings.mounts.split(",") if part]
    for part in extra:
        pieces = part.split(":")
        if not 1 <= len(pieces) <= 3 or not all(_MOUNT.fullmatch(piece) for piece in pieces[:2]):
            raise InvalidArgument(f"slurm: mounts: {part[:100]!a} cannot be used; write /SRC:/DST or /SRC:/DST:ro")
    return [*(_mount(mount) for mount in container.mounts), *extra]


def _mount(mount: Mount) -> str:
    return f"{mount.host}:{mount.inside}:ro"
