# SPDX-License-Identifier: Apache-2.0
"""The webhooks' certificates: made, kept, replaced without a gap, served."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from headrace.core.clock import SystemClock
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.metrics import Registry
from headrace.fleet.cluster.webhooks.certificates import Certificates, CertificateStore, issue, read_secret, renew
from headrace.fleet.cluster.webhooks.registration import WebhookRegistrar, configurations
from headrace.fleet.cluster.webhooks.reviews import ClusterSnapshot
from headrace.fleet.cluster.webhooks.server import Webhooks
from headrace.fleet.cluster.webhooks.settings import CONFIGURATION, SECRET, VALIDATED_KINDS, Lifetimes, WebhookSettings
from headrace.fleet.documents import ClusterFacts
from headrace.platforms.kubernetes_client.api import ApiError
from support.waiting import eventually_async

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LIVES = Lifetimes()
NAME = "headrace-operator-webhook.headrace-system.svc"
SETTINGS = WebhookSettings("127.0.0.1:0", "headrace-system", refresh_seconds=0.01)


def verified(kept: Certificates, now: datetime, name: str = NAME, authorities: str = "") -> bool:
    """Whether a client that knows the authorities takes the certificate for that name, then."""
    store = Store(x509.load_pem_x509_certificates((authorities or kept.authorities).encode()))
    policy = PolicyBuilder().store(store).time(now).build_server_verifier(x509.DNSName(name))
    try:
        policy.verify(x509.load_pem_x509_certificate(kept.certificate.encode()), [])
    except VerificationError:
        return False
    return True


def test_new_ones_are_for_the_names_and_for_no_other() -> None:
    kept = issue(SETTINGS.names, NOW, LIVES)
    assert verified(kept, NOW) and verified(kept, NOW - timedelta(minutes=50)), "a clock may be behind"
    assert not verified(kept, NOW, "elsewhere.svc") and not verified(
        kept, NOW + LIVES.certificate + timedelta(seconds=1)
    )
    assert not verified(kept, NOW, authorities=issue([NAME], NOW, LIVES).authorities)
    assert read_secret({"data": kept.data()}) == kept


def test_an_invalid_secret_counts_as_missing() -> None:
    kept, other = issue([NAME], NOW, LIVES), issue([NAME], NOW, LIVES)
    data = kept.data()
    assert read_secret({}) is None and read_secret({"data": None}) is None
    for name in data:
        assert read_secret({"data": {**data, name: "%"}}) is None
        assert read_secret({"data": {**data, name: base64.b64encode(b"\xff\xfe").decode()}}) is None
        assert read_secret({"data": {**data, name: other.data()[name]}}) is None, f"{name} of another"
        assert read_secret({"data": {each: value for each, value in data.items() if each != name}}) is None
    pair = {name: other.data()[name] for name in ("tls.crt", "tls.key")}
    assert read_secret({"data": {**data, **pair}}) is None, "signed by nobody that we know"


def test_years_pass_and_every_client_can_verify_at_every_moment() -> None:
    """Three days at a time: what the API server knew at the last look verifies what is served after this one."""
    kept, now = issue([NAME], NOW, LIVES), NOW
    registered = kept.authorities
    authorities, leaves, most = {kept.authorities[:200]}, {kept.certificate}, 1
    for _ in range(365 * 2):
        now += timedelta(days=3)
        before = kept
        kept = renew(kept, [NAME], now, LIVES, known=registered == kept.authorities)
        assert verified(kept, now), now
        assert verified(kept, now, authorities=registered), "the API server has not heard of a newer one"
        assert verified(before, now, authorities=kept.authorities), "other replicas serve the old one a while"
        assert read_secret({"data": kept.data()}) == kept
        registered = kept.authorities
        authorities.add(kept.authorities[:200])
        leaves.add(kept.certificate)
        most = max(most, kept.authorities.count("BEGIN"))
    assert len(authorities) == 4 and most == 2, "every 550 days, two at a time"
    assert 30 <= len(leaves) <= 40, "every 60 days"
    assert renew(kept, [NAME], now, LIVES, known=True) is kept


def test_nothing_is_signed_by_an_authority_that_is_not_known_yet() -> None:
    late = NOW + LIVES.authority - timedelta(days=10)
    kept = renew(issue([NAME], NOW, LIVES), [NAME], late - timedelta(days=20), LIVES, known=True)
    assert kept.authorities.count("BEGIN") == 2 and not verified(kept, late)
    near = NOW + LIVES.certificate - timedelta(days=1)
    quick = Lifetimes(authority=timedelta(days=100), authority_left=timedelta(days=95))
    first = issue([NAME], NOW, quick)
    two = renew(first, [NAME], near, quick, known=True)
    assert two.certificate == first.certificate and two.authorities.count("BEGIN") == 2
    assert renew(two, [NAME], near, quick, known=False) is two
    assert renew(two, [NAME], near, quick, known=True).certificate != first.certificate


def test_after_years_without_an_operator_everything_is_issued_again() -> None:
    later = NOW + LIVES.authority + timedelta(days=1)
    kept = renew(issue([NAME], NOW, LIVES), [NAME], later, LIVES, known=False)
    assert verified(kept, later) and kept.authorities.count("BEGIN") == 1
    gap = NOW + LIVES.certificate + timedelta(days=1)
    assert verified(renew(issue([NAME], NOW, LIVES), [NAME], gap, LIVES, known=False), gap)


def test_a_name_that_is_missing_is_added_and_others_keep_theirs() -> None:
    kept = issue([NAME], NOW, LIVES)
    both = renew(kept, ["laptop.example", "10.1.2.3"], NOW, LIVES, known=False)
    assert verified(both, NOW) and verified(both, NOW, "laptop.example")
    assert renew(both, [NAME], NOW, LIVES, known=True) is both
    assert renew(both, ["10.1.2.3"], NOW, LIVES, known=True) is both


def test_settings_are_checked() -> None:
    good = WebhookSettings("127.0.0.1:9443", "x", "https://[::1]:9443")
    assert good.checked() is good and good.names[-1] == "::1"
    for url in ("http://a", "https://", "https://a:x", "https://a?b=c", "a:9443", "https://u@a", "https://[::1"):
        with pytest.raises(InvalidArgument, match="write https://HOST:PORT"):
            WebhookSettings("127.0.0.1:9443", "x", url).checked()
    with pytest.raises(InvalidArgument, match="Ignore or Fail"):
        WebhookSettings("127.0.0.1:9443", "x", failure_policy="Maybe").checked()
    with pytest.raises(InvalidArgument):
        WebhookSettings("9443", "x").checked()


def test_the_configurations_never_block_a_deletion() -> None:
    mutating, validating = configurations(SETTINGS, "PEM")
    assert [each["name"] for each in mutating["webhooks"]] == ["mutate.inferenceservices.ome.io"]
    assert len(validating["webhooks"]) == len(VALIDATED_KINDS) == 8
    for each in (*mutating["webhooks"], *validating["webhooks"]):
        (rule,) = each["rules"]
        assert rule["operations"] == ["CREATE", "UPDATE"] and "/" not in rule["resources"][0]
        assert (each["failurePolicy"], each["sideEffects"]) == ("Ignore", "None")
        assert each["clientConfig"]["service"]["name"] == "headrace-operator-webhook"
    (first, _) = configurations(WebhookSettings("a:1", "x", "https://a:1/"), "PEM")
    assert first["webhooks"][0]["clientConfig"]["url"] == "https://a:1/mutate-ome-io-v1beta1-inferenceservice"


class Memory:
    """An API server as far as webhooks need one: versions, conflicts, what is absent."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.writes: list[str] = []
        self.reads = 0
        self.rival: Any = None
        """Called before a write of the Secret, once."""

    async def get(self, where: Any, namespace: str, name: str) -> Any:
        self.reads += 1
        return self.objects.get(f"{where.resource.kind}/{name}")

    async def create(self, where: Any, namespace: str, body: Any) -> Any:
        return self._write(where, body["metadata"]["name"], body, None)

    async def replace(self, where: Any, namespace: str, name: str, body: Any) -> Any:
        return self._write(where, name, body, body["metadata"]["resourceVersion"])

    async def apply(self, where: Any, body: Any) -> Any:
        fields = {f"f:{name}": {} for name in body if name not in ("apiVersion", "kind", "metadata")}
        owned = {"manager": "headrace-operator", "operation": "Apply", "fieldsV1": fields | {"f:metadata": {}}}
        name = body["metadata"]["name"]
        body = {**body, "metadata": {**body["metadata"], "managedFields": [owned]}}
        live = self.objects.get(f"{where.resource.kind}/{name}")
        return self._write(where, name, body, live["metadata"]["resourceVersion"] if live else None)

    def _write(self, where: Any, name: str, body: Any, version: str | None) -> Any:
        if self.rival is not None and name == SECRET:
            rival, self.rival = self.rival, None
            rival()
        key = f"{where.resource.kind}/{name}"
        live = self.objects.get(key)
        if (live["metadata"]["resourceVersion"] if live else None) != version:
            raise ApiError(409, "Conflict", "somebody was quicker")
        self.writes.append(key)
        body = json.loads(json.dumps(body))
        body["metadata"]["resourceVersion"] = str(len(self.writes))
        self.objects[key] = body
        return body


