# SPDX-License-Identifier: Apache-2.0
"""Run `seed_app.py` with uvicorn and one worker, in the environment of the peer `fastapi`.

torch comes from Headrace's own environment: the same build for both, and not 800 MB of it twice.
"""

import sys
from pathlib import Path


def main(port: str, model: str, site_packages: str) -> None:
    # Last, so that everything else comes from the peer's environment where it has it.
    sys.path.append(site_packages)
    import uvicorn

    # Where the application looks for it, from the folder in which it is started.
    folder = Path("models/production")
    folder.mkdir(parents=True)
    (folder / "model.pt").symlink_to(model)
    uvicorn.run(
        "seed_app:app", host="127.0.0.1", port=int(port), workers=1, loop="uvloop", http="httptools",
        access_log=False, log_level="warning",
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
