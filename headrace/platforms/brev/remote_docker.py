# SPDX-License-Identifier: Apache-2.0
"""Docker on a Brev instance: the scripts that `brev exec` runs there, and the parsing of their output. No I/O.

`brev exec` passes its one argument through two shells, runs a failed command a second time, and its exit code says little.
So a command never fails, prints its exit code after a mark that cannot be guessed, and does no harm if it runs twice.
Scripts are fixed texts; values of users are quoted arguments after them.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import InvalidArgument, Unavailable
from headrace.platforms.brev.settings import BrevSettings
from headrace.platforms.contract import LaunchSpec, Mount, PlatformStatus, is_job_id

VARIABLES = "HEADRACE_VARIABLES"
"""Variable with the file of secret variables, which the container's first line reads and removes."""
LABEL = "headrace-job"
SHELL_LABEL = "headrace.shell"
_START_LABEL = "headrace-start"
_FOLDER = "headrace-variables"
_MAX_BYTES = 120_000
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
FORMAT = "{{.Name}} {{json .State}} {{json .NetworkSettings.Ports}}"

START = f"""job=$1 nonce=$2 packed=$3; shift 3
if ! output=$(docker create --name "$job" "$@" 2>&1); then
  if [ "$(docker inspect --format '{{{{index .Config.Labels "{_START_LABEL}"}}}}' "$job" 2>/dev/null)" != "$nonce" ]; then
    if [ -n "$packed" ]; then rm -f -- "$HOME/$packed"; fi
    printf '%s\\n' "$output" >&2
    exit 1
  fi
fi
if [ -n "$packed" ] && [ -f "$HOME/$packed" ]; then
  docker cp - "$job:/" < "$HOME/$packed"
  copied=$?
  rm -f -- "$HOME/$packed"
  if [ "$copied" != 0 ]; then docker rm -f "$job" >/dev/null 2>&1; exit 2; fi
fi
if ! output=$(docker start "$job" 2>&1); then
  docker rm -f "$job" >/dev/null 2>&1
  printf '%s\\n' "$output" >&2
  exit 3
fi"""
"""Create a container, copy the secret variables in, start it. Exit code 1: not created. 2, 3: created, and removed again."""

PULL = """image=$1 registry=$2 user=$3 key=$4
code=0
if ! docker image inspect "$image" >/dev/null 2>&1; then
  if [ -n "$key" ]; then
    DOCKER_CONFIG=$(mktemp -d) || exit 1
    export DOCKER_CONFIG
    docker login "$registry" -u "$user" --password-stdin < "$HOME/$key" >/dev/null
    code=$?
  fi
  if [ "$code" = 0 ]; then docker pull -q "$image" >/dev/null; code=$?; fi
  if [ -n "$key" ]; then rm -rf -- "$DOCKER_CONFIG"; unset DOCKER_CONFIG; fi
fi
if [ -n "$key" ]; then rm -f -- "$HOME/$key"; fi
if [ "$code" != 0 ]; then exit "$code"; fi
docker image inspect --format '{{json .Config.Labels}}' "$image"
"""
"""Pull an image if it is missing, with a temporary login, and print its labels."""

LIST = f"""if [ -n "$1" ]; then filter="label={LABEL}=$1"; else filter="label={LABEL}"; fi
ids=$(docker ps -aq --no-trunc --filter "$filter") || exit 1
if [ -n "$ids" ]; then docker inspect --format "$2" $ids 2>/dev/null; fi
for file in "$HOME"/.headrace-"$1"*; do
  if [ -e "$file" ]; then printf 'file %s\\n' "${{file##*/}}"; fi
done
exit 0"""
"""List the containers of the driver, or of one job; and files of interrupted starts."""

LOGS = """if docker inspect "$1" >/dev/null 2>&1; then docker logs --tail "$2" "$1" 2>&1; fi"""

STOP = """if docker inspect "$1" >/dev/null 2>&1; then
  docker stop -t "$2" "$1" >/dev/null 2>&1
  output=$(docker rm -f "$1" 2>&1)
  if docker inspect "$1" >/dev/null 2>&1; then printf '%s\\n' "$output" >&2; exit 1; fi
fi
rm -f -- "$HOME/.headrace-$1-"*"""


