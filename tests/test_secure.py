"""The numbers, shares and masks of secure aggregation, with values derived by hand."""

import itertools
from contextlib import suppress

import numpy as np
import pytest
import torch
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

pytest.importorskip("flwr")

from fedseal import secure
from fedseal.secure import FixedPoint


def test_levels_are_the_nearest_ones() -> None:
    """With clip 1 and four clients there are 2³⁰ / 4 = 2²⁸ levels above zero, 2⁻²⁸ apart.

    0.5 is level 2²⁷, and −1 is −2²⁸ modulo 2³². 7 is clipped to 1. 0.4 steps are 0, and 0.6 steps are 1.
    """
    scale = FixedPoint(clip=1.0, clients=4)
    assert scale.step == 2**-28
    values = np.array([0.5, -1.0, 7.0, 0.4 * 2**-28, 0.6 * 2**-28])
    assert scale.encode(values).tolist() == [2**27, 2**32 - 2**28, 2**28, 0, 1]
    drawn = np.random.default_rng(0).uniform(-1, 1, 10_000)
    assert np.abs(scale.decode(scale.encode(drawn)) - drawn).max() <= scale.step / 2


@pytest.mark.parametrize("clients", [2, 3, 7, 1000])
def test_a_sum_of_extremes_does_not_overflow(clients: int) -> None:
    scale = FixedPoint(16.0, clients)
    top = scale.encode(np.array([16.0, -16.0, 99.0])) * np.uint32(clients)
    assert scale.decode(top) == pytest.approx([16.0 * clients, -16.0 * clients, 16.0 * clients])
    with pytest.raises(ValueError, match="out of range"):
        scale.decode(np.array([0, 2**30 + 1], np.uint32))
    with pytest.raises(ValueError, match="out of range"):
        scale.decode(np.array([2**31], np.uint32))  # the most negative one


def test_counts_are_limbs_that_can_be_added() -> None:
    """70,000 = 1 · 65,536 + 4,464, and 2³³ = 2 · 2³². The sum with itself is 140,000 and 2³⁴."""
    limbs = secure.encode_counts([70_000, 2**33])
    assert limbs.tolist() == [4464, 1, 0, 0, 0, 2] + [0] * 60
    assert secure.decode_counts(limbs + limbs) == [140_000, 2**34] + [0] * 20
    full = secure.encode_counts([2**48 - 1])
    assert secure.decode_counts(full * np.uint32(2**16))[0] == (2**48 - 1) * 2**16
    for wrong in ([-1], [2**48], [0] * 23):
        with pytest.raises(ValueError, match="counts"):
            secure.encode_counts(wrong)


def test_an_update_covers_floats_and_keeps_the_rest_as_it_was_sent() -> None:
    sent = {
        "w": torch.tensor([[1.0, 2.0]]),
        "bn.running_var": torch.tensor([0.0]),
        "bn.num_batches_tracked": torch.tensor(3),
        "mean": torch.tensor([5.0]),
    }
    trained = {
        "w": torch.tensor([[1.5, 1.0]]),
        "bn.running_var": torch.tensor([0.25]),
        "bn.num_batches_tracked": torch.tensor(9),
        "mean": torch.tensor([6.0]),
    }
    assert secure.update_of(trained, sent).tolist() == [0.25, 0.5, -1.0]  # by name
    model = secure.apply_update(sent, np.array([-1e-9, 0.5, -1.0]))
    assert {name: value.tolist() for name, value in model.items()} == {
        "w": [[1.5, 1.0]],
        "bn.running_var": [0.0],  # rounding must not make it negative
        "bn.num_batches_tracked": 3,
        "mean": [5.0],
    }
    assert sent["w"].tolist() == [[1.0, 2.0]]


