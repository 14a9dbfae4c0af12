"""Checksums of safetensors files, so that a damaged one is noticed.

The checksum is in the file's header, under "sha256", and covers the header's content and all tensors. Other
programs read such a file like any other. A file without a checksum, such as an older one, passes.
"""

import hashlib
import json
from typing import Any


class ChecksumError(ValueError):
    """The content of a file is not what was written."""


def add_checksum(data: bytes) -> bytes:
    """The same safetensors file with a checksum in its header."""
    header, tensors = _split(data)
    about = header.setdefault("__metadata__", {})
    about["sha256"] = _digest(header, tensors)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors stay aligned
    return b"".join((len(text).to_bytes(8, "little"), text, tensors))


def verify_checksum(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file. Raises if the file has a checksum that does not match."""
    header, tensors = _split(data)
    about: dict[str, str] = header.get("__metadata__", {})
    expected = about.pop("sha256", None)
    if expected is not None and expected != _digest(header, tensors):
        raise ChecksumError("the checksum does not match")
    return about


def _split(data: bytes) -> tuple[dict[str, Any], memoryview]:
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise ValueError("the header is not that of a safetensors file")
    return header, memoryview(data)[end:]


def _digest(header: dict[str, Any], tensors: memoryview) -> str:
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    found.update(tensors)
    return found.hexdigest()
