# SPDX-License-Identifier: Apache-2.0
"""docker as it is found on an instance of FakeBrev: the verbs and flags that are used, and nothing else.

Containers are processes without a container. What was copied into one lies in a folder, so the variable HEADRACE_VARIABLES
is told where its file really lies, since nothing is chrooted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from fake_brev import Failed, split

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from typing import Any


def serve_port(address: str, port: int, target: int) -> tuple[threading.Thread, int]:
    """Lead connections to another port, from now on; 0 is any, which is told."""
    import socket
    import threading

    listener = socket.create_server((address, port))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while True:
            caller, _ = listener.accept()
            try:
                inner = socket.create_connection(("127.0.0.1", target))
            except OSError:
                caller.close()
                continue
            for pair in ((caller, inner), (inner, caller)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, listener.getsockname()[1]


def docker(root: Path, words: list[str]) -> None:
    base = Path(os.environ["HOME"]) / ".fake-docker"
    verb = words.pop(0)
    if verb == "info":
        print("Server Version: 28.2")
    elif verb == "image":
        _, rest = split(words, {"--format": True})
        image_exists(rest[1])
        print('{"headrace.shell": "/bin/sh"}' if rest[1].startswith("headrace") else "null")
    elif verb == "login":
        flags, rest = split(words, {"-u": True, "--password-stdin": False})
        if rest != ["nvcr.io"] or flags["-u"] != "$oauthtoken" or sys.stdin.read().strip() != "nvapi-right":
            raise Failed("Error response from daemon: unauthorized: authentication required")
        (Path(os.environ["DOCKER_CONFIG"]) / "config.json").touch()
    elif verb == "pull":
        _, rest = split(words, {"-q": False})
        config = os.environ.get("DOCKER_CONFIG")
        if not (rest[0].startswith("nvcr.io/private/") and config and (Path(config) / "config.json").exists()):
            raise Failed(f"Error response from daemon: pull access denied for {rest[0]}, may require 'docker login'")
        (Path(os.environ["HOME"]) / "pulled").touch()
    elif verb == "create":
        docker_create(base, words)
    elif verb == "ps":
        flags, _ = split(words, {"-aq": False, "--no-trunc": False, "--filter": True})
        kind, name, *value = flags["--filter"].split("=", 2)
        for folder in sorted(base.iterdir()) if base.exists() else ():
            try:
                labels = json.loads((folder / "config.json").read_text())["labels"]
            except OSError:
                continue  # it is just being made, or removed
            if kind == "label" and name in labels and (not value or labels[name] == value[0]):
                print(folder.name)
    else:
        docker_one(base, verb, words)


def image_exists(image: str) -> None:
    pulled = (Path(os.environ["HOME"]) / "pulled").exists()
    if image.startswith("no-such/") or (image.startswith("nvcr.io/private/") and not pulled):
        raise Failed(f"Error: No such image: {image}")


def docker_create(base: Path, words: list[str]) -> None:
    config: dict[str, Any] = {"labels": {}, "environment": {}, "ports": [], "mounts": []}
    name = ""
    while words[0].startswith("-"):
        flag, value = words.pop(0), words.pop(0)
        key, _, said = value.partition("=")
        match flag:
            case "--name":
                name = value
            case "--label":
                config["labels"][key] = said
            case "-e":
                config["environment"][key] = said
            case "-p":
                config["ports"].append(value)
            case "--mount":
                config["mounts"].append(value)
            case "--shm-size" | "--gpus" | "--entrypoint":
                config[flag] = value
            case _:
                raise Failed(f"unknown flag: {flag}", 125)
    image_exists(words[0])
    config["argv"] = [config["--entrypoint"], *words[1:]] if "--entrypoint" in config else words[1:]
    base.mkdir(exist_ok=True)
    try:
        (base / name).mkdir()
    except FileExistsError:
        reported = f'Conflict. The container name "/{name}" is already in use by container "x".'
        raise Failed(f"Error response from daemon: {reported}") from None
    (base / name / "root").mkdir()
    write(base / name / "state.json", {"Status": "created", "ExitCode": 0, "Error": "", "OOMKilled": False, "Pid": 0})
    write(base / name / "config.json", config)
    print(name)


def write(path: Path, content: Any) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)


def docker_one(base: Path, verb: str, words: list[str]) -> None:
    import shutil
    import tarfile

    known = {
        "inspect": {"--format": True},
        "logs": {"--tail": True},
        "stop": {"-t": True},
        "rm": {"-f": False},
        "cp": {},
        "start": {},
    }
    if verb not in known:
        raise Failed(f"docker: '{verb}' is not a docker command.")
    flags, rest = split(words, known[verb])
    names = [rest[-1].partition(":")[0]] if verb == "cp" else rest
    if verb == "inspect":
        missing = [name for name in names if not inspect(base / name, flags.get("--format"))]
        if missing:
            raise Failed(f"Error: No such object: {missing[0]}")
        return
    for name in names:
        folder = base / name
        if not (folder / "config.json").exists():
            raise Failed(f"Error response from daemon: No such container: {name}")
        if verb == "cp":
            with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
                for member in tar:
                    tar.extract(member, folder / "root")
        elif verb == "start":
            start(folder)
        elif verb == "logs":
            text = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
            print("\n".join(text.splitlines()[-int(flags["--tail"]) :]))
        elif verb == "stop":
            stop(folder, int(flags["-t"]))
        elif verb == "rm":
            stop(folder, 0)
            while folder.exists():  # somebody else may remove it, too
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                base.rmdir()


def inspect(folder: Path, form: str | None) -> bool:
    """Tell of one; False if there is none."""
    try:
        config = json.loads((folder / "config.json").read_text())
        document = json.loads((folder / "state.json").read_text())
    except OSError:
        return False
    if form is None:
        print("[{}]")
    elif form.startswith("{{index .Config.Labels"):
        print(config["labels"].get(form.split('"')[1], ""))
    elif form == "{{.Name}} {{json .State}} {{json .NetworkSettings.Ports}}":
        ports = {
            f"{inner}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(outer)}]
            for outer, inner in document.get("Ports", ())
        }
        print(f"/{folder.name} {json.dumps(document)} {json.dumps(ports)}")
    else:
        raise Failed("template parsing error")
    return True


def start(folder: Path) -> None:
    import subprocess

    if json.loads((folder / "state.json").read_text())["Status"] == "running":
        return
    run = "import sys; sys.path.insert(0, sys.argv.pop(1)); import fake_brev_docker; fake_brev_docker.main()"
    arguments = [sys.executable, "-I", "-S", "-c", run, str(Path(__file__).parent), "container", str(folder)]
    nothing = subprocess.DEVNULL
    subprocess.Popen(arguments, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    while True:
        document = json.loads((folder / "state.json").read_text())
        if document["Error"]:
            raise Failed(f"Error response from daemon: {document['Error']}")
        if document["Status"] != "created":
            return
        time.sleep(0.01)


def stop(folder: Path, seconds: float) -> None:
    limit = time.monotonic() + seconds
    number = signal.SIGTERM if seconds else signal.SIGKILL
    while True:
        try:
            document = json.loads((folder / "state.json").read_text())
        except OSError:
            return
        if document["Status"] != "running":
            return
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(document["Pid"], number)
            number = None
        if time.monotonic() > limit:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(document["Pid"], signal.SIGKILL)
        time.sleep(0.02)


def container(folder: Path) -> None:
    """The engine's side of one container: publishes its ports, runs it, and takes note of its end."""
    import subprocess

    config = json.loads((folder / "config.json").read_text())
    document = json.loads((folder / "state.json").read_text())
    ports = []
    for port in config["ports"]:
        address, outer, inner = port.split(":")
        try:
            _, published = serve_port(address, int(outer or 0), int(inner))
        except OSError:
            error = f"Bind for {address}:{outer} failed: port is already allocated"
            write(folder / "state.json", {**document, "Error": error})
            return
        ports.append((published, int(inner)))
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", **config["environment"]}
    if "HEADRACE_VARIABLES" in environment:
        environment["HEADRACE_VARIABLES"] = str(folder / "root") + environment["HEADRACE_VARIABLES"]
    with (folder / "log").open("ab") as out:
        nothing = subprocess.DEVNULL
        program = subprocess.Popen(
            config["argv"], env=environment, cwd="/tmp", stdin=nothing, stdout=out, stderr=out, start_new_session=True
        )
    write(folder / "state.json", {**document, "Status": "running", "Pid": program.pid, "Ports": ports})
    code = program.wait()
    with contextlib.suppress(OSError):
        write(folder / "state.json", {**document, "Status": "exited", "ExitCode": 128 - code if code < 0 else code})


def main() -> None:
    program, root, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    try:
        if program == "container":
            container(root)
        else:
            docker(root, words)
    except Failed as failed:
        print(failed, file=sys.stderr)
        sys.exit(failed.code)


if __name__ == "__main__":
    main()
