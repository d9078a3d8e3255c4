# SPDX-License-Identifier: Apache-2.0
"""What is done on a machine of the cluster, as programs of a POSIX shell, and what they are given. Called by `driver`.

A program reaches its shell, here or over ssh, as that shell's standard input, with its words quoted in it: so neither the
login shell nor any command line there has them, secrets included. `text` alone puts words into programs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

EXISTS = 10
NO_FOLDER = 11
REFUSED = 12
NO_ROOM = 13
NO_ANSWER = 14

FOLDER = """
case $1 in "~/"*) printf '%s/%s\\n' "${HOME%/}" "${1#"~/"}" ;; *) printf '%s\\n' "$1" ;; esac
"""
"""FOLDER: its absolute path."""

START = f"""
base=$1 job=$2 meta=$3 variables=$4 script=$5
shift 5
umask 077
withdraw() {{ cd / && rm -rf -- "${{base:?}}/${{job:?}}"; exit "$1"; }}
mkdir -p -- "$base" 2>/dev/null
if ! mkdir -- "$base/$job" 2>/dev/null; then
  [ -d "$base/$job" ] && exit {EXISTS}
  exit {NO_FOLDER}
fi
cd -- "$base/$job" || exit {NO_FOLDER}
{{ printf '%s' "$meta" >meta && printf '%s' "$variables" >env && printf '%s' "$script" >script; }} || withdraw {NO_ROOM}
queued=$(squeue -h --user="$(id -un)" --name="$job" -o %i) || withdraw {NO_ANSWER}
[ -z "$queued" ] || withdraw {EXISTS}
# An sbatch that finds the queue full tries again for minutes.
if ! told=$(timeout 20 sbatch "$@" script 2>&1 >number.new); then
  printf '%s\\n' "$told" >&2
  scancel --user="$(id -un)" --name="$job" 2>/dev/null
  withdraw {REFUSED}
fi
mv -f -- number.new number
cat number
"""
"""FOLDER JOB META VARIABLES SCRIPT and sbatch's words: the job's number."""

LOOK = f"""
base=$1 only=$2
cd -- "$base" 2>/dev/null || base=
[ -z "$base" ] || for job in ${{only:-*-*-*-*-*}}; do
  [ -d "$job" ] || continue
  number=- env=- meta=
  [ ! -s "$job/number" ] || read -r number <"$job/number"
  [ ! -e "$job/env" ] || env=env
  [ ! -s "$job/meta" ] || read -r meta <"$job/meta"
  printf 'folder %s %s %s %s\\n' "$job" "$number" "$env" "$meta"
done
squeue -h --user="$(id -un)" --states=all ${{only:+--name="$only"}} -o 'job %i|%T|%N|%j|%r' || exit {NO_ANSWER}
# After the queue: a script leaves its code before Slurm takes note of its end.
[ -z "$base" ] || for job in ${{only:-*-*-*-*-*}}; do
  [ ! -s "$job/end" ] || {{ read -r code <"$job/end" && printf 'end %s %s\\n' "$job" "$code"; }}
done
exit 0
"""
"""FOLDER JOB-or-nothing: what `looking.read_look` reads."""

ACCOUNTED = """
sacct -X -n -P -j "$1" -o State,ExitCode 2>/dev/null
exit 0
"""
"""NUMBER: "STATE|CODE:SIGNAL", or nothing where jobs are not accounted for."""

NODE = f"""
scontrol show node -o "$1" || exit {NO_ANSWER}
"""

TERMINATE = """
scancel --quiet --user="$(id -un)" --name="$1" --state=PENDING
scancel --quiet --user="$(id -un)" --name="$1" --state=RUNNING --signal=TERM
exit 0
"""
"""JOB: a job that waits is cancelled, the processes of one that runs are asked to end."""

KILL = """
for state in PENDING SUSPENDED; do scancel --quiet --user="$(id -un)" --name="$1" --state="$state"; done
# The step, and not the job: that one's processes would be asked to end once more, and be given the site's KillWait.
scancel --quiet --signal=KILL "$2.0"
exit 0
"""
"""JOB NUMBER: whatever a job runs is killed at once."""

CANCEL = """
scancel --quiet --user="$(id -un)" --name="$1"
exit 0
"""
"""JOB: in Slurm's own way."""

REMOVE = """
for try in 1 2 3 4 5; do
  rm -rf -- "${1:?}/${2:?}" 2>/dev/null
  [ -e "$1/$2" ] || exit 0
  sleep 0.2
done
exit 1
"""
"""FOLDER JOB"""

FORGET_VARIABLES = """
rm -f -- "${1:?}/${2:?}/env"
"""
"""FOLDER JOB: of one that was cancelled before it could read them."""

LOG = """
[ -f "$1/$2/log" ] || exit 0
tail -n "$3" -- "$1/$2/log" | tail -c 4194304
"""
"""FOLDER JOB LINES"""

CHECK = """
for tool in sbatch squeue scancel scontrol sacct srun apptainer; do
  command -v "$tool" >/dev/null 2>&1 && printf 'tool %s\\n' "$tool"
done
srun --help 2>/dev/null | grep -q -e --container-image && echo 'tool pyxis'
[ -s "$HOME/.config/enroot/.credentials" ] && echo 'tool credentials'
(umask 077 && mkdir -p -- "$1") 2>/dev/null && [ -w "$1" ] && echo folder
sinfo -h -o 'partition %R|%a|%l' 2>/dev/null && echo sinfo
exit 0
"""
"""FOLDER: what `looking.read_checks` reads."""


def text(program: str, words: Sequence[str], tools: str = "") -> str:
    """The program with its words. Cut anywhere, it is not a whole program any more and does nothing."""
    path = f"PATH={shlex.quote(tools)}:$PATH\n" if tools else ""
    return f"{{\n{path}main() {{\n{program.strip()}\n}}\nmain {shlex.join(words)} </dev/null\nexit\n}}\n"