def exec_command(script: str, args: Sequence[str], mark: str) -> str:
    """Return the argument of `brev exec`: runs a script with arguments, prints its exit code after the mark, never fails."""
    command = f"bash -c {shlex.quote(script)} headrace {shlex.join(args)}; printf '\\n%s %s\\n' {shlex.quote(mark)} $?"
    if any("\0" in arg for arg in args):
        raise InvalidArgument("a command's arguments cannot have a zero byte")
    if len(command.replace("'", "'\\''").encode()) > _MAX_BYTES:
        raise InvalidArgument("the command and its variables are too long for brev exec: 120 kB with all quoting")
    return command


def parse_outcome(printed: str, mark: str) -> tuple[int, str] | None:
    """Return the exit code and the output before it; None if the command did not finish. brev adds a line of its own."""
    before, mark_found, after = printed.rpartition(f"\n{mark} ")
    code = after.split("\n", 1)[0].strip()
    return (int(code), before) if mark_found and code.isdigit() else None


def upload_name(job_id: str, nonce: str, kind: str) -> str:
    """Return the name of a file in the instance's home folder, which the scripts remove."""
    return f".headrace-{job_id}-{nonce}.{kind}"


def secrets_tar(variables: Mapping[str, str]) -> bytes:
    """Return a tar archive for `docker cp`: a file of shell exports, in a folder from which every user may remove it."""
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        folder = tarfile.TarInfo(_FOLDER)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o777
        tar.addfile(folder)
        file = tarfile.TarInfo(f"{_FOLDER}/variables")
        file.size, file.mode = len(text), 0o444
        tar.addfile(file, io.BytesIO(text))
    return out.getvalue()


def parse_shell_label(printed: str) -> str:
    """Return the shell in the label of an image whose entry point does not run shell lines; "" if it has none."""
    try:
        labels = json.loads(printed.strip().rsplit("\n", 1)[-1] or "null")
    except ValueError:
        labels = None
    return str(labels.get(SHELL_LABEL) or "") if isinstance(labels, Mapping) else ""


def create_args(spec: LaunchSpec, settings: BrevSettings, nonce: str, shell: str = "") -> list[str]:
    """Return the arguments after `docker create --name JOB`. Raises InvalidArgument for values that docker would misread.

    `shell`: replaces the entry point of the image.
    """
    container = spec.container
    if container is None or not container.image:
        raise InvalidArgument("Brev's instances run containers: give an image and a command")
    if not _IMAGE.fullmatch(container.image):
        raise InvalidArgument(f"{container.image[:200]!a} cannot be the name of an image")
    if VARIABLES in spec.environment or VARIABLES in spec.secret_environment:
        raise InvalidArgument(f"{VARIABLES} is reserved for the launcher")
    address = "127.0.0.1" if settings.reach == "forward" else "0.0.0.0"  # noqa: S104  # the user chose it
    labels = {LABEL: spec.job_id, "tao-job": spec.job_id, _START_LABEL: nonce}
    args = [arg for name, value in {**spec.labels, **labels}.items() for arg in ("--label", f"{name}={value}")]
    args += ["-p", f"{address}:{spec.host_port or ''}:{container.port}", "--shm-size", str(settings.shm_bytes)]
    if spec.gpus:
        args += ["--gpus", str(spec.gpus)]
    for mount in container.mounts:
        args += ["--mount", _mount(mount)]
    variables = dict(spec.environment)
    line = container.command
    if spec.secret_environment:
        variables[VARIABLES] = f"/{_FOLDER}/variables"
        line = f'. "${VARIABLES}" || exit 1; rm -f "${VARIABLES}"; unset {VARIABLES}; {line}'
    for name, value in variables.items():
        args += ["-e", f"{name}={value}"]
    shell_path = settings.shell or shell or "/bin/bash"
    if shell:
        return [*args, "--entrypoint", shell_path, container.image, "-c", line]
    return [*args, container.image, shell_path, "-c", line]


def _mount(mount: Mount) -> str:
    """Return a mount as a line of CSV, which docker parses."""
    if not (mount.host.startswith("/") and mount.inside.startswith("/")):
        raise InvalidArgument("a mount's paths begin with a slash, on the instance and in the container")
    parts = ("type=bind", f"source={mount.host}", f"target={mount.inside}", "readonly")
    return ",".join('"' + part.replace('"', '""') + '"' if re.search(r'[",\r\n]', part) else part for part in parts)


