"""Secure aggregation (SecAgg+: Bell et al., 2020): the server learns the sum of updates, and no single one.

Every two neighbours among the participants of a round agree upon a secret, from which one of them adds a mask to its
numbers and the other subtracts the same one; every client adds a mask of its own besides. Shares of these secrets lie
with the neighbours (Shamir), so that the server can have the masks of clients that stay away removed, and the own masks
of the others: for each client one of the two, never both. Key agreement, encryption and Shamir's shares are those of
`flwr.common.secure_aggregation`. Its masks are not: their generator has a state of 32 bits, which can be tried out.
Here ChaCha20 makes them, from all 256 bits of a secret.

Numbers are added modulo 2^64, in units of 2^-36: each loses at most half a unit.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from torch import Tensor

from fedflat.core.method import Method
from fedflat.core.participation import sampling
from fedflat.errors import InputError
from fedflat.experiment import Experiment

CURVE, SCALAR = ec.SECP384R1(), 48  # a private key is a number of so many bytes
BITS = 36  # a unit is 2^-36, about 1.5e-11
LIMIT = 2.0**16  # the largest number of a client
CLIENTS = 1 << (63 - 16 - BITS)  # so many of them cannot overflow: 2048
FEWEST = 3  # participants: the sum of two tells either of them what the other sent
NEIGHBOURS = 33  # of a client, itself included; with fewer participants all of them
RECORD = "secagg"
"""The name of the record in messages, and in the memory of nodes."""
Masked = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def threshold(neighbours: int) -> int:
    """How many shares bring a secret back: two thirds of the neighbours, so that no two halves know one each."""
    return max(2, -(-2 * neighbours // 3))


# ---- numbers ----


def quantised(numbers: Tensor) -> Masked:
    """Numbers in units of 2^-36, modulo 2^64."""
    if not bool((numbers.abs() <= LIMIT).all()):
        raise InputError(f"there are numbers beyond ±{LIMIT:g}, which secure aggregation cannot add")
    units = torch.round(numbers.double() * 2.0**BITS).to(torch.int64)
    return units.numpy().view(np.uint64)


def restored(total: Masked) -> Tensor:
    """The inverse of `quantised`, for sums."""
    return torch.from_numpy(total.view(np.int64).copy()).double() * 2.0**-BITS


def mask(secret: bytes, count: int) -> Masked:
    """So many numbers modulo 2^64 that nobody can predict who does not know the secret, which serves once."""
    stream = Cipher(algorithms.ChaCha20(secret, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


# ---- keys ----


def new_key() -> bytes:
    """A private key, for one round."""
    return int(ec.generate_private_key(CURVE).private_numbers().private_value).to_bytes(SCALAR, "big")


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return bytes(_private(private).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint))


def agreed(private: bytes, public: bytes) -> bytes:
    """The secret that two clients share, in the form that Flower's encryption takes."""
    try:
        other = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    except ValueError:
        raise InputError("a key of another client cannot be read") from None
    return bytes(generate_shared_key(_private(private), other))


def pair_mask(private: bytes, public: bytes, count: int) -> Masked:
    """The mask of two clients, the same for both."""
    return mask(base64.urlsafe_b64decode(agreed(private, public)), count)


def _private(private: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(private, "big"), CURVE)


# ---- who is whose neighbour ----


def ring(clients: Sequence[int], most: int = NEIGHBOURS) -> dict[int, list[int]]:
    """Each client's neighbours, itself included: those next to it when all sit around a table in this order."""
    count = len(clients)
    if count <= most:
        return {client: list(clients) for client in clients}
    sides = range(-(most // 2), most // 2 + 1)
    return {client: [clients[(place + side) % count] for side in sides] for place, client in enumerate(clients)}


# ---- what can be summed ----

NEEDS: Mapping[str, str] = {
    "combine": "combines updates one by one",
    "regroup": "compares updates with each other",
    "inspect": "has every client's numbers inspected",
    "client_metrics": "records something of every client",
    "generate": "makes weights for each client, and learns from its update",
}


def check_summable(experiment: Experiment) -> None:
    """Refuse an experiment whose server needs more than sums, by the name of the part that does."""
    method = Method.parse(experiment.method)
    for slot, what in NEEDS.items():
        for part in method.filling(slot):
            raise InputError(
                f"{part.name} {what}, and with secure aggregation the server sees sums only: leave {part.name} or "
                "secure aggregation out"
            )
    if experiment.batchnorm == "recompute":
        raise InputError(
            "batchnorm='recompute' has clients send their statistics one by one: choose 'average', 'local' or 'silobn'"
        )
    law, value = sampling(experiment.participation)
    asked = value if law == "uniform" else experiment.clients
    if not FEWEST <= asked <= (CLIENTS if law != "bernoulli" else asked):
        raise InputError(f"secure aggregation sums {FEWEST} to {CLIENTS} clients per round, not {asked:g}")
