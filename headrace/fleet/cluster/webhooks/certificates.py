# SPDX-License-Identifier: Apache-2.0
"""An authority of our own, and the certificate that it signs for the webhooks' server. No I/O; the time is a parameter.

Called by `keeping`. An authority is replaced in two steps, a look apart: first the API server is told of the new one beside
the old, then a certificate is signed by it. Whoever verifies knows the signer at every moment. Of an authority that was
replaced only the certificate is kept, and that until its end.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace.fleet.cluster.webhooks.settings import Lifetimes
from headrace.fleet.words import Document, text

_BACK = timedelta(hours=1)
"""For clocks that are behind ours."""
_FIELDS = {"authorities": "ca.crt", "authority_key": "ca.key", "certificate": "tls.crt", "key": "tls.key"}


@dataclass(frozen=True)
class Certificates:
    """All that is kept, in PEM."""

    authorities: str
    """The newest, and those before it that have not ended."""
    authority_key: str
    """Of the newest."""
    certificate: str
    key: str

    @property
    def identity(self) -> bytes:
        """What a server needs: key and certificate."""
        return (self.key + self.certificate).encode()

    @property
    def ends(self) -> datetime:
        """The end of the server's certificate."""
        return _loaded(self.certificate)[0].not_valid_after_utc

    def data(self) -> dict[str, str]:
        """As a Secret has it."""
        return {name: base64.b64encode(getattr(self, ours).encode()).decode() for ours, name in _FIELDS.items()}


def kept_in(secret: Document) -> Certificates | None:
    """What a Secret has; None where something is missing, is no certificate, or does not belong to the rest."""
    try:
        found = Certificates(
            **{ours: base64.b64decode(text(secret, "data", name)).decode() for ours, name in _FIELDS.items()}
        )
        authorities, leaf = _loaded(found.authorities), _loaded(found.certificate)[0]
        pairs = ((authorities[0], found.authority_key), (leaf, found.key))
        if any(each.public_key() != _key(pem).public_key() for each, pem in pairs):
            return None
        return found if any(_signed(leaf, each) for each in authorities) else None
    except (ValueError, TypeError, IndexError, UnicodeDecodeError, binascii.Error):
        return None


def made(names: Iterable[str], now: datetime, lifetimes: Lifetimes) -> Certificates:
    """An authority and a certificate, both new."""
    authority, key = _authority(now, lifetimes)
    certificate, own = _leaf(authority, key, names, now, lifetimes)
    return Certificates(_pem(authority), _pem_key(key), _pem(certificate), _pem_key(own))


def renewed(
    kept: Certificates, names: Iterable[str], now: datetime, lifetimes: Lifetimes, *, known: bool
) -> Certificates:
    """What is kept, with what ends soon replaced; the same object if nothing does.

    known: the API server has been told of all authorities that are kept, and had the time to hear it.
    """
    wanted = tuple(dict.fromkeys(names))
    authorities, leaf = _loaded(kept.authorities), _loaded(kept.certificate)[0]
    lasting = [authorities[0], *(each for each in authorities[1:] if each.not_valid_after_utc > now)]
    if lasting[0].not_valid_after_utc <= now:
        return made(wanted, now, lifetimes)  # nobody was here for years; there is nothing left to verify by
    if lasting[0].not_valid_after_utc - now < lifetimes.authority_left:
        authority, key = _authority(now, lifetimes)
        return replace(kept, authorities="".join(map(_pem, [authority, *lasting])), authority_key=_pem_key(key))
    missing = not set(wanted) <= _names(leaf)
    ends = leaf.not_valid_after_utc - now < lifetimes.certificate_left
    if (ends or missing) and (known or len(lasting) == 1 or leaf.not_valid_after_utc <= now):
        # Another replica may be reached by another name; it need not ask for its own again each time.
        both = wanted if ends else (*wanted, *sorted(_names(leaf) - set(wanted)))
        certificate, own = _leaf(lasting[0], _key(kept.authority_key), both, now, lifetimes)
        kept = replace(kept, certificate=_pem(certificate), key=_pem_key(own))
    if len(lasting) < len(authorities):
        kept = replace(kept, authorities="".join(map(_pem, lasting)))
    return kept


def _authority(now: datetime, lifetimes: Lifetimes) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two authorities of one name could be taken for each other.
    number = x509.random_serial_number()
    name = _name(f"headrace webhooks {number % 16**8:08x}")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(name, name, key, now, lifetimes.authority).serial_number(number)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True).add_extension(identifier, critical=False)
    return builder.sign(key, hashes.SHA256()), key


def _leaf(
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
    builder = builder.add_extension(x509.SubjectAlternativeName([_general(each) for each in names]), critical=False)
    return builder.sign(signer, hashes.SHA256()), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, lasts: timedelta
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.not_valid_before(now - _BACK).not_valid_after(now + lasts)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names(certificate: x509.Certificate) -> set[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(each.value) for each in found}


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _loaded(pem: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem.encode())


def _key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("not a key that we make")
    return key


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem_key(key: ec.EllipticCurvePrivateKey) -> str:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, plain).decode()
