"""Changes of packets and files. A seeded generator decides everything, so a change can be repeated."""

import json
import random
from contextlib import suppress
from typing import Any

from fedseal.system.checksums import add_checksum

NUMBERS = (0, 1, -1, 3, 100, 4096, 2**31, 2**53, 2**63, 10**30, -0.5, 1e300, float("nan"), float("inf"))
VALUES = (*NUMBERS, "", "x", "../x", "model", True, False, None, [], [[]], {}, {"x": 1}, ["x"] * 3)
# The types that a safetensors file may name, with their bytes; "X" is none.
TYPES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F4": 1, "X": 1}
TYPES |= {"I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4}
TYPES |= {"I64": 8, "U64": 8, "F64": 8, "C64": 8}


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes of which some are flipped, missing, repeated or new."""
    kind = rng.choice(("flip", "flip", "cut", "insert", "repeat", "length"))
    place = rng.randrange(len(data) + 1)
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 8))):
            changed[rng.randrange(min(len(data), rng.choice((400, len(data)))))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == "cut":
        return data[:place]
    if kind == "length":
        length = rng.choice((0, 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1, len(data)))
        return length.to_bytes(8, "little") + data[8:]
    new = rng.randbytes(8) if kind == "insert" else data[place : place + 1000]
    return data[:place] + new + data[place:]


def change_json(value: Any, rng: random.Random) -> Any:
    """A JSON value with another value somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key, changed = rng.choice(sorted(value)), dict(value)
        what = rng.random()
        if what < 0.1:
            del changed[key]
        elif what < 0.2:
            changed[rng.choice(("x", "", "x/y", "model/x", "é", "a" * 5000))] = changed.pop(key)
        else:
            changed[key] = change_json(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], change_json(value[place], rng), *value[place + 1 :]]
    return rng.choice(VALUES)


def to_json(value: Any, rng: random.Random) -> str:
    """JSON text; at times with a key that comes twice, or with thousands of brackets."""
    text, what = json.dumps(value), rng.random()
    if what < 0.05:
        return text.replace("{", '{"t": 3, "t": 4, ', 1)
    if what < 0.08:
        return text[:-1] + ', "deep": ' + "[" * 5000 + "]" * 5000 + "}"
    return text


def change_file(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with changed bytes, or with a header that says something else."""
    if rng.random() < 1 / 3:
        return change_bytes(data, rng)
    end = 8 + int.from_bytes(data[:8], "little")
    header: Any = json.loads(data[8:end])
    tensors, about = data[end:], header.pop("__metadata__", {})
    about.pop("sha256", None)  # otherwise nothing else would be looked at
    kinds = ("metadata", "any", "new", "many", *(3 * ("tensor",) if header else ()))  # some have no tensor
    kind = rng.choice(kinds)
    if kind == "metadata":
        key = rng.choice(sorted(about))
        about[key] = to_json(change_json(json.loads(about[key]), rng), rng)
    elif kind == "any":
        header = change_json(header, rng)
    elif kind == "new":
        name = rng.choice(("model/x", "extra/x", "thresholds/x", "images/x", "hashes/images", "x"))
        type_ = rng.choice(sorted(TYPES))
        size = 4 * TYPES[type_]
        header[name] = {"dtype": type_, "shape": [4], "data_offsets": [len(tensors), len(tensors) + size]}
        if "packet" in about:  # a packet names its groups
            packet = json.loads(about["packet"])
            packet["groups"].append(name.partition("/")[0])
            about["packet"] = json.dumps(packet)
        tensors += rng.choice((b"\0", b"\xff")) * size
    elif kind == "many":
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [len(tensors)] * 2}
        header |= {f"model/{i}": empty for i in range(3000)}
    else:
        tensors = _change_tensor(header, tensors, rng)
    if isinstance(header, dict) and rng.random() < 0.97:
        header["__metadata__"] = about
    text = to_json(header, rng).encode()
    text += b" " * (-len(text) % 8)
    changed = len(text).to_bytes(8, "little") + text + tensors
    if rng.random() < 0.3:
        with suppress(ValueError, RecursionError, TypeError):  # a header that can have no checksum
            return add_checksum(changed)
    return changed


def _change_tensor(header: dict[str, Any], tensors: bytes, rng: random.Random) -> bytes:
    """Changes what the header says of a tensor, or the tensor; returns all tensors."""
    name = rng.choice(sorted(header))
    entry = header[name]
    shape, (start, stop) = entry["shape"], entry["data_offsets"]
    kind = rng.choice(("type", "type that fits", "shape", "offsets", "name", "values", "values"))
    if kind.startswith("type"):
        entry["dtype"] = rng.choice(sorted(TYPES))
        if "fits" in kind:
            entry["shape"] = [(stop - start) // TYPES[entry["dtype"]]]
    elif kind == "shape":
        entry["shape"] = rng.choice(([], [0], [2**40, 0], [1] * 70, [*shape, 1], shape[::-1], [-1], "x"))
    elif kind == "offsets":
        entry["data_offsets"] = rng.choice(([0, 0], [0, 2**62], [8, 4], [-8, 8], [], "x", [0, len(tensors)]))
    elif kind == "name":
        new = rng.choice(("x", "", "/", "model/x", "x/y/z", "images/x", "state.model/x", "\0"))
        header[new] = header.pop(name)
    else:  # NaN, infinity, the largest number, 0, and all bits; once or everywhere
        new = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\0" * 4, b"\xff" * 4))
        first = start + 4 * rng.randrange(max(1, (stop - start) // 4))
        filled = (new * rng.choice((1, len(tensors))))[: stop - first]
        return tensors[:first] + filled + tensors[first + len(filled) :]
    return tensors
