"""The memory that a message needs, before Flower puts it together.

An array can list the same chunk any number of times, and numbers and texts become Python objects. So a small
message can need a lot of memory.
"""

import json
from collections.abc import Mapping

from flwr.app import Array
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)

GROWTH = 40  # bytes of memory for each byte of a message's objects other than parts of arrays


def inflated_size(parts: Mapping[str, bytes]) -> int:
    """About the bytes that a message needs at most, from the content of its objects.

    Raises if they are malformed.
    """
    heads = {name: get_object_head_values_from_object_content(content)[:2] for name, content in parts.items()}
    size = 0
    for name, (kind, chunks) in heads.items():
        size += 0 if kind == ArrayChunk.__qualname__ else GROWTH * len(parts[name])
        if kind != Array.__qualname__:
            continue
        if any(heads[chunk][0] != ArrayChunk.__qualname__ for chunk in chunks):
            raise TypeError("an array in an array")
        listed = json.loads(get_object_body(parts[name], Array))["arraychunk_ids"]
        size += sum(len(parts[chunks[i]]) for i in listed)
    return size
