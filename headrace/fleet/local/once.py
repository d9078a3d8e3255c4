# SPDX-License-Identifier: Apache-2.0
"""Runs a program to its end and notes how it ended: `python -I -S once.py FILE PROGRAM WORD...`. Started by `jobs`.

Only who started a process hears its exit code, and the daemon that started a job may be gone when that ends: so this waits
in its place. Imports nothing else, as `child` does not.
"""

import os
import signal
import sys


def main() -> None:
    """Become the parent of the program, until it ends."""
    note, words = sys.argv[1], sys.argv[2:]
    begun: list[int] = []

    def pass_on(number: int, _: object) -> None:
        for each in begun:
            os.kill(each, number)

    # Blocked until there is somebody to tell: a signal in between would be lost, or end the one without the other.
    both = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for each in both:
        signal.signal(each, pass_on)
    try:
        begun.append(os.posix_spawn(words[0], words, os.environ, setsigmask=(), setsigdef=both))
    except OSError as error:
        sys.stderr.write(f"{words[0]} cannot be run: {error.strerror}\n")
        code = 127
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        _, status = os.waitpid(begun[0], 0)
        begun.clear()
        code = os.waitstatus_to_exitcode(status)
    with open(f"{note}.new", "w", encoding="ascii") as file:
        file.write(f"{code}\n")
    os.replace(f"{note}.new", note)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
