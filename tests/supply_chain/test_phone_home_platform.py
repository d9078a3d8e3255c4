# SPDX-License-Identifier: Apache-2.0
"""No library that serves a model sends anything to its maker.

The server runs in a network of its own, whose only way out counts packets.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_cases import MODULES, write_cases

from support import llm_models
from support.programs import Program

pytestmark = [pytest.mark.platform, pytest.mark.timeout(600)]

NAME = "hr-no-phone"
ASK = """
import json, sys, urllib.request
def post(path, body):
    request = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        return json.load(urllib.request.urlopen(request, timeout=60))
    except urllib.error.HTTPError as error:
        return error.code
ready = [model["name"] for model in post("/v2/repository/index", {"ready": True})]
for name in ready:
    about = json.load(urllib.request.urlopen(f"{sys.argv[1]}/v2/models/{name}"))
    inputs = []
    for each in about["inputs"]:
        shape = [1 if size < 0 else size for size in each["shape"]]
        count = 1
        for size in shape:
            count *= size
        value = {"BYTES": "text", "BOOL": True}.get(each["datatype"], 1)
        inputs.append({"name": each["name"], "datatype": each["datatype"], "shape": shape, "data": [value] * count})
    post(f"/v2/models/{name}/infer", {"inputs": inputs})
said = post("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
print(len(ready), said["usage"]["completion_tokens"])
"""


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


class Network:
    """A network namespace with loopback, and a default route through a link that counts what leaves."""

    def __enter__(self) -> Network:
        subprocess.run(["ip", "netns", "del", NAME], capture_output=True)  # of a test that was killed
        self._resolver = Path("/etc/netns", NAME)
        self._resolver.mkdir(parents=True, exist_ok=True)
        # Names are asked for beyond the link, so that a lookup is counted too.
        (self._resolver / "resolv.conf").write_text("nameserver 192.0.2.53\n")
        ip("netns", "add", NAME)
        ip("link", "add", NAME, "type", "veth", "peer", "name", "eth0", "netns", NAME)
        subprocess.run([*self.command, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"], check=True)
        Path(f"/proc/sys/net/ipv6/conf/{NAME}/disable_ipv6").write_text("1")
        ip("link", "set", NAME, "up")
        for args in (
            ("link", "set", "lo", "up"),
            ("link", "set", "eth0", "up"),
            ("address", "add", "192.0.2.1/24", "dev", "eth0"),
        ):
            ip("-n", NAME, *args)
        ip("-n", NAME, "route", "add", "default", "via", "192.0.2.254")
        return self

    @property
    def command(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", NAME)

    @property
    def packets(self) -> int:
        """Packets that left, those that only asked for an address among them."""
        return int(Path(f"/sys/class/net/{NAME}/statistics/rx_packets").read_text())

    def __exit__(self, *error: object) -> None:
        ip("link", "del", NAME)  # it would go with the namespace, but a while later
        ip("netns", "del", NAME)
        (self._resolver / "resolv.conf").unlink()
        self._resolver.rmdir()


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


def test_the_link_counts_lookups_and_connections(network: Network) -> None:
    assert network.packets == 0
    script = "import socket; socket.getaddrinfo('example.com', 80)"
    subprocess.run(
        [*network.command, sys.executable, "-c", script],
        capture_output=True,
        env={"RES_OPTIONS": "timeout:1 attempts:1"},
    )
    looked_up = network.packets
    assert looked_up > 0
    script = "import socket; socket.create_connection(('198.51.100.7', 443), timeout=1)"
    subprocess.run([*network.command, sys.executable, "-c", script], capture_output=True)
    assert network.packets > looked_up


def test_nothing_leaves_while_every_format_is_served(network: Network, tmp_path: Path) -> None:
    for module in MODULES:
        write_cases(tmp_path / "models", module)
    llm_models.tiny_llama(tmp_path / "models" / "chat" / "1")
    llm_models.tiny_tokenizer(tmp_path / "models" / "chat" / "1")
    (tmp_path / "models" / "chat" / "config.pbtxt").write_text('backend: "llm"\n')
    args = ("serve", tmp_path / "models", "--http-port", "0", "--grpc-port", "0")
    command = (*network.command, str(Path(sys.executable).with_name("headrace")))
    with Program(*args, command=command, log=tmp_path / "log", ready="model(s)") as server:
        ask = [*network.command, sys.executable, "-c", ASK, server.url]
        answered = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
        assert int(answered[0]) > len(MODULES) and int(answered[1]) == 4, server.log
    assert network.packets == 0
