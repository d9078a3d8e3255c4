# SPDX-License-Identifier: Apache-2.0
"""Options for prefill and decode servers: the resulting settings, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.router_settings import router_settings
from headrace.cli.serve_settings import KEY_VARIABLE, kv_transfer_settings, transfer_key
from headrace.core.errors import InvalidArgument
from headrace.core.kv_transfer import KvTransferSettings
from headrace.programs.configuration.resolution import OptionValues, configure

SECRET = "0123456789abcdef0123"


def given(**options: str) -> OptionValues:
    return configure({name.replace("_", "-"): value for name, value in options.items()}, (), {})


def test_without_a_role_kv_transfer_is_off() -> None:
    assert kv_transfer_settings(given(), {}) == KvTransferSettings()


def test_one_machine_needs_no_key() -> None:
    created = kv_transfer_settings(given(role="prefill", handing_bytes="5000", handing_seconds="7"), {})
    assert created == KvTransferSettings("prefill", b"", "127.0.0.1", 0, keep_seconds=7.0, keep_bytes=5000)


def test_between_machines_there_is_a_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET + "\n")
    created = kv_transfer_settings(
        given(role="prefill", handing_address="10.0.0.7:8003", handing_key_file=str(file)), {}
    )
    assert (created.host, created.port, created.key) == ("10.0.0.7", 8003, SECRET.encode())
    assert kv_transfer_settings(given(role="decode"), {KEY_VARIABLE: SECRET}).key == SECRET.encode()
    created = kv_transfer_settings(given(role="prefill", handing_address="[fd00::7]:8003"), {KEY_VARIABLE: SECRET})
    assert created.host == "fd00::7"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"role": "prefill", "handing_address": "10.0.0.7:8003"}, "--handing-key-file"),
        ({"role": "prefill", "handing_address": "0.0.0.0:8003"}, "clients cannot connect to"),
        ({"role": "prefill", "handing_address": "nowhere"}, "HOST:PORT"),
        ({"role": "prefill", "handing_address": "a:99999"}, "HOST:PORT"),
        ({"role": "prefill", "workers": "2"}, "leave out --workers"),
        ({"role": "decode", "handing_key_file": "/nonexistent/key"}, "cannot be read"),
        ({"handing_address": "127.0.0.1:1"}, "--role prefill"),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        kv_transfer_settings(given(**options), {})


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("short\n")
    with pytest.raises(InvalidArgument, match="5 bytes"):
        transfer_key(str(tmp_path / "key"))
    with pytest.raises(InvalidArgument, match=KEY_VARIABLE):
        transfer_key("", {KEY_VARIABLE: "short"})


def test_a_router_with_roles_reads_the_key(tmp_path: Path) -> None:
    file, key = tmp_path / "router.yaml", tmp_path / "key"
    key.write_text(SECRET)
    file.write_text(
        f"backends: ['http://a:1,role=prefill', 'http://b:1,role=decode']\npairing: {{least_bytes: 9, key_file: {key}}}\n"
    )
    router = router_settings({}, str(file)).router
    assert (router.paired, router.pairing.least_bytes, router.transfer_key) == (True, 9, SECRET.encode())
    assert SECRET not in repr(router)
    result = router_settings({"discovery.prefill_pods": "a=b", "discovery.decode_pods": "a=c"}, "").router
    assert result.paired
    with pytest.raises(InvalidArgument, match="no setting"):
        file.write_text("backends: ['http://a:1']\npairing: {key: secret}\n")
        router_settings({}, str(file))