def test_the_first_replica_fills_the_secret_and_the_others_take_what_is_there() -> None:
    async def run() -> None:
        api = Memory()
        api.objects[f"Secret/{SECRET}"] = {"metadata": {"name": SECRET, "resourceVersion": "0"}, "type": "Opaque"}
        first, second = (CertificateStore(api, SETTINGS, lambda: NOW) for _ in range(2))  # type: ignore[arg-type]
        kept = await first.refresh(leads=False, known="")
        assert await second.refresh(leads=False, known="") == kept and len(api.writes) == 1
        assert await second.refresh(leads=True, known="") == kept and len(api.writes) == 1
        late = CertificateStore(api, SETTINGS, lambda: NOW + timedelta(days=89))  # type: ignore[arg-type]
        assert await late.refresh(leads=False, known="") == kept, "only the one that leads renews"
        assert await late.refresh(leads=True, known="") != kept

    asyncio.run(run())


def test_of_two_concurrent_writers_one_reads_again() -> None:
    async def run() -> None:
        api, theirs = Memory(), issue(SETTINGS.names, NOW, LIVES)
        secret = {"metadata": {"name": SECRET, "resourceVersion": "7"}, "data": theirs.data()}
        api.rival = lambda: api.objects.update({f"Secret/{SECRET}": secret})
        assert await CertificateStore(api, SETTINGS, lambda: NOW).refresh(leads=True, known="") == theirs  # type: ignore[arg-type]
        assert api.writes == []

    asyncio.run(run())


