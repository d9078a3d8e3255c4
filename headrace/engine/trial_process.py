# SPDX-License-Identifier: Apache-2.0
"""The entry script of a trial load: loads one version, frees it and reports. Run by its path; never imported.

    python trial_process.py PARENT ROOT

PARENT is the server's process id, ROOT the folder that contains the package. A JSON object on standard input says what to
load, see `repository.trial`. The report on standard output is a JSON object with the error, or an empty one.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_FIRST_TO_KILL = "1000"


def _run(parent: int, root: str) -> None:
    # This process must not outlive the server.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError):  # If memory runs out, the kernel is to kill this process and not the server.
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_KILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    logging.disable()  # The report has the error, and the server will log the rest when it loads the model itself.
    # Libraries that print must not print into the report.
    reports = os.dup(1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    # Python has put this file's folder first, whose modules no library must see.
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    if root not in sys.path:
        sys.path.insert(0, root)
    report = json.dumps(_load(request)).encode()
    with os.fdopen(reports, "wb") as stream:
        stream.write(report)
    # Without the clean-up of libraries: what they do at the exit of this process happens in no server.
    os._exit(0)


def _load(request: dict[str, Any]) -> dict[str, str]:
    """Load a version as the server would. Return the error, or nothing."""
    from headrace.backends.contract import ModelFiles
    from headrace.core.errors import HeadraceError
    from headrace.engine.engine import try_load
    from headrace.engine.repository.load_context import internal_error
    from headrace.engine.repository.load_plan import read_load_plan

    folder, version = Path(request["folder"]), int(request["version"])
    files = ModelFiles(folder, version, folder / str(version))
    try:
        plan = read_load_plan(folder, request["config_json"], request["gpus"], strict=request["strict"])
        try_load(plan.complete(files), files)
    except HeadraceError as error:
        return {"code": error.code.value, "message": error.message, "log": ""}
    except Exception as error:  # a model may raise anything
        shown = internal_error(error, f"loading model '{folder.name}' version {version}")
        return {"code": shown.code.value, "message": shown.message, "log": traceback.format_exc()}
    return {}


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2])