_OWN = "headrace-"


def own_instance(job_id: str) -> str:
    """Return the name of a service's own instance."""
    return _OWN + job_id


def job_of_instance(name: str) -> str | None:
    """Return the job of an own instance; None for other instances."""
    job_id = name.removeprefix(_OWN)
    return job_id if job_id != name and is_job_id(job_id) else None


def parse_instances(printed: str) -> dict[str, str]:
    """Return the statuses by name, from the output of `brev ls --json`."""
    try:
        content = json.loads(printed or "null")
    except ValueError:
        raise Unavailable("the output of `brev ls --json` is not JSON; is brev too old? Update it") from None
    instances = content.get("workspaces") if isinstance(content, Mapping) else content
    return {
        str(instance["name"]): str(instance.get("status") or "UNKNOWN").upper()
        for instance in instances or ()
        if isinstance(instance, Mapping) and instance.get("name")
    }


@dataclass(frozen=True, slots=True)
class ContainerInfo:
    """A container and its published port on the instance."""

    observed: PlatformStatus
    port: int | None = None


@dataclass(frozen=True, slots=True)
class InstanceListing:
    """The containers on an instance, by job."""

    containers: Mapping[str, ContainerInfo] = field(default_factory=dict)
    cut_short: frozenset[str] = frozenset()
    """Jobs with files and no container: their starts were interrupted."""


def parse_listing(printed: str) -> InstanceListing:
    """Parse the output of `LIST`."""
    containers: dict[str, ContainerInfo] = {}
    files: set[str] = set()
    for line in printed.splitlines():
        upload = re.fullmatch(r"file \.headrace-([0-9a-f-]{36})-[0-9a-f]+\.(?:tar|key)", line.strip())
        if upload:
            files.add(upload[1])
            continue
        name, _, rest = line.strip().partition(" ")
        job_id = name.lstrip("/")
        if not is_job_id(job_id):
            continue
        try:
            state, end = json.JSONDecoder().raw_decode(rest)
            ports = json.loads(rest[end:] or "null")
        except ValueError:
            raise Unavailable(
                "the output of docker on the instance cannot be parsed; check it with `brev shell`"
            ) from None
        containers[job_id] = ContainerInfo(container_status(job_id, state), _port(ports))
    return InstanceListing(containers, frozenset(files - containers.keys()))


def container_status(job_id: str, state: Mapping[str, Any]) -> PlatformStatus:
    """Return the status of a container, from docker's state."""
    status = str(state.get("Status") or "")
    code = state.get("ExitCode") if isinstance(state.get("ExitCode"), int) else None
    if status in ("running", "paused"):
        return PlatformStatus("running", job_id, "Running")
    if status in ("created", "restarting"):
        return PlatformStatus("starting", job_id, "Pending", reason=str(state.get("Error") or ""))
    if status == "exited":
        error = str(state.get("Error") or "")
        if state.get("OOMKilled"):
            error = "it was out of memory"
        reason = f"the container has ended with code {code}" + (f": {error}" if error else "")
        return PlatformStatus("ended", job_id, "Succeeded" if code == 0 else "Failed", code, reason)
    return PlatformStatus(
        "ended", job_id, "Failed", code, f"docker reports that the container is {status or 'unknown'}"
    )


def instance_status(name: str, status: str) -> PlatformStatus:
    """Return the status of a service's own instance without a visible container."""
    if status in ("RUNNING", "STARTING", "DEPLOYING", "BUILDING", "CREATING", "PENDING"):
        return PlatformStatus(
            "starting", name, "Pending", reason=f"the instance is {status}, its container does not exist yet"
        )
    return PlatformStatus("ended", name, "Failed", reason=f"the instance is {status}")


def never_started() -> PlatformStatus:
    """Return the status of a job with files and no container."""
    return PlatformStatus("ended", pod_phase="Failed", reason="it was never started: its start was interrupted")


def _port(ports: Any) -> int | None:
    for bindings in ports.values() if isinstance(ports, Mapping) else ():
        for binding in bindings or ():
            if str(binding.get("HostPort", "")).isdigit():
                return int(binding["HostPort"])
    return None
