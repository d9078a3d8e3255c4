# SPDX-License-Identifier: Apache-2.0
"""Take screenshots of the console under load, for the README and the guide: `python scripts/picture_console.py [FOLDER]`.

Serves the example models and sends requests to some of them in waves for some minutes, so that the charts have something to
show. Needs what `scripts/platforms/browser.sh install` installs. FOLDER is docs/pictures by default.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
_CALLERS = 24
_SECONDS = 290
_PICTURES = (
    ("console-overview", "#/overview", "light", (1360, 1180)),
    ("console-overview-dark", "#/overview", "dark", (1360, 1180)),
    ("console-model", "#/models/mlp", "light", (1360, 1180)),
    ("console-model-dark", "#/models/mlp", "dark", (1360, 1180)),
    ("console-phone", "#/overview", "light", (390, 844)),
)
"""Name, page, colour scheme and size."""
_MODEL = "mlp"
_BATCHING = "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 4000 }"


def main(folder: Path) -> None:
    """Serve, ask, look, and keep what is seen."""
    sys.path[:0] = [str(ROOT / "build/browser/python"), str(ROOT / "examples")]
    from make_models import make  # type: ignore[import-not-found]  # of the examples

    with tempfile.TemporaryDirectory() as scratch:
        models, log = Path(scratch) / "models", Path(scratch) / "log"
        make(models)
        config = models / _MODEL / "config.pbtxt"
        config.write_text(config.read_text().replace("dynamic_batching { }", _BATCHING))
        command = [Path(sys.executable).parent / "headrace", "serve", models, "--http-port", "0", "--grpc-port", "0"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while "ready: " not in log.read_text():
                if process.poll() is not None:
                    sys.exit(log.read_text())
                time.sleep(0.1)
            port = int(_LISTENING.findall(log.read_text())[0])
            over = threading.Event()
            callers = [threading.Thread(target=_ask, args=(port, over, place)) for place in range(_CALLERS)]
            for caller in callers:
                caller.start()
            try:
                _look(f"http://127.0.0.1:{port}/console", folder)
            finally:
                over.set()
                for caller in callers:
                    caller.join()
        finally:
            process.terminate()
            process.wait()


def _ask(port: int, over: threading.Event, place: int) -> None:
    chance = random.Random(place)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not over.wait(chance.expovariate(1 / _pause(place))):
        rows = chance.choice((1, 1, 1, 2, 4))
        tensor: dict[str, Any] = {
            "name": "INPUT0",
            "datatype": "FP32",
            "shape": [rows, 16],
            "data": [0.5] * (16 * rows),
        }
        connection.request("POST", f"/v2/models/{_MODEL}/infer", json.dumps({"inputs": [tensor]}))
        connection.getresponse().read()
    connection.close()


def _pause(place: int) -> float:
    """Seconds between two requests of one caller: more of them are busy on the crest of a wave."""
    wave = 0.5 + 0.5 * math.sin(time.monotonic() / 9)
    return 0.03 if place < 2 + 22 * wave else 0.6


def _look(url: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    time.sleep(_SECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, place, scheme, (width, height) in _PICTURES:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            page.goto(f"{url}{place}")
            page.wait_for_timeout(3000)
            _keep(page.screenshot(), folder / f"{name}.png")
            context.close()
        browser.close()


def _keep(picture: bytes, file: Path) -> None:
    """A page has few colours: as a palette it is a third of the size."""
    from PIL import Image

    Image.open(io.BytesIO(picture)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
