"""Certificates and keys for trials: made here, signed by nobody that others trust."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 90  # for which they are valid: long enough for a trial


def write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """A certificate authority, ca.pem, and a server's certificate and key, server.pem and server.key.

    hosts: names and addresses under which the server is reached. The authority's own key is not kept.
    """
    authority, server = _new_key(), _new_key()
    issuer = _name("fedflat trial authority")
    root = _certificate(issuer, issuer, authority, authority, x509.BasicConstraints(ca=True, path_length=0))
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    leaf = x509.BasicConstraints(ca=False, path_length=None)
    own = _certificate(_name(hosts[0]), issuer, server, authority, leaf, usage, names)
    (folder / "ca.pem").write_bytes(root.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(own.public_bytes(Encoding.PEM))
    _write_private(folder / "server.key", server, PrivateFormat.PKCS8)


def write_node_key(folder: Path, client: int) -> str:
    """A SuperNode's key pair in OpenSSH's form, node-N and node-N.pub; returns the public one."""
    key = make_private_key(folder / f"node-{client}")
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (folder / f"node-{client}.pub").write_bytes(public + f" fedflat-trial-client-{client}\n".encode())
    return str(public.decode())


def make_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Write a new private key in OpenSSH's form, for its owner only."""
    key = _new_key()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_private(path, key, PrivateFormat.OpenSSH)
    return key


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    """Write a key that nobody but its owner could ever read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, form, NoEncryption()))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    """`key`'s certificate, signed with `signer`."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=DAYS))
    identifiers = (
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    )
    for extension in (*extensions, *identifiers):
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(signer, hashes.SHA256())
