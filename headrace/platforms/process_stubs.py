# SPDX-License-Identifier: Apache-2.0
"""Stub programs that started processes run first. `processes`, `process` and `fleet.local.jobs` start them.

    python -I -S process_stubs.py exec PROGRAM ARG...
        Wait at a gate, then become PROGRAM. The gate is standard input: the parent opens it after it has recorded the
        process. If the parent dies before that, the gate closes and the process exits, so no unrecorded process runs.
    python -I -S process_stubs.py wait FILE PROGRAM ARG...
        Run PROGRAM to its end and write its exit code to FILE: the parent of a job may be gone when the job ends.
    python -P -m headrace.platforms.process_stubs call JOB FILE MODULE:FUNCTION ARG...
        Call a function with ARG... as sys.argv. Arguments `{secret:NAME}` are replaced by texts of the JSON file FILE, so
        that secrets are never on a command line. JOB identifies the process in /proc.

Imports little at the top: the gate must be reached at once.
"""

import os
import signal
import sys

GO = b"\n"
"""What the parent writes to open the gate."""
LISTEN_DESCRIPTOR = "HEADRACE_LISTENS"
"""Variable with the descriptor of a listening socket for the program; it becomes descriptor 3, as systemd passes it."""
_FIRST_DESCRIPTOR = 3


def exec_program(argv: list[str]) -> None:
    """Wait at the gate, then become the program."""
    if os.read(0, 1) != GO:
        sys.exit(1)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    descriptor = os.environ.pop(LISTEN_DESCRIPTOR, "")
    if descriptor:
        if int(descriptor) != _FIRST_DESCRIPTOR:
            os.dup2(int(descriptor), _FIRST_DESCRIPTOR)
            os.close(int(descriptor))
        os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
    try:
        os.execv(argv[0], argv)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"Cannot run {argv[0]}: {error.strerror}\n")
        sys.exit(127)


def wait_for_program(argv: list[str]) -> None:
    """Run the program, forward SIGTERM and SIGINT to it, and record its exit code."""
    file_path, *command = argv
    children: list[int] = []

    def forward(number: int, _: object) -> None:
        for pid in children:
            os.kill(pid, number)

    # Blocked until the child exists: a signal in between would be lost, or would end the parent without the child.
    forwarded = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    for number in forwarded:
        signal.signal(number, forward)
    try:
        children.append(os.posix_spawn(command[0], command, os.environ, setsigmask=(), setsigdef=forwarded))
    except OSError as error:
        sys.stderr.write(f"Cannot run {command[0]}: {error.strerror}\n")
        code = 127
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        _, status = os.waitpid(children[0], 0)
        children.clear()
        code = os.waitstatus_to_exitcode(status)
    with open(f"{file_path}.new", "w", encoding="ascii") as file:
        file.write(f"{code}\n")
    os.replace(f"{file_path}.new", file_path)
    sys.exit(code if code >= 0 else 128 - code)


def call_function(argv: list[str]) -> None:
    """Call the function of a service with its secrets filled in."""
    import importlib
    import json
    import re

    _, secrets_file, target, *args = argv
    with open(secrets_file, encoding="utf-8") as file:
        secrets = json.load(file)
    placeholder = re.compile(r"\{secret:([a-z_]+)\}")
    matches = [(arg, placeholder.fullmatch(arg)) for arg in args]
    module, _, function = target.partition(":")
    sys.argv = [module, *(secrets[match[1]] if match else arg for arg, match in matches)]
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    {"exec": exec_program, "wait": wait_for_program, "call": call_function}[sys.argv[1]](sys.argv[2:])