def test_the_key_stream_is_aes_in_counter_mode() -> None:
    """AES-128 of a block of zeros with a key of zeros is 66e94bd4 ef8a2c3b 884cfa59 ca342b2e (FIPS 197)."""
    words = np.zeros(secure.BLOCK + 4, np.uint32)
    secure.add_stream(words, bytes(16))
    assert words[:4].astype("<u4").tobytes().hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"
    cipher = Cipher(algorithms.AES(bytes(16)), modes.CTR((secure.BLOCK // 4).to_bytes(16))).encryptor()
    assert words[-4:].astype("<u4").tobytes() == cipher.update(bytes(16))  # the counter goes on
    secure.add_stream(words, bytes(16), plus=False)
    assert not words.any()


def test_any_threshold_of_shares_gives_the_secret_and_fewer_do_not() -> None:
    secret = secure.new_seed()
    shares = secure.split_secret(secret, 3, 5)
    for chosen in itertools.combinations(shares, 3):
        assert secure.join_shares(chosen) == secret
    for few in itertools.combinations(shares, 2):
        with suppress(ValueError):  # its padding is wrong, but for one of 256 by chance
            assert secure.join_shares(few) != secret


def test_both_clients_have_the_same_secret_and_no_other_client() -> None:
    one, two, three = (secure.new_key() for _ in range(3))
    secret = secure.agree(one, secure.public_key(two))
    assert secret == secure.agree(two, secure.public_key(one)) != secure.agree(three, secure.public_key(one))
    shares = secure.split_secret(secure.new_seed(), 2, 2)[0], secure.split_secret(one, 2, 2)[0]
    assert [len(part) for part in shares] == [secure.share_bytes(16), secure.share_bytes(48)] == [36, 68]
    sealed = secure.seal(secret, 4, 7, shares)
    assert len(sealed) == secure.SEALED_BYTES and shares[0] not in sealed
    assert secure.unseal(secret, 4, 7, sealed) == shares
    with pytest.raises(ValueError, match="another client"):
        secure.unseal(secret, 7, 4, sealed)
    with pytest.raises(InvalidToken):
        secure.unseal(secret, 4, 7, sealed[:-1] + bytes([sealed[-1] ^ 1]))
    with pytest.raises(ValueError):
        secure.check_public_key(bytes(49))


@pytest.mark.parametrize("missing", [set(), {1}, {0, 3}])
def test_the_sum_of_masked_vectors_is_the_sum(missing: set[int]) -> None:
    """Five clients mask for each other, and the uploads of `missing` never arrive."""
    vectors = {k: np.array([k, 10 * k, -k % 2**32], np.uint32) for k in range(5)}
    seeds, keys = ({k: make() for k in vectors} for make in (secure.new_seed, secure.new_key))
    publics = {k: secure.public_key(key) for k, key in keys.items()}
    there = sorted(vectors.keys() - missing)
    masked = {k: secure.mask(vectors[k], k, seeds[k], keys[k], publics) for k in there}
    total = sum(masked.values(), np.zeros(3, np.uint32))
    found = secure.unmask(total, {k: seeds[k] for k in there}, {k: keys[k] for k in missing}, publics)
    s = sum(there)
    assert found.tolist() == [s, 10 * s, 2**32 - s]
    if missing:  # without the keys of those that are missing, the sum stays hidden
        assert secure.unmask(total, {k: seeds[k] for k in there}, {}, publics).tolist() != found.tolist()


def test_bytes_travel_as_rows() -> None:
    values = [b"\x00\xff", b"ab"]
    rows = secure.to_rows(values)
    assert rows.tolist() == [[0, 255], [97, 98]]
    assert secure.from_rows(rows, 2) == secure.from_rows(rows, 2, 2) == values
    assert secure.from_rows(secure.to_rows([]), 0) == []
    for wrong, number, length in ((rows, 3, 0), (rows, 2, 1), (rows.int(), 2, 0), (rows[0], 2, 0)):
        with pytest.raises(ValueError, match="other bytes"):
            secure.from_rows(wrong, number, length)
