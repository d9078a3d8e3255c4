# SPDX-License-Identifier: Apache-2.0
"""A server or gateway that runs already: whether it answers, is ready, is of this version, and what its clock says.

Only what the user named is asked, and the ports of this machine where one of ours listens.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument
from headrace.programs.doctor.finding import Finding, ok, problem, warning
from headrace.version import __version__

_SECONDS = 4.0
"""For an answer: who asks a doctor often has a busy machine."""
_MOST_BYTES = 4 * 1024 * 1024
_SKEW_LOW, _SKEW_MOST = 5.0, 60.0
"""A Date has whole seconds; tokens are refused when clocks differ by a minute."""


class Answer(NamedTuple):
    """What came back."""

    status: int
    document: Any
    """None for what is not JSON."""
    skew: float | None
    """By how many seconds their clock is ahead of this one."""


def check_server(url: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """A `headrace serve`, or any other that speaks the v2 protocol."""
    name = f"server {url}"
    try:
        live = ask(url, "/v2/health/live", environ)
    except OSError as error:
        yield problem(name, f"does not answer: {_why(error)}", "headrace serve models")
        return
    if live.status in (401, 403):
        yield warning(name, "answers, and wants an API key", "export HEADRACE_API_KEY=KEY")
        return
    if live.status != 200:
        yield problem(
            name, f"answers {live.status} to /v2/health/live: is that a server of models?", f"curl -i {url}/v2"
        )
        return
    if ask(url, "/v2/health/ready", environ).status == 200:
        yield ok(name, "answers and is ready", f"headrace top {url}")
    else:
        told = "; ".join(_not_ready(url, environ)) or "it does not say why"
        yield problem(name, f"answers, but is not ready: {told}", f"headrace models list --url {url}")
    about = ask(url, "/v2", environ).document
    if isinstance(about, dict) and about.get("name") == "headrace" and about.get("version") != __version__:
        told = f"it is Headrace {about.get('version')}, and this is {__version__}"
        yield warning(f"version of {url}", told, f"pip install headrace=={about.get('version')}")
    yield from check_clock(url, live)


def check_gateway(url: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """A `headrace gateway`."""
    name = f"gateway {url}"
    try:
        ready = ask(url, "/health/readiness", environ)
    except OSError as error:
        yield problem(name, f"does not answer: {_why(error)}", "headrace gateway")
        return
    if ready.status == 200:
        yield ok(name, "answers and takes work")
    else:
        yield problem(name, f"answers {ready.status} to /health/readiness", f"curl -i {url}/health/readiness")
    yield from check_clock(url, ready)


def check_clock(url: str, answer: Answer) -> Iterator[Finding]:
    """This machine's clock against theirs."""
    if answer.skew is None:
        return
    name = f"clock of {url}"
    if abs(answer.skew) < _SKEW_LOW:
        yield ok(name, "agrees with this one")
        return
    told = f"{abs(answer.skew):.0f} s {'ahead of' if answer.skew > 0 else 'behind'} this one: tokens may be refused"
    yield (problem if abs(answer.skew) >= _SKEW_MOST else warning)(name, told, "timedatectl set-ntp true")


def ask(url: str, path: str, environ: Mapping[str, str], method: str = "GET", body: bytes | None = None) -> Answer:
    """One request, without redirects or proxies. Raises OSError where nobody answers, InvalidArgument for no URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidArgument(f"{url}: is no URL, or its port is no number from 0 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"{url} names no server: write http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, port, timeout=_SECONDS)
    key = environ.get("HEADRACE_API_KEY", "")
    try:
        sent = time.time()
        connection.request(
            method, parts.path.rstrip("/") + path, body, {"authorization": f"Bearer {key}"} if key else {}
        )
        answer = connection.getresponse()
        content, received = answer.read(_MOST_BYTES), time.time()
    except http.client.HTTPException as error:
        raise OSError(f"it does not speak HTTP ({type(error).__name__})") from None
    finally:
        connection.close()
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    return Answer(answer.status, document, _skew(answer.getheader("date", ""), sent, received))


def _skew(date: str, sent: float, received: float) -> float | None:
    try:
        theirs = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    # A Date is cut to whole seconds: what it says was true at some moment of the second after it.
    return theirs - received if theirs > received else min(0.0, theirs + 1 - sent)


def _not_ready(url: str, environ: Mapping[str, str]) -> Iterator[str]:
    index = ask(url, "/v2/repository/index", environ, "POST", b"{}").document
    for each in index if isinstance(index, list) else ():
        if isinstance(each, dict) and each.get("state") != "READY":
            yield f"{each.get('name')} is {each.get('state') or 'not loaded'}: {each.get('reason') or 'no reason is given'}"


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came in {_SECONDS:g} s"
    return error.strerror or str(error) or type(error).__name__
