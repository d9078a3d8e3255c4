# SPDX-License-Identifier: Apache-2.0
"""A service as a batch job: the words of `sbatch`, the script, and the variables as text. Called by `driver`; no I/O.

The script has nothing secret in it. The variables, plain and secret alike, lie in a file `env` beside it that the script
opens and removes before anything else, and that reaches the service's shell as its standard input: neither Slurm nor a
process list nor the container's runtime ever has them, and no runtime evaluates them. Options of a job are words of
`sbatch` rather than `#SBATCH` lines, whose quoting is Slurm's own.
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
"""How the script ends when somebody listens at the service's port already: nothing else tells the two apart."""
NODE_PORTS = (20_000, 29_999)
_MOST_COMMAND_BYTES = 100_000
_INNER = 'eval "$(cat)" && exec /bin/sh -c "$1" "$0" </dev/null'
"""The service's shell: takes the variables from its standard input, and then the command."""
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
export SLURM_EXPORT_ENV=ALL PYTHONUNBUFFERED=1
{command} <&9 &
wait "$!"
"""


@dataclass(frozen=True, slots=True)
class Submission:
    """All that a job is made of."""

    sbatch: tuple[str, ...]
    """The words of sbatch, without the path of the script."""
    script: str
    variables: str
    """What the file `env` has."""
    meta: str
    """One line of JSON for whoever finds the folder."""


def node_port(job_id: str) -> int:
    """A port for a service on its node, the same for the same job: containers of Pyxis share their node's ports."""
    first, last = NODE_PORTS
    return first + uuid.UUID(job_id).int % (last - first + 1)


def build(spec: LaunchSpec, settings: SlurmSettings, folder: str, began: float) -> Submission:
    """`folder`: the job's own, as the cluster's machines see it. Raises InvalidArgument for what could not arrive."""
    box = spec.container
    if box is None:
        raise InvalidArgument("slurm starts commands: give the service's container")
    check_container(box)
    mode: Mode = settings.mode if box.image else "bare"
    # `began` to the microsecond also tells one start of a job from another.
    meta = {"port": box.port, "host_port": spec.host_port, "began": began}
    command = " ".join(map(quoted, step_words(spec.job_id, box, mode, settings, spec.gpus)))
    script = _SCRIPT.format(
        job_id=spec.job_id, folder=shlex.quote(folder), port=box.port, taken=PORT_TAKEN, command=command
    )
    return Submission(
        sbatch_words(spec.job_id, settings, folder, spec.gpus),
        script,
        variables_text({**spec.environment, **spec.secret_environment}),
        json.dumps(meta, separators=(",", ":")),
    )


def sbatch_words(job_id: str, settings: SlurmSettings, folder: str, gpus: int) -> tuple[str, ...]:
    """What the job asks of Slurm. A percent sign in `--output` would be a pattern, so `folder` must have none."""
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
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={settings.cpus}",
        f"--mem={settings.memory}",
        f"--chdir={folder}",
        f"--output={folder}/log",
        "--open-mode=append",
        # Its variables are gone once it has run: it could not run twice.
        "--no-requeue",
        # Of an environment that has been cleaned: see `hosts`.
        "--export=ALL",
        *(f"--{name}={value}" for name, value in optional.items() if value),
    )


def step_words(job_id: str, box: Container, mode: Mode, settings: SlurmSettings, gpus: int) -> list[str]:
    """The job's one step, by `srun`, in its container or without."""
    # srun does not take over the job's processors by itself since 22.05.
    words = [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={settings.cpus}",
        "--kill-on-bad-exit=1",
        "--mpi=none",
    ]
    mounts = _mounts(box, mode, settings)
    if mode == "pyxis":
        words += [f"--container-image={pyxis_image(box.image)}", "--no-container-mount-home"]
        words += [f"--container-mounts={','.join(mounts)}"] if mounts else []
    elif mode == "apptainer":
        words += ["apptainer", "exec", "--no-home", "--writable-tmpfs", *(["--nv"] if gpus else [])]
        words += [word for mount in mounts for word in ("--bind", mount)] + [apptainer_image(box.image)]
    # The job's id is a word of it, so that `ps` on the node tells whose it is.
    return [*words, "/bin/sh", "-c", _INNER, f"headrace-{job_id}", box.command]


def pyxis_image(image: str) -> str:
    """As Enroot writes it, REGISTRY#IMAGE:TAG; a path of a squashfs file stays."""
    if image.startswith(("/", "./")):
        return image
    name = image.removeprefix("docker://")
    registry, slash, rest = name.partition("/")
    if slash and "#" not in name and ("." in registry or ":" in registry or registry == "localhost"):
        return f"{registry}#{rest}"
    return name


def apptainer_image(image: str) -> str:
    """A path of an image file stays; a name is one of a registry."""
    if image.startswith(("/", "./")) or "://" in image:
        return image
    return "docker://" + image.replace("#", "/", 1)


def variables_text(variables: Mapping[str, str]) -> str:
    """Lines of a POSIX shell that set them to exactly these values."""
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise InvalidArgument(f"{name[:64]!a} cannot be a variable's name: use letters, digits and _")
        if "\0" in value:
            raise InvalidArgument(f"the variable {name} has a zero byte, which no variable can have")
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def quoted(word: str) -> str:
    """A word for bash on one line: sbatch refuses scripts with carriage returns, and reads lines that begin with #SBATCH."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\{ord(found[0]):03o}", escaped) + "'"


def check_container(box: Container) -> None:
    """Raises InvalidArgument for what could not arrive as the same value."""
    if not box.command.strip() or "\0" in box.command:
        raise InvalidArgument("a service's command is a line for a shell, without a zero byte")
    if len(box.command.encode(errors="replace")) > _MOST_COMMAND_BYTES:
        raise InvalidArgument(f"a service's command has at most {_MOST_COMMAND_BYTES} bytes on Slurm")
    if not 1024 <= box.port <= 65535:
        raise InvalidArgument("slurm: a service listens at a port from 1024 to 65535")
    if box.image and not _IMAGE.fullmatch(box.image):
        raise InvalidArgument(f"{box.image[:100]!a} cannot be an image: write NAME:TAG, or the path of an image file")
    for mount in box.mounts:
        for path in (mount.host, mount.inside):
            if not _MOUNT.fullmatch(path):
                raise InvalidArgument(f"{path[:100]!a} cannot be mounted on Slurm: an absolute path without , and :")


def _mounts(box: Container, mode: Mode, settings: SlurmSettings) -> list[str]:
    if mode == "bare":
        for mount in box.mounts:
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
    return [*(_mount(mount) for mount in box.mounts), *extra]


def _mount(mount: Mount) -> str:
    return f"{mount.host}:{mount.inside}:ro"
