"""Secure aggregation: the server learns the sum of the clients' vectors, and nothing else about one of them.

The protocol of Bonawitz et al. 2017 (doi 10.1145/3133956.3133982) against a server that follows it but is
curious. All numbers are modulo 2³². In every round, client i

1. draws two private keys, and advertises its public keys,
2. draws a seed b_i; sends Shamir shares of b_i and of its mask key to each client j, encrypted for j,
3. uploads y_i = x_i + PRG(b_i) + Σ_{j>i} PRG(s_ij) − Σ_{j<i} PRG(s_ij), where s_ij is a secret of i and j,
4. sends its shares of b_j for every client j that uploaded, and of the mask key of every other one.

In Σ y_i the masks s_ij cancel. With the shares of a threshold of clients the server removes PRG(b_i), and
what the missing uploads would have cancelled.

Key agreement, encryption and Shamir's shares are Flower's functions. Two others of Flower do not suit:
`pseudo_rand_gen` reduces a secret to 32 bits, which a server could guess, so masks are AES in counter mode;
`quantize` rounds at random with NumPy's global generator, so numbers are rounded to the nearest level.
"""

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs
from torch import Tensor

from fedseal.weights import Tensors

Vector = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]

CURVE = ec.SECP384R1()  # that of Flower's keys
KEY_BYTES, PUBLIC_BYTES, SEED_BYTES = 48, 49, 16
LEVELS = 2**30  # the largest sum: half of what 32 bits can hold, so that a wrong vector of sums is noticed
LIMB_BITS, LIMBS = 16, 3  # of a count
COUNTS = 22  # in a vector, also if there are fewer: two of this module, and a method's
MAX_CLIENTS = 2**LIMB_BITS  # whose limbs can be added up
BLOCK = 2**16  # numbers of a mask at a time, which stay in the processor's cache
KEPT = ("mean", "std")  # the normalisation of the input, which no client may change


# Numbers: a vector is the quantised update of a model, followed by counts.


@dataclass(frozen=True)
class FixedPoint:
    """Numbers from −clip to clip as integers, of which this number of clients can add up theirs."""

    clip: float
    clients: int

    @property
    def highest(self) -> int:
        return LEVELS // self.clients

    @property
    def step(self) -> float:
        """The distance between two levels. Rounding changes a number by at most half of it."""
        return self.clip / self.highest

    def encode(self, values: Floats) -> Vector:
        """The nearest level of each number."""
        levels = np.rint(np.clip(values, -self.clip, self.clip) / self.step)
        return levels.astype(np.int32).view(np.uint32)

    def decode(self, total: Vector) -> Floats:
        """The sum of the numbers from the sum of the levels; a ValueError if that is impossible."""
        levels = total.view(np.int32)
        if len(levels) and max(abs(int(levels.min())), abs(int(levels.max()))) > LEVELS:
            raise ValueError("the sum is out of range")
        return levels.astype(np.float64) * self.step


def encode_counts(counts: Sequence[int]) -> Vector:
    """Each count as three limbs of 16 bits, which can be added up; zeros for the counts up to `COUNTS`."""
    if len(counts) > COUNTS or any(not 0 <= count < 2 ** (LIMB_BITS * LIMBS) for count in counts):
        raise ValueError("too many counts, or one is out of range")
    limbs = [count >> LIMB_BITS * i & (2**LIMB_BITS - 1) for count in counts for i in range(LIMBS)]
    return np.array(limbs + [0] * (COUNTS * LIMBS - len(limbs)), np.uint32)


def decode_counts(total: Vector) -> list[int]:
    """The sums of the counts from the sums of their limbs."""
    rows = total.reshape(-1, LIMBS).tolist()
    return [sum(limb << LIMB_BITS * i for i, limb in enumerate(row)) for row in rows]


def summed_names(model: Tensors) -> list[str]:
    """The tensors that are added up. Integer buffers and the input's normalisation stay as they were sent."""
    return sorted(name for name, value in model.items() if value.is_floating_point() and name not in KEPT)


def update_of(trained: Tensors, sent: Tensors) -> Floats:
    """What training changed, as one vector."""
    names = summed_names(sent)
    parts = [(trained[name].double() - sent[name].double()).flatten() for name in names]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts]).numpy()


def apply_update(sent: Tensors, update: Floats) -> Tensors:
    """The model `sent` with an update. Rounding must not make a variance negative."""
    names, values = summed_names(sent), torch.from_numpy(update)
    parts = values.split([sent[name].numel() for name in names])
    model = dict(sent)
    for name, part in zip(names, parts, strict=True):
        value = (sent[name].double() + part.view_as(sent[name])).to(sent[name].dtype)
        model[name] = value.clamp(min=0) if name.endswith("running_var") else value
    return model


