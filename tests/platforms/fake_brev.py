# SPDX-License-Identifier: Apache-2.0
"""FakeBrev: programs that speak the public command lines of NVIDIA Brev and of docker on its instances; not the real ones.

Run as `python fake_brev.py PROGRAM ROOT WORD...` by small scripts that `FakeBrev` writes. What they do not know they refuse.
`brev exec` quotes as the public source of brev does and really goes through two shells; a command that fails is run again,
and the instance's name is printed after it. Containers are processes without a container: a published port leads to the
process's own (`fake_brev_docker`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

DELAY = 0.15
"""How long an instance takes to come and to go."""


LS = """if [ "$*" = "ls --json" ] && [ -e {root}/logged-in ] && listing=$(<{root}/listing); then
  echo '["ls", "--json"]' >>{root}/calls
  printf '%s\\n' "$listing"
  exit
fi 2>/dev/null
"""
"""The same that `ls` prints, where no instance is just coming or going: every command of the driver begins with it."""
SSH = """if [ "$1 $2 $3 $4 $5" != "-T -o ConnectTimeout=5 -o LogLevel=ERROR" ]; then exec {root}/bin/ssh-fake "$@"; fi
host=$6; shift 6
if [ "$(cat {root}/status-"$host" 2>/dev/null)" != RUNNING ]; then
  echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255
fi
cd "{root}/homes/$host" && exec env -i HOME="$PWD" PATH="{root}/instance-bin:/usr/bin:/bin" LANG=C.UTF-8 bash -c "$*"
"""
"""sshd joins the words with spaces and gives them to the user's shell."""


