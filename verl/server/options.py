"""What a server is told at its start: where it listens, who may ask, and how much of it.

Every limit here is a number that one client could otherwise choose freely. The limits on single
fields of a request are part of the published schema (`schemas`).
"""

import ipaddress
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server behaves."""

    model: str
    """Name under which the model is served."""

    max_model_len: int
    """Longest prompt plus response, in tokens."""

    vocabulary: int | None = None
    """Number of token ids that the model knows; None takes those that the tokenizer has."""

    tool_call_parser: str = "hermes"
    """How the model writes tool calls: a name of `docs/tool_formats.md` or of a registered parser.
    """

    host: str = "127.0.0.1"
    """Address to listen on; the default is reachable from this machine only."""

    port: int = 0
    """Port to listen on; 0 takes a free one."""

    token: str | None = field(default=None, repr=False)
    """What clients must show (`Authorization: Bearer ...`); None makes one."""

    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may call the server, beside its address and `localhost`."""

    max_body_bytes: int = 8 << 20
    """Longest body, sent whole or in chunks; compressed ones are refused."""

    max_images: int = 16
    """Most images of a conversation."""

    allowed_local_media_path: str | None = None
    """Folder below which clients may name image files; None allows `data:` URLs only."""

    max_running: int = 256
    """Most requests that the engines work on at once."""

    max_waiting: int = 256
    """Most requests that wait for their turn; one more is refused with status 429."""

    max_connections: int = 2048
    """Most open connections."""

    receipt_seconds: float = 8.0
    """Time to receive a whole request, from its first byte (or the connection) to its last."""

    request_seconds: float = 600.0
    """Most time for one answer, its delivery included."""

    keep_alive_seconds: float = 5.0
    """Time until an idle connection is closed."""

    max_restarts: int = 3
    """Times in a row that a lost engine is started again."""

    def __post_init__(self) -> None:
        if self.token is not None and not is_token(self.token):
            raise ValueError(
                "the server's token must have 16 or more visible ASCII characters; leave it out to "
                "have one made"
            )
        for name in ("max_model_len", "max_running", "max_connections"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name} is {vars(self)[name]}; it must be 1 or more")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name; where it leads is not ours to guess
            return False

    @property
    def known_hosts(self) -> frozenset[str]:
        """What a `Host` header may name, in small letters and without the port."""
        own = {self.host.lower(), *(host.lower() for host in self.allowed_hosts)}
        if ":" in self.host:
            own.add(f"[{self.host.lower()}]")
        return frozenset(own | {"localhost", "127.0.0.1", "[::1]"})


def is_token(text: str) -> bool:
    """Whether a text can be a token: it must survive in a header and be hard to guess."""
    return len(text) >= 16 and all("!" <= letter <= "~" for letter in text)