# Keys and shares, as bytes.


def new_key() -> bytes:
    """A private key."""
    private, _ = generate_key_pairs()
    return private.private_numbers().private_value.to_bytes(KEY_BYTES)


def new_seed() -> bytes:
    return secrets.token_bytes(SEED_BYTES)


def public_key(private: bytes) -> bytes:
    """The public key of a private key."""
    return _private(private).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def check_public_key(public: bytes) -> bytes:
    """The key; a ValueError if it is not one."""
    ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    return public


def agree(private: bytes, public: bytes) -> bytes:
    """The secret of two clients, which either has from its private and the other's public key."""
    other = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    return generate_shared_key(_private(private), other)


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(key), CURVE)


def split_secret(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """This number of shares, of which any `threshold` give the secret, and fewer tell nothing about it."""
    return create_shares(secret, threshold, number)


def join_shares(shares: Sequence[bytes]) -> bytes:
    """The secret; a ValueError if the shares do not fit together."""
    return combine_shares(list(shares))


SEALED_BYTES = 185  # of `seal` below


def share_bytes(secret: int) -> int:
    """The length of a share: its place, and the secret padded to blocks of 16 bytes."""
    return 4 + (secret // 16 + 1) * 16


def seal(secret: bytes, sender: int, receiver: int, shares: tuple[bytes, bytes]) -> bytes:
    """A client's shares for another one, encrypted and authenticated with the secret of the two."""
    return base64.urlsafe_b64decode(encrypt(secret, share_keys_plaintext_concat(sender, receiver, *shares)))


def unseal(secret: bytes, sender: int, receiver: int, sealed: bytes) -> tuple[bytes, bytes]:
    """The inverse of `seal`; an error if the shares are not from this sender to this receiver."""
    content = decrypt(secret, base64.urlsafe_b64encode(sealed))
    found_sender, found_receiver, *shares = share_keys_plaintext_separate(content)
    if (found_sender, found_receiver) != (sender, receiver):
        raise ValueError("the shares are for another client")
    return shares[0], shares[1]


# Masks.


def add_stream(total: Vector, key: bytes, *, plus: bool = True) -> None:
    """Adds PRG(key) in place, or subtracts it: AES in counter mode, from zero because a key is used once."""
    cipher, zeros = (
        Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor(),
        memoryview(bytes(4 * BLOCK)),
    )
    for start in range(0, len(total), BLOCK):
        part = total[start : start + BLOCK]
        stream = np.frombuffer(cipher.update(zeros[: part.nbytes]), "<u4")
        (np.add if plus else np.subtract)(part, stream, out=part)


def pair_key(private: bytes, public: bytes) -> bytes:
    """s_ij."""
    return base64.urlsafe_b64decode(agree(private, public))


def mask(vector: Vector, me: int, seed: bytes, private: bytes, publics: Mapping[int, bytes]) -> Vector:
    """y_i: the vector with the client's own mask, and those that it shares with the others."""
    total = vector.copy()
    add_stream(total, seed)
    for j, public in publics.items():
        if j != me:
            add_stream(total, pair_key(private, public), plus=me < j)
    return total


def unmask(
    total: Vector, seeds: Mapping[int, bytes], dropped: Mapping[int, bytes], publics: Mapping[int, bytes]
) -> Vector:
    """Σ x_i from Σ y_i over the clients in `seeds`, with the mask keys of the clients that dropped out."""
    total = total.copy()
    for i, seed in seeds.items():
        add_stream(total, seed, plus=False)
        for j, private in dropped.items():
            add_stream(total, pair_key(private, publics[i]), plus=i > j)
    return total


# Bytes as rows of a tensor.


def to_rows(values: Sequence[bytes]) -> Tensor:
    """Values of equal length as a tensor [n, bytes]."""
    flat = np.frombuffer(b"".join(values), np.uint8).reshape(len(values), -1 if values else 0)
    return torch.from_numpy(flat.copy())


def from_rows(rows: Tensor, number: int, length: int = 0) -> list[bytes]:
    """The inverse of `to_rows`; a ValueError if the rows have another number or length."""
    if rows.dtype != torch.uint8 or rows.ndim != 2 or len(rows) != number or length not in (0, rows.shape[1]):
        raise ValueError("other bytes than expected")
    return [row.tobytes() for row in rows.numpy()]
