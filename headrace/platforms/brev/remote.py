# SPDX-License-Identifier: Apache-2.0
"""What is run on an instance: lines for `brev exec`, whose one argument goes through two shells. Called by `driver`.

`brev exec` runs a command that fails a second time, and its own exit code says little: so a line never fails, tells the
code behind a mark that nobody can guess, and does no harm when it is run twice. Scripts are fixed texts; whatever a user
chose is a quoted word after them. Does nothing by itself.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
from collections.abc import Mapping, Sequence

from headrace.core.errors import InvalidArgument
from headrace.platforms.brev.settings import BrevSettings
from headrace.platforms.contract import LaunchSpec, Mount

VARIABLES = "HEADRACE_VARIABLES"
"""Names the file of secret variables to the container's first line, which reads and removes it."""
LABEL = "headrace-job"
SHELL_LABEL = "headrace.shell"
_START_LABEL = "headrace-start"
_FOLDER = "headrace-variables"
_MOST_BYTES = 120_000
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
FORMAT = "{{.Name}} {{json .State}} {{json .NetworkSettings.Ports}}"

START = f"""job=$1 nonce=$2 packed=$3; shift 3
if ! told=$(docker create --name "$job" "$@" 2>&1); then
  if [ "$(docker inspect --format '{{{{index .Config.Labels "{_START_LABEL}"}}}}' "$job" 2>/dev/null)" != "$nonce" ]; then
    if [ -n "$packed" ]; then rm -f -- "$HOME/$packed"; fi
    printf '%s\\n' "$told" >&2
    exit 1
  fi
fi
if [ -n "$packed" ] && [ -f "$HOME/$packed" ]; then
  docker cp - "$job:/" < "$HOME/$packed"
  copied=$?
  rm -f -- "$HOME/$packed"
  if [ "$copied" != 0 ]; then docker rm -f "$job" >/dev/null 2>&1; exit 2; fi
fi
if ! told=$(docker start "$job" 2>&1); then
  docker rm -f "$job" >/dev/null 2>&1
  printf '%s\\n' "$told" >&2
  exit 3
fi"""
"""Make a container, copy the secret variables in, start it. 1: not made. 2, 3: made, and removed again."""

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
"""Fetch an image that is not there, with a login that is forgotten afterwards, and tell its labels."""

LOOK = f"""if [ -n "$1" ]; then filter="label={LABEL}=$1"; else filter="label={LABEL}"; fi
ids=$(docker ps -aq --no-trunc --filter "$filter") || exit 1
if [ -n "$ids" ]; then docker inspect --format "$2" $ids 2>/dev/null; fi
for file in "$HOME"/.headrace-"$1"*; do
  if [ -e "$file" ]; then printf 'file %s\\n' "${{file##*/}}"; fi
done
exit 0"""
"""All of ours, or those of one job; and files of starts that were cut short."""

LOGS = """if docker inspect "$1" >/dev/null 2>&1; then docker logs --tail "$2" "$1" 2>&1; fi"""

STOP = """if docker inspect "$1" >/dev/null 2>&1; then
  docker stop -t "$2" "$1" >/dev/null 2>&1
  told=$(docker rm -f "$1" 2>&1)
  if docker inspect "$1" >/dev/null 2>&1; then printf '%s\\n' "$told" >&2; exit 1; fi
fi
rm -f -- "$HOME/.headrace-$1-"*"""


def line_of(script: str, words: Sequence[str], mark: str) -> str:
    """The one argument of `brev exec`: runs a script with words, tells its code after the mark, and never fails."""
    line = f"bash -c {shlex.quote(script)} headrace {shlex.join(words)}; printf '\\n%s %s\\n' {shlex.quote(mark)} $?"
    if any("\0" in word for word in words):
        raise InvalidArgument("a command's words cannot have a zero byte")
    if len(line.replace("'", "'\\''").encode()) > _MOST_BYTES:
        raise InvalidArgument("the command and its variables are too long for brev exec: 120 kB with all quoting")
    return line


def outcome(printed: str, mark: str) -> tuple[int, str] | None:
    """The code and what was said before it; None where the line did not come to its end. brev adds a line of its own."""
    before, found, after = printed.rpartition(f"\n{mark} ")
    code = after.split("\n", 1)[0].strip()
    return (int(code), before) if found and code.isdigit() else None


def upload_name(job_id: str, nonce: str, kind: str) -> str:
    """A file in the instance's home that the scripts remove again."""
    return f".headrace-{job_id}-{nonce}.{kind}"


def packed(variables: Mapping[str, str]) -> bytes:
    """A tar for `docker cp`: the variables as a file that a shell reads, in a folder from which anybody may remove it."""
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


def shell_of(printed: str) -> str:
    """What the label of an image says whose entry point is not for shell lines; "" of all others."""
    try:
        labels = json.loads(printed.strip().rsplit("\n", 1)[-1] or "null")
    except ValueError:
        labels = None
    return str(labels.get(SHELL_LABEL) or "") if isinstance(labels, Mapping) else ""


def create_words(spec: LaunchSpec, settings: BrevSettings, nonce: str, shell: str = "") -> list[str]:
    """The words after `docker create --name JOB`. Raises InvalidArgument for what docker would misunderstand.

    `shell`: of an image whose entry point it has to replace.
    """
    box = spec.container
    if box is None or not box.image:
        raise InvalidArgument("Brev's instances run containers: give an image and a command")
    if not _IMAGE.fullmatch(box.image):
        raise InvalidArgument(f"{box.image[:200]!a} cannot be the name of an image")
    if VARIABLES in spec.environment or VARIABLES in spec.secret_environment:
        raise InvalidArgument(f"{VARIABLES} is a variable of the launcher's own")
    address = "127.0.0.1" if settings.reach == "forward" else "0.0.0.0"  # noqa: S104  # the reader chose it
    labels = {LABEL: spec.job_id, "tao-job": spec.job_id, _START_LABEL: nonce}
    words = [word for name, value in {**spec.labels, **labels}.items() for word in ("--label", f"{name}={value}")]
    words += ["-p", f"{address}:{spec.host_port or ''}:{box.port}", "--shm-size", str(settings.shm_bytes)]
    if spec.gpus:
        words += ["--gpus", str(spec.gpus)]
    for mount in box.mounts:
        words += ["--mount", _mount(mount)]
    variables = dict(spec.environment)
    line = box.command
    if spec.secret_environment:
        variables[VARIABLES] = f"/{_FOLDER}/variables"
        line = f'. "${VARIABLES}" || exit 1; rm -f "${VARIABLES}"; unset {VARIABLES}; {line}'
    for name, value in variables.items():
        words += ["-e", f"{name}={value}"]
    chosen = settings.shell or shell or "/bin/bash"
    if shell:
        return [*words, "--entrypoint", chosen, box.image, "-c", line]
    return [*words, box.image, chosen, "-c", line]


def _mount(mount: Mount) -> str:
    """As a line of CSV, in which docker reads it."""
    if not (mount.host.startswith("/") and mount.inside.startswith("/")):
        raise InvalidArgument("a mount's paths begin with a slash, on the instance and in the container")
    parts = ("type=bind", f"source={mount.host}", f"target={mount.inside}", "readonly")
    return ",".join('"' + part.replace('"', '""') + '"' if re.search(r'[",\r\n]', part) else part for part in parts)
