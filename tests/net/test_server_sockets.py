# SPDX-License-Identifier: Apache-2.0
"""Addresses and listening sockets, on real sockets of this machine."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.net.sockets import Address, Listener, reserve_port


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("[::1]:0", Address("::1", 0)),
        ("localhost:65535", Address("localhost", 65535)),
        ("unix:/tmp/a:b", Address(path="/tmp/a:b")),
        ("unix:///tmp/x", Address(path="/tmp/x")),
    ],
)
def test_addresses_are_read(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8000", "no host"),
        (":8000", "no host"),
        ("127.0.0.1", "no host"),
        ("127.0.0.1:", "port"),
        ("127.0.0.1:http", "port"),
        ("127.0.0.1:65536", "port"),
        ("127.0.0.1:-1", "port"),
        ("127.0.0.1:\u0661", "port"),
        ("::1:8000", "brackets"),
        ("unix:", "no path"),
        ("unix:/" + "x" * 107, "shorter"),
    ],
)
def test_bad_addresses_are_refused_with_advice(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Address.parse(text)


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6, "localhost"])
def test_port_zero_becomes_a_real_port(host: str) -> None:
    listener = Listener(Address(host, 0))
    try:
        assert listener.address.port > 0
        connect_host = "127.0.0.1" if host == "localhost" else host
        socket.create_connection((connect_host, listener.address.port), timeout=30).close()
    finally:
        listener.close()


def test_a_port_in_use_names_the_address_and_the_next_step() -> None:
    first = Listener(Address("127.0.0.1", 0))
    try:
        with pytest.raises(FailedPrecondition) as caught:
            Listener(first.address)
        assert f"127.0.0.1:{first.address.port}" in caught.value.message
        assert "choose another port" in caught.value.message
    finally:
        first.close()


def test_an_address_of_another_machine_is_explained() -> None:
    with pytest.raises(FailedPrecondition, match="no such address"):
        Listener(Address("192.0.2.1", 0))


def test_a_name_that_does_not_resolve_is_explained() -> None:
    with pytest.raises(InvalidArgument, match="does not resolve"):
        Listener(Address("no-such-host.invalid", 0))


def test_a_unix_socket_is_private_and_disappears(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = Listener(Address(path=str(path)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listener.close()
    assert not path.exists()
    listener = Listener(Address(path=str(path)), unix_mode=0o660)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    listener.close()


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    # A real dead server: its process is gone, its file is not.
    script = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert path.is_socket()
    listener = Listener(Address(path=str(path)))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()


def test_a_live_unix_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Listener(Address(path=str(path)))
    try:
        with pytest.raises(FailedPrecondition, match="another server answers"):
            Listener(first.address)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    finally:
        first.close()


def test_a_file_that_is_not_a_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(FailedPrecondition, match="not a socket"):
        Listener(Address(path=str(path)))
    assert path.read_text() == "data"


def test_a_missing_directory_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="directory does not exist"):
        Listener(Address(path=str(tmp_path / "no" / "s")))


def test_closing_does_not_remove_the_path_of_a_successor(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Listener(Address(path=str(path)))
    path.unlink()
    second = Listener(Address(path=str(path)))
    first.close()
    assert path.is_socket()
    second.close()
    assert not path.exists()


def test_a_reserved_port_is_shared_only_by_those_that_ask_for_it() -> None:
    address, held = reserve_port(Address("127.0.0.1", 0))
    with held:
        with pytest.raises(ConnectionRefusedError):  # held, but nobody listens
            socket.create_connection(("127.0.0.1", address.port), timeout=5)
        one = Listener(address, reuse_port=True)
        two = Listener(address, reuse_port=True)
        assert one.address == two.address == address
        with pytest.raises(FailedPrecondition, match="in use"):
            Listener(address)
        with pytest.raises(FailedPrecondition, match="in use"):  # a second program must not join in silence
            reserve_port(address)
        one.close()
        two.close()
        second, held_again = reserve_port(address)  # a restart finds it free
        held_again.close()
        assert second == address


def test_a_unix_socket_cannot_be_shared(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "s"))
    with pytest.raises(InvalidArgument, match="several processes"):
        reserve_port(address)
    with pytest.raises(InvalidArgument, match="several processes"):
        Listener(address, reuse_port=True)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6])
def test_refusing_keeps_the_backlog_and_accepts_nothing_new(host: str) -> None:
    listener = Listener(Address(host, 0))
    early = socket.create_connection((host, listener.address.port), timeout=30)
    early.sendall(b"hello")
    if not listener.refuse_new():
        pytest.skip("this kernel takes no socket filters")
    with pytest.raises(TimeoutError):
        socket.create_connection((host, listener.address.port), timeout=0.2)
    (taken,) = listener.accept_backlog()
    listener.close()
    taken.setblocking(True)
    assert taken.recv(10) == b"hello"
    early.sendall(b"more")
    assert taken.recv(10) == b"more"
    taken.close()
    early.close()


_HEIR = """
import os, sys
given, address = sys.argv[1:]
os.dup2(int(given), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
from headrace.net.sockets import Address, Listener
listener = Listener(Address.parse(address))
print(listener.address, listener.fileno() == 3, listener.refuse_new(), flush=True)
sys.stdin.readline()
for connection in listener.accept_backlog():
    connection.sendall(b"from the heir")
    connection.close()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6])
def test_a_socket_that_a_process_was_started_with_is_accepted_from_and_outlives_it(host: str) -> None:
    held = Listener(Address(host, 0))
    arguments = [sys.executable, "-c", _HEIR, str(held.fileno()), str(held.address)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "pass_fds": (held.fileno(),)}
    with (
        subprocess.Popen(arguments, **pipes) as heir,
        socket.create_connection((host, held.address.port), 30) as client,
    ):
        assert heir.stdout is not None and heir.stdin is not None
        # It takes no means against new connections: they are for the next process.
        assert heir.stdout.readline().split() == [str(held.address), "True", "False"]
        heir.stdin.write("\n")
        heir.stdin.close()
        assert client.recv(100) == b"from the heir"
    with socket.create_connection((host, held.address.port), 30):
        (waited,) = held.accept_backlog()
        waited.close()
    held.close()


def test_a_socket_of_another_address_is_not_touched() -> None:
    held, other = Listener(Address("127.0.0.1", 0)), Listener(Address("127.0.0.1", 0))
    free = other.address
    other.close()
    arguments = [sys.executable, "-c", _HEIR, str(held.fileno()), str(free)]
    result = subprocess.run(arguments, input="\n", capture_output=True, text=True, pass_fds=(held.fileno(),))
    assert result.stdout.split()[:2] == [str(free), "False"], result.stderr
    held.close()
