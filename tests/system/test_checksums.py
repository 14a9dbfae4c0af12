"""A changed byte in a safetensors file is noticed, or changes nothing."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedseal.system.checksums import ChecksumError, add_checksum, verify_checksum

TENSORS = {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.uint8)}
PLAIN = save(TENSORS, {"about": json.dumps({"size": 28})})


def test_other_programs_read_the_file() -> None:
    found = load(add_checksum(PLAIN))
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[k], TENSORS[k]) for k in TENSORS)
    assert verify_checksum(add_checksum(PLAIN)) == {"about": '{"size": 28}'}
    assert len(add_checksum(PLAIN)) % 8 == len(PLAIN) % 8


def test_a_file_without_a_checksum_passes() -> None:
    assert verify_checksum(PLAIN) == {"about": '{"size": 28}'}
    assert verify_checksum(save(TENSORS)) == {}
    assert verify_checksum(add_checksum(save(TENSORS))) == {}


@pytest.mark.parametrize("change", [0x01, 0x20, 0x80, 0xFF])
def test_every_changed_byte_is_noticed_or_harmless(change: int) -> None:
    whole, noticed = add_checksum(PLAIN), 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= change
        try:
            about = verify_checksum(bytes(data))
            found = load(bytes(data))
        except (ValueError, SafetensorError):
            noticed += 1
            continue
        assert about["about"] == '{"size": 28}'  # as in a changed name of "sha256", or in padding
        assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert noticed > len(whole) - 20


def test_a_changed_tensor_is_a_checksum_error() -> None:
    data = bytearray(add_checksum(PLAIN))
    data[-1] ^= 1
    with pytest.raises(ChecksumError, match="the checksum does not match"):
        verify_checksum(bytes(data))
    with pytest.raises(ChecksumError):
        verify_checksum(add_checksum(PLAIN)[:-1])


@pytest.mark.parametrize(
    "header", [b"[]", b"1", b'"x"', b'{"__metadata__": []}', b'{"__metadata__": "x"}', b"{"]
)
def test_a_header_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError):
        verify_checksum(len(header).to_bytes(8, "little") + header)
