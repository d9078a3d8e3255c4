# SPDX-License-Identifier: Apache-2.0
"""The certificate authority and the server certificate of the webhooks, kept in a Secret that all replicas share."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.fleet.cluster.webhooks.settings import SECRET, SECRETS, Lifetimes, WebhookSettings
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError
from headrace.platforms.kubernetes_client.objects import Document, get_str

_CLOCK_SKEW = timedelta(hours=1)
"""Tolerance for clocks that are behind."""
_FIELDS = {"authorities": "ca.crt", "authority_key": "ca.key", "certificate": "tls.crt", "key": "tls.key"}


@dataclass(frozen=True)
class Certificates:
    """The certificates and keys of the webhooks, in PEM."""

    authorities: str
    """The newest authority, and older ones that have not expired."""
    authority_key: str
    """Private key of the newest authority."""
    certificate: str
    key: str

    @property
    def identity(self) -> bytes:
        """Key and certificate of the server."""
        return (self.key + self.certificate).encode()

    @property
    def expiry(self) -> datetime:
        """Expiry of the server's certificate."""
        return _load(self.certificate)[0].not_valid_after_utc

    def data(self) -> dict[str, str]:
        """Return the data of the Secret."""
        return {name: base64.b64encode(getattr(self, field).encode()).decode() for field, name in _FIELDS.items()}


def read_secret(secret: Document) -> Certificates | None:
    """Read the certificates of a Secret; None if something is missing, invalid or does not match."""
    try:
        certificates = Certificates(
            **{field: base64.b64decode(get_str(secret, "data", name)).decode() for field, name in _FIELDS.items()}
        )
        authorities, leaf = _load(certificates.authorities), _load(certificates.certificate)[0]
        pairs = ((authorities[0], certificates.authority_key), (leaf, certificates.key))
        if any(pair.public_key() != _key(pem).public_key() for pair, pem in pairs):
            return None
        return certificates if any(_signed(leaf, authority) for authority in authorities) else None
    except (ValueError, TypeError, IndexError, UnicodeDecodeError, binascii.Error):
        return None


def issue(names: Iterable[str], now: datetime, lifetimes: Lifetimes) -> Certificates:
    """Issue a new authority and a new certificate."""
    authority, key = _issue_authority(now, lifetimes)
    certificate, private_key = _issue_certificate(authority, key, names, now, lifetimes)
    return Certificates(_pem(authority), _pem_key(key), _pem(certificate), _pem_key(private_key))


def renew(
    stored: Certificates, names: Iterable[str], now: datetime, lifetimes: Lifetimes, *, known: bool
) -> Certificates:
    """Renew what expires soon; return the same object if nothing does.

    known: all stored authorities are registered, and API servers have had time to notice.
    """
    desired_names = tuple(dict.fromkeys(names))
    authorities, leaf = _load(stored.authorities), _load(stored.certificate)[0]
    lasting = [authorities[0], *(old for old in authorities[1:] if old.not_valid_after_utc > now)]
    if lasting[0].not_valid_after_utc <= now:
        return issue(desired_names, now, lifetimes)  # all authorities have expired
    if lasting[0].not_valid_after_utc - now < lifetimes.authority_left:
        authority, key = _issue_authority(now, lifetimes)
        return replace(stored, authorities="".join(map(_pem, [authority, *lasting])), authority_key=_pem_key(key))
    missing = not set(desired_names) <= _names(leaf)
    ends = leaf.not_valid_after_utc - now < lifetimes.certificate_left
    if (ends or missing) and (known or len(lasting) == 1 or leaf.not_valid_after_utc <= now):
        # Keep the names of the old certificate: another replica may have another name.
        certificate_names = desired_names if ends else (*desired_names, *sorted(_names(leaf) - set(desired_names)))
        certificate, private_key = _issue_certificate(
            lasting[0], _key(stored.authority_key), certificate_names, now, lifetimes
        )
        stored = replace(stored, certificate=_pem(certificate), key=_pem_key(private_key))
    if len(lasting) < len(authorities):
        stored = replace(stored, authorities="".join(map(_pem, lasting)))
    return stored


def _issue_authority(now: datetime, lifetimes: Lifetimes) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two authorities with the same name could be confused.
    number = x509.random_serial_number()
    name = _name(f"headrace webhooks {number % 16**8:08x}")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(name, name, key, now, lifetimes.authority).serial_number(number)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    return builder.sign(key, hashes.SHA256()), key


def _issue_certificate(
    authority: x509.Certificate,
    signer: ec.EllipticCurvePrivateKey,
    names: Iterable[str],
    now: datetime,
    lifetimes: Lifetimes,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = _builder(_name("headrace operator webhook"), authority.subject, key, now, lifetimes.certificate)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(usage, critical=True).add_extension(signed_by, critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
    return builder.sign(signer, hashes.SHA256()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, validity: timedelta
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(now + validity)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names(certificate: x509.Certificate) -> set[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _load(pem: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem.encode())


def _key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("unexpected key type")
    return key


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem_key(key: ec.EllipticCurvePrivateKey) -> str:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, plain).decode()


log = logging.getLogger("headrace.operator")

_TRIES = 5


class CertificateStore:
    """Reads the Secret of the certificates, and writes it."""

    def __init__(self, api: ApiClient, settings: WebhookSettings, now: Callable[[], datetime]) -> None:
        self._api = api
        self._settings = settings
        self._now = now

    async def refresh(self, *, leads: bool, known: str) -> Certificates:
        """Return the certificates to serve, issued or renewed if needed. Raises ApiError or Unreachable.

        known: the authorities that are registered, and that API servers have had time to notice.
        """
        for _ in range(_TRIES):
            secret = await self._api.get(SECRETS, self._settings.namespace, SECRET)
            stored = read_secret(secret) if secret is not None else None
            desired = self._wanted(stored, leads=leads, known=known)
            if desired is stored:
                return desired
            try:
                await self._write(secret, desired)
            except ApiError as error:
                if error.code != 409:  # another replica was faster
                    raise
                continue
            log.info("wrote new webhook certificates to the Secret %s/%s", self._settings.namespace, SECRET)
            return desired
        raise ApiError(409, "Conflict", f"the Secret {SECRET} is written by other processes all the time")

    def _wanted(self, stored: Certificates | None, *, leads: bool, known: str) -> Certificates:
        settings, now = self._settings, self._now()
        if stored is None:
            return issue(settings.names, now, settings.lifetimes)
        if not leads:
            return stored
        return renew(stored, settings.names, now, settings.lifetimes, known=known == stored.authorities)

    async def _write(self, secret: Document | None, desired: Certificates) -> None:
        body: dict[str, object] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": SECRET},
            "type": "Opaque",
            **(secret or {}),
            "data": desired.data(),
        }
        if secret is None:
            try:
                await self._api.create(SECRETS, self._settings.namespace, body)
            except ApiError as error:
                if error.code == 403:
                    log.error(
                        "there is no Secret %s/%s and no permission to create it: apply the operator's manifests again",
                        self._settings.namespace,
                        SECRET,
                    )
                raise
        else:
            await self._api.replace(SECRETS, self._settings.namespace, SECRET, body)
