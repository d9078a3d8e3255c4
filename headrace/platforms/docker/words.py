# SPDX-License-Identifier: Apache-2.0
"""A service as the words of `docker create`, and the tar of its secrets. Called by `driver`; does nothing by itself.

Each user's text is one word or a part of one, so no shell ever reads it; what docker itself would read otherwise (options
for images, commas in a mount) is quoted or refused here.
"""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import InvalidArgument, ResourceExhausted
from headrace.platforms.contract import Container, LaunchSpec, Mount
from headrace.platforms.docker.settings import DockerSettings
from headrace.platforms.folders import is_id

JOB_LABEL = "headrace.job"
"""On every container of ours: the job's id."""
MADE_LABEL = "headrace.made"
"""On a network that a driver has made."""
SHELL_LABEL = "headrace.shell"
"""On an image whose entry point is not for shell lines: which shell it has."""
SECRETS_FOLDER = "headrace-secrets"
"""At the container's root; empty as soon as the container's first line has read it."""

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUILT_IN_NETWORKS = frozenset({"bridge", "host", "none", "default"})


@dataclass(frozen=True, slots=True)
class Image:
    """What is needed of an image's own settings."""

    name: str
    shell: str = ""
    """See `SHELL_LABEL`."""


def container_of(spec: LaunchSpec) -> Container:
    """The container of a spec in which everything can reach the engine as it is; raises InvalidArgument."""
    if not is_id(spec.job_id):
        raise InvalidArgument("a service's job id is a UUID, written in lower case")
    box = spec.container
    if box is None:
        raise InvalidArgument("the platform local-docker runs containers: give the service an image and a command")
    check_image(box.image)
    for name in (*spec.environment, *spec.secret_environment):
        if not _VARIABLE.fullmatch(name):
            raise InvalidArgument(f"{name[:200]!a} is not a variable's name: letters, digits and _")
    texts = [box.command, *spec.environment.values(), *spec.secret_environment.values()]
    texts += [text for pair in spec.labels.items() for text in pair]
    if any("\0" in text for text in texts):
        raise InvalidArgument("a zero byte cannot reach a container: take it out of the command, variable or label")
    for mount in box.mounts:
        mount_words(mount)
    return box


def check_image(name: str) -> None:
    """Raises InvalidArgument where this cannot be an image's name: it must not be read as an option."""
    if not _IMAGE.fullmatch(name):
        raise InvalidArgument(f"{name[:200]!a} is not an image's name, such as nvcr.io/nvidia/tao/tao-toolkit:7.0.1")


def network_to_make(name: str) -> bool:
    """Whether this is a network that is made by its name; raises InvalidArgument where it cannot be a name."""
    if not _NETWORK.fullmatch(name):
        raise InvalidArgument(
            f"{name[:200]!a} is not a network's name; change DOCKER_NETWORK: letters, digits, _, . and -"
        )
    return name not in _BUILT_IN_NETWORKS


def create_words(
    spec: LaunchSpec, box: Container, image: Image, settings: DockerSettings, *, tegra: bool
) -> tuple[str, ...]:
    """The words after `docker`."""
    words = ["create", "--name", spec.job_id]
    labels = {**{f"headrace.{key}": value for key, value in spec.labels.items()}, "tao-toolkit": "headrace"}
    for key, value in {**labels, "tao-job": spec.job_id, JOB_LABEL: spec.job_id}.items():
        words += ["--label", f"{key}={value}"]
    words += ["--publish", _published(settings.address, spec.host_port, box.port), "--network", settings.network]
    words += ["--shm-size", str(settings.shm_bytes)]
    # The engine's own default may keep everything, or nothing that `docker logs` can read.
    words += ["--log-driver", "json-file", "--log-opt", f"max-size={max(settings.log_bytes // 2, 1024)}"]
    words += ["--log-opt", "max-file=2"]
    variables = dict(spec.environment)
    if spec.gpus > 0 and settings.gpu_way != "none":
        flags, more = gpu_words(spec.gpus, settings.gpu_ids, tegra=tegra)
        words += flags
        variables = {**more, **variables}
    for name, value in variables.items():
        words += ["--env", f"{name}={value}"]
    for mount in box.mounts:
        words += mount_words(mount)
    line = entry_line(box.command, secret=bool(spec.secret_environment))
    shell = settings.shell_path or image.shell or "/bin/bash"
    if image.shell:
        # Such an image's entry point is a program; others have one that prepares the machine and runs the words after it.
        return (*words, "--entrypoint", shell, image.name, "-c", line)
    return (*words, image.name, shell, "-c", line)


def _published(address: str, host_port: int | None, port: int) -> str:
    where = f"[{address}]" if ":" in address else address
    return f"{where}:{'' if host_port is None else host_port}:{port}"


def gpu_words(count: int, ids: Sequence[str], *, tegra: bool) -> tuple[list[str], dict[str, str]]:
    """Options and variables by which a container gets GPUs."""
    if ids and len(ids) < count:
        raise ResourceExhausted(f"{count} GPUs are asked for and {len(ids)} may be given: name more, or ask for fewer")
    chosen = list(ids[:count])
    if tegra:
        seen = ",".join(chosen) or "all"
        return ["--runtime", "nvidia"], {"NVIDIA_DRIVER_CAPABILITIES": "all", "NVIDIA_VISIBLE_DEVICES": seen}
    # docker reads the option's value as a line of CSV.
    return ["--gpus", _csv(f"device={','.join(chosen)}") if chosen else str(count)], {}


def mount_words(mount: Mount, *, read_only: bool = True) -> list[str]:
    """A folder or file of the engine's machine."""
    for path in (mount.host, mount.inside):
        if not path.startswith("/") or any(ord(letter) < 32 for letter in path):
            raise InvalidArgument(f"{path[:200]!a} cannot be mounted: give an absolute path without control characters")
    fields = ["type=bind", f"source={mount.host}", f"target={mount.inside}", *(["readonly"] if read_only else [])]
    return ["--mount", ",".join(map(_csv, fields))]


def _csv(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if set(text) & set('",') else text


def entry_line(command: str, *, secret: bool) -> str:
    """What the container's shell is given: the command, after it has taken its secrets and removed them."""
    if not secret:
        return command
    file = f"/{SECRETS_FOLDER}/environment"
    return f". {file} && rm -f {file} && {command}"


def secrets_tar(variables: Mapping[str, str]) -> bytes:
    """A folder for the container's root with a file that a shell reads."""
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    content = lines.encode("utf-8", "surrogateescape")
    told = io.BytesIO()
    with tarfile.open(fileobj=told, mode="w") as tar:
        # Whoever the image's user is must be able to read and remove them, and inside there is nobody else. On the
        # engine's machine the engine's own folder, which is root's alone, is around them.
        folder = tarfile.TarInfo(SECRETS_FOLDER)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o777
        tar.addfile(folder)
        file = tarfile.TarInfo(f"{SECRETS_FOLDER}/environment")
        file.size, file.mode = len(content), 0o666
        tar.addfile(file, io.BytesIO(content))
    return told.getvalue()