class Failed(Exception):
    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class FakeBrev:
    """A folder with the programs and everything that they remember."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.program = root / "bin" / "brev"
        for folder in ("bin", "instance-bin", "homes"):
            (root / folder).mkdir(parents=True)
        here = Path(__file__).parent
        run = f"import sys; sys.path.insert(0, {str(here)!r}); import fake_brev; fake_brev.main()"
        for folder, program in (("bin", "brev"), ("bin", "ssh-fake"), ("instance-bin", "docker")):
            module = "fake_brev_docker" if program == "docker" else "fake_brev"
            line = run.replace("fake_brev", module)
            first = LS.format(root=root) if program == "brev" else ""
            self._write(folder, program, f'{first}exec {sys.executable} -I -S -c "{line}" {program} {root} "$@"')
        # A shell and no Python where only a line is run: tests wait for this more than for all else.
        self._write("bin", "ssh", SSH.format(root=root))
        (root / "logged-in").touch()

    def _write(self, folder: str, program: str, line: str) -> None:
        path = self.root / folder / program
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)

    def add_instance(self, name: str, status: str = "RUNNING") -> None:
        with state(self.root) as instances:
            instances[name] = {"id": f"id-{name}", "status": status}
        (self.root / "homes" / name).mkdir()

    def calls(self) -> list[list[str]]:
        path = self.root / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def resources(self) -> set[str]:
        with state(self.root) as instances:
            names = {f"instance {name}" for name in instances}
        # Not by `glob`, which stumbles over what is removed while it looks.
        below = [Path(top, name) for top, folders, files in os.walk(self.root / "homes") for name in folders + files]
        inside = (path.relative_to(self.root) for path in below)
        return names | {str(path) for path in inside if len(path.parts) > 2}

    def end(self) -> set[str]:
        """What still runs, killed: there is nothing where a driver has stopped all that it started.

        What has done its work may need a moment to be gone: the one beside a container takes note of its end and leaves.
        """
        limit = time.monotonic() + 60
        running = [
            document["Pid"]
            for path in (self.root / "homes").glob("*/.fake-docker/*/state.json")
            if (document := json.loads(path.read_text()))["Status"] == "running"
        ]
        while (left := living(self.root)) and not running and time.monotonic() < limit:
            time.sleep(0.02)
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return left

    def kill(self, instance: str, job_id: str) -> None:
        document = json.loads((self.root / "homes" / instance / ".fake-docker" / job_id / "state.json").read_text())
        os.kill(document["Pid"], signal.SIGKILL)


def living(root: Path) -> set[str]:
    """Processes of a fake: whoever has its folder on the command line."""
    results = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(root) in (path / "cmdline").read_bytes():
                results.add(path.name)
    return results


@contextlib.contextmanager
def state(root: Path) -> Iterator[dict[str, Any]]:
    """The instances; those whose time has come are here, or gone."""
    with (root / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = root / "instances.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        for name, item in list(known.items()):
            if time.time() < item.get("until", float("inf")):
                continue
            if item["status"] == "DELETING":
                from fake_brev_docker import stop

                docker_root = root / "homes" / name / ".fake-docker"
                for folder in docker_root.iterdir() if docker_root.exists() else ():
                    stop(folder, 0)
                import shutil

                shutil.rmtree(root / "homes" / name)
                del known[name]
            elif item["status"] == "DEPLOYING":
                (root / "homes" / name).mkdir(exist_ok=True)
                known[name] = {"id": item["id"], "status": "RUNNING"}
        yield known
        path.write_text(json.dumps(known))
        for file in root.glob("status-*"):
            if file.name.removeprefix("status-") not in known:
                file.unlink()
        for name, item in known.items():
            (root / "status.new").write_text(item["status"])
            (root / "status.new").rename(root / f"status-{name}")
        (root / "listing").unlink(missing_ok=True)
        if not any("until" in document for document in known.values()):
            (root / "listing.new").write_text(listing(known))
            (root / "listing.new").rename(root / "listing")


def listing(known: dict[str, Any]) -> str:
    """As `ls --json` prints it."""
    rest = {
        "build_status": "COMPLETED",
        "shell_status": "READY",
        "health_status": "HEALTHY",
        "instance_type": "g5.xlarge",
        "instance_kind": "gpu",
        "gpu": "A10G",
    }
    listed = [{"name": name, "id": item["id"], "status": item["status"], **rest} for name, item in known.items()]
    return json.dumps({"workspaces": listed or None})


def split(words: list[str], flags: dict[str, bool]) -> tuple[dict[str, str], list[str]]:
    """Flags and the rest, as cobra takes them; True: has a value."""
    document: dict[str, str] = {}
    rest: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return document, rest + words
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            rest.append(word)
        elif name not in flags:
            raise Failed(f"Error: unknown flag: {name}")
        elif flags[name]:
            if not equals and not words:
                raise Failed(f"Error: flag needs an argument: {name}")
            document[name] = value if equals else words.pop(0)
        else:
            document[name] = "true"
    return document, rest


# brev


def brev(root: Path, words: list[str]) -> None:
    with (root / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    verb, words = (words[0], words[1:]) if words else ("", [])
    if verb == "login":
        flags, _ = split(words, {"--token": True})
        if flags.get("--token") != "brev-token":
            raise Failed("Error: the token is not valid")
        (root / "logged-in").touch()
        return
    if not (root / "logged-in").exists():
        raise Failed("Error: you are not logged in; run brev login")
    verbs = {"ls": ls, "create": create, "delete": delete, "exec": execute, "copy": copy, "port-forward": forward}
    if verb not in verbs:
        raise Failed(f'Error: unknown command "{verb}" for "brev"')
    verbs[verb](root, words)


def ls(root: Path, words: list[str]) -> None:
    flags, rest = split(words, {"--json": False, "--org": True, "-o": True, "--all": False})
    if rest:
        raise Failed("too many args provided")
    with state(root) as known:
        reported = listing(known)
    if "--json" in flags:
        print(reported)
        return
    print(f"You have {len(known)} instances in Org fake")
    for name, item in known.items():
        print(f" {name}  {item['status']}  {item['id']}  g5.xlarge")


def create(root: Path, words: list[str]) -> None:
    valued = (
        "--type",
        "-t",
        "--gpu-name",
        "--cloud-cred-id",
        "--workspace-group-id",
        "--timeout",
        "--count",
        "--startup-script",
    )
    flags, rest = split(words, {**dict.fromkeys(valued, True), "--detached": False, "-d": False})
    if len(rest) != 1:
        raise Failed("Error: a name is required")
    if flags.get("--gpu-name") == "NONE":
        raise Failed("could only create 0/1 instances")
    with state(root) as known:
        if rest[0] in known:
            raise Failed(f"an instance named {rest[0]} exists")
        known[rest[0]] = {"id": f"id-{rest[0]}", "status": "DEPLOYING", "until": time.time() + DELAY}
    print(rest[0])


def delete(root: Path, words: list[str]) -> None:
    _, rest = split(words, {})
    with state(root) as known:
        for name in rest:
            if name not in known:
                raise Failed(f"instance {name} not found")
            known[name].update(status="DELETING", until=time.time() + DELAY)
            print(f"Deleting instance {name}. This can take a few minutes. Run 'brev ls' to check status")


def execute(root: Path, words: list[str]) -> None:
    import subprocess

    flags, rest = split(words, {"--host": False})
    names, line = rest[:-1], rest[-1] if rest else ""
    if not sys.stdin.isatty():
        names += [line.strip() for line in sys.stdin if line.strip()]
    if not names:
        raise Failed("instance name required: provide as argument or pipe from another command")
    if line.startswith("@"):
        line = Path(line[1:]).read_text()
    quoted = line.replace("'", "'\\''")
    for name in names:
        alias = name + ("-host" if flags else "")
        ssh_line = f"ssh -T -o ConnectTimeout=5 -o LogLevel=ERROR {alias} '{quoted}'"
        path = {"PATH": f"{root / 'bin'}:{os.environ['PATH']}"}
        for attempt in range(2):
            if (
                subprocess.run(
                    ["bash", "-c", ssh_line], env={**os.environ, **path}, stdin=subprocess.DEVNULL
                ).returncode
                == 0
            ):
                break
            print("Connection failed, checking instance status...", file=sys.stderr)
            with state(root) as known:
                if name not in known:
                    raise Failed(f'ssh connection failed and could not look up instance "{name}"', 255)
                if known[name]["status"] == "STOPPED":
                    known[name]["status"] = "RUNNING"
                if known[name]["status"] != "RUNNING":
                    raise Failed(f'instance "{name}" is in state "{known[name]["status"]}"')
            if attempt:
                raise Failed("exit status 1")
        print(name)


def copy(root: Path, words: list[str]) -> None:
    _, rest = split(words, {"--host": False})
    if len(rest) != 2 or ":" in rest[0] or rest[1].count(":") != 1:
        raise Failed("exactly one of source or destination must be an instance path (format: instance_name:/path)")
    name, _, path = rest[1].partition(":")
    with state(root) as known:
        if known.get(name, {}).get("status") != "RUNNING":
            raise Failed("Workspace is not running")
    target = root / "homes" / name / path
    with os.fdopen(
        os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.stat(rest[0]).st_mode & 0o777), "wb"
    ) as file:
        file.write(Path(rest[0]).read_bytes())
    print(f"\n✓ Successfully copied {rest[0]} → {rest[1]} (3ms)")


def forward(root: Path, words: list[str]) -> None:
    import subprocess

    flags, rest = split(words, {"--port": True, "-p": True, "--host": False})
    local, _, remote = (flags.get("-p") or flags.get("--port") or "").partition(":")
    if len(rest) != 1 or not (local and remote):
        raise Failed("port format invalid, use local_port:remote_port")
    mapping = f"{local}:127.0.0.1:{remote}"
    subprocess.Popen([root / "bin" / "ssh", "-i", "brev.pem", "-T", "-L", mapping, rest[0], "-N"])
    print(f"Port forwarding...\nlocalhost:{local} -> {rest[0]}:{remote}")


def ssh(root: Path, words: list[str]) -> None:
    flags: dict[str, str] = {}
    host = ""
    while words and not host:
        word = words.pop(0)
        if word in ("-i", "-o", "-L", "-G"):
            flags[word] = words.pop(0)
        elif word in ("-T", "-N"):
            flags[word] = ""
        elif word.startswith("-"):
            raise Failed(f"unknown option {word}", 255)
        else:
            host = word
    if "-G" in flags:
        print(f"user ubuntu\nhostname {'203.0.113.7' if flags['-G'] == 'box' else flags['-G']}\nport 22")
        return
    local, _, remote = flags["-L"].split(":")
    with state(root) as known:
        if known.get(host, {}).get("status") != "RUNNING":
            raise Failed(f"ssh: Could not resolve hostname {host}: Name or service not known", 255)
    from fake_brev_docker import serve_port

    serve_port("127.0.0.1", int(local), int(remote))[0].join()


def main() -> None:
    program, root, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    try:
        {"brev": brev, "ssh-fake": ssh}[program](root, words)
    except Failed as failed:
        print(failed, file=sys.stderr)
        sys.exit(failed.code)


if __name__ == "__main__":
    main()
