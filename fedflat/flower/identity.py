"""Who a client is: a key pair of its own, with which it signs its answer to the server's hello.

A number alone could be claimed by anybody who may join. The server binds every client's number to a public key, by its
list of clients or when the client first joins, and believes the number only with a fresh signature of that key.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedflat.errors import InputError
from fedflat.flower.keys import make_private_key
from fedflat.flower.validation import RefusedError

NONCE = 32  # bytes that the server draws for every hello, so that no old answer can be sent again
LONGEST = 1000  # characters of a public key
SIGNED = ec.ECDSA(hashes.SHA384())


def fresh_nonce() -> bytes:
    """What a client must sign this time."""
    return secrets.token_bytes(NONCE)


def private_key(path: Path, *, make: bool = False) -> ec.EllipticCurvePrivateKey:
    """The key in a file in OpenSSH's form. make: write a new one, for its owner only, where there is none."""
    if make and not path.exists():
        make_private_key(path)
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} cannot be read as a private key in OpenSSH's form: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path} is no ECDSA key: make one with ssh-keygen -t ecdsa -b 384 -N ''")
    return key


def public_text(key: ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) -> str:
    """The public key as one line, in OpenSSH's form and without a comment."""
    public = key.public_key() if isinstance(key, ec.EllipticCurvePrivateKey) else key
    return str(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH), "ascii")


def read_public(text: str) -> ec.EllipticCurvePublicKey:
    """The public key in a line of OpenSSH's form; a comment after it is ignored."""
    try:
        key = load_ssh_public_key(" ".join(text.split()[:2]).encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"this is no public key in OpenSSH's form: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError("this is no public ECDSA key")
    return key


def sign(key: ec.EllipticCurvePrivateKey, nonce: bytes, told: Mapping[str, Any]) -> bytes:
    """The signature of a nonce and of all that is told with it."""
    return bytes(key.sign(_signed(nonce, told), SIGNED))


def verified_key(nonce: bytes, told: Mapping[str, Any]) -> str:
    """The public key in a client's hello, if it has signed all the rest of it together with the nonce."""
    rest = {name: value for name, value in told.items() if name != "signature"}
    text, signature = rest.get("key"), told.get("signature")
    if not isinstance(text, str) or len(text) > LONGEST or not isinstance(signature, bytes):
        raise RefusedError("has not signed what it says")
    try:
        key = read_public(text)
        key.verify(signature, _signed(nonce, rest), SIGNED)
    except (InputError, InvalidSignature, TypeError):
        raise RefusedError("has signed what it says with another key than it shows") from None
    return public_text(key)


def _signed(nonce: bytes, told: Mapping[str, Any]) -> bytes:
    return nonce + json.dumps(dict(told), sort_keys=True).encode()
