"""What the trainer hands to the process that writes: one file in memory for each message.

    length of the text (8 bytes)    text    arrays, one behind the other

The text is JSON: the content, and of each array its name, type and number of entries. A file in
memory is handed over whole, as a descriptor: the receiver need not read it for the sender to go on,
and the kernel frees it when neither end holds it any more, however they ended.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

LENGTH_BYTES = 8


def write_message(content: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    """The descriptor of a new file in memory that holds both."""
    layout = [[name, values.dtype.str, values.size] for name, values in arrays.items()]
    text = json.dumps({"content": content, "arrays": layout}, ensure_ascii=False)
    octets = text.encode("utf-8", "replace")  # half a surrogate pair is no text for a database
    descriptor = os.memfd_create("verl-board")
    try:
        parts = [memoryview(len(octets).to_bytes(LENGTH_BYTES, "big")), memoryview(octets)]
        parts += [np.ascontiguousarray(values).data for values in arrays.values()]
        for part in parts:
            rest = part.cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_message(descriptor: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `write_message` was given; closes the file."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        octets = file.read()
    start = LENGTH_BYTES + int.from_bytes(octets[:LENGTH_BYTES], "big")
    text = json.loads(octets[LENGTH_BYTES:start])
    arrays: dict[str, np.ndarray] = {}
    for name, kind, size in text["arrays"]:
        arrays[name] = np.frombuffer(octets, np.dtype(kind), size, start)
        start += arrays[name].nbytes
    return text["content"], arrays