def test_configurations_are_written_once_and_restored_after_an_edit() -> None:
    async def run() -> None:
        api = Memory()
        registrar = WebhookRegistrar(api, SETTINGS)  # type: ignore[arg-type]
        assert not await registrar.register("PEM")
        assert await registrar.register("PEM") and len(api.writes) == 2
        api.objects[f"MutatingWebhookConfiguration/{CONFIGURATION}"]["webhooks"][0]["failurePolicy"] = "Fail"
        assert not await registrar.register("PEM") and len(api.writes) == 3
        assert not await registrar.register("PEM and another") and len(api.writes) == 5
        api.objects.clear()
        assert not await registrar.register("PEM and another") and len(api.writes) == 7

    asyncio.run(run())


def test_an_authority_is_replaced_without_failing_clients() -> None:
    """Real TLS: who verifies by what is registered is never let down, from one authority to the next."""

    async def run() -> None:
        api, days = Memory(), [0.0]
        # The verifier's clock cannot be moved: ours goes through the past, and all is valid for years.
        start = datetime.now(UTC) - timedelta(days=1200)
        lives = Lifetimes(timedelta(days=4000), timedelta(days=3000), timedelta(days=2900), timedelta(days=2800))
        settings = WebhookSettings("127.0.0.1:0", "x", "https://localhost:1", refresh_seconds=0.05, lifetimes=lives)
        sight = ClusterSnapshot(ClusterFacts(), True)
        webhooks = Webhooks(
            api,  # type: ignore[arg-type]
            settings,
            lambda: sight,
            Registry(SystemClock()),
            lambda: start + timedelta(days=days[0]),
        )
        webhooks.lead()
        work = asyncio.create_task(webhooks.run())
        await eventually_async(lambda: webhooks.registered)
        async with asyncio.timeout(60):
            seen: list[tuple[str, str]] = []
            while len({leaf for leaf, _ in seen}) < 3 or len({bundle for _, bundle in seen}) < 2:
                seen.append(await _asked(webhooks, api))
                # After 100 days a new certificate; after 1000 a new authority, and then a certificate of it.
                days[0] = 101 if len({leaf for leaf, _ in seen}) == 1 else 1001
                await asyncio.sleep(0.02)
        before, reads = len(api.writes), api.reads
        await eventually_async(lambda: api.reads > reads + 8)
        assert len(api.writes) == before, "nothing to do, nothing written"
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(run())


async def _asked(webhooks: Webhooks, api: Memory) -> tuple[str, str]:
    """One review on a new connection; the certificate it was answered with, and the authorities it was verified by."""
    live = api.objects[f"ValidatingWebhookConfiguration/{CONFIGURATION}"]
    bundle = base64.b64decode(live["webhooks"][0]["clientConfig"]["caBundle"]).decode()
    context = ssl.create_default_context(cadata=bundle)
    assert webhooks.server is not None
    port = webhooks.server.port
    body = {"apiVersion": "admission.k8s.io/v1", "request": {"uid": "1", "operation": "DELETE"}}
    async with httpx2.AsyncClient(verify=context, timeout=60) as client:
        url = f"https://localhost:{port}/validate-ome-io-v1beta1-inferenceservice"
        answer = await client.post(url, json=body)
        # Of this very connection: by the time of another one, other authorities may be registered.
        shown = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert answer.status_code == 200 and answer.json()["response"]["allowed"]
        assert (await client.post(url, content=b"no")).status_code == 400
        assert (await client.get(url)).status_code == 405
        assert (await client.get(f"https://localhost:{port}/readyz")).status_code == 200
    return ssl.DER_cert_to_PEM_cert(shown), bundle
