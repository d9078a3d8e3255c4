# SPDX-License-Identifier: Apache-2.0
"""The first look of a `Mirror`, in a process of its own: `mirror_once`, and the program it runs.

Called by `headrace serve` before workers are forked. obstore's threads do not come along into a fork, and a process that has
them must not fork; so the process that forks never has them.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from headrace.core import errors
from headrace.core.errors import HeadraceError, Internal
from headrace.models.storage.locations import ObjectPlace, parse_location
from headrace.models.storage.mirroring import Mirror

log = logging.getLogger("headrace.storage")


def mirror_once(place: ObjectPlace, folder: Path) -> None:
    """Bring the folder up to date with the environment's credentials. Raises what `Mirror.start` does."""
    log.info("looking at %s", place)
    done = subprocess.run(  # noqa: S603 - this interpreter, this module, no shell
        [sys.executable, "-m", __name__, str(place), str(folder)], capture_output=True, text=True, check=False
    )
    for line in done.stderr.splitlines():
        log.info("%s", line)
    try:
        said = json.loads(done.stdout)
        code, message = str(said["code"]), str(said["message"])
    except (ValueError, KeyError, TypeError):
        raise Internal(f"{place} could not be mirrored: the process for it ended with {done.returncode}") from None
    if code:
        raise _error(code, message)


def main(arguments: list[str]) -> int:
    """The program. What went wrong is written as JSON, for the caller above; the log goes to stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    code = message = ""
    try:
        place = parse_location(arguments[0])
        if not isinstance(place, ObjectPlace):
            raise errors.InvalidArgument(f"{place} is not in an object store")
        Mirror(place, Path(arguments[1])).start()
    except HeadraceError as error:
        code, message = error.code.value, error.message
    print(json.dumps({"code": code, "message": message}))
    return 0


def _error(code: str, message: str) -> HeadraceError:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadraceError)]
    kind = next((kind for kind in kinds if kind is not HeadraceError and kind.code.value == code), Internal)
    return kind(message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
