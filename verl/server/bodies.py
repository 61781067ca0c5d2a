"""From the bytes of a body to the request that they must be.

Pydantic reads the JSON itself: it knows no NaN, no halves of characters and no endless nesting.
What it would do slowly is to make Python objects of a million small lists, only to refuse them; so
lists and objects are counted first.
"""

from typing import TypeVar

from pydantic import ValidationError

from verl.server.errors import ApiError, invalid
from verl.server.schemas import SamplingRequest

MAX_CONTAINERS = 1 << 16

Form = TypeVar("Form", bound=SamplingRequest)


def parsed(form: type[Form], body: bytes) -> Form:
    if num_containers(body) > MAX_CONTAINERS:
        message = f"the body has more than {MAX_CONTAINERS} lists and objects"
        raise ApiError(400, message, code="too_many_parts")
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None


def num_containers(body: bytes) -> int:
    """Lists and objects in a JSON text, exactly if there are many; in others texts count too."""
    most = body.count(b"[") + body.count(b"{")
    if most <= MAX_CONTAINERS:
        return most
    # With escaped quotes out of the way, every second piece between quotes is inside a text.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(bare.split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")
