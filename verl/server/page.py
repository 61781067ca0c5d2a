"""The chat page, and what a browser lets it do.

The page is one file that carries its style and its script. The policy that is sent with it allows
these two, known by their hashes, and nothing else: what somebody smuggles into the page does not
run, and nothing is loaded from or sent to elsewhere.
"""

import base64
import hashlib
import re
from importlib.resources import files


def page_text() -> str:
    return (files("verl.server") / "page.html").read_text(encoding="utf-8")


def page_policy(text: str) -> str:
    """The Content-Security-Policy of the page."""
    return (
        f"default-src 'none'; style-src {hashes(text, 'style')}; "
        f"script-src {hashes(text, 'script')}; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )


def hashes(text: str, tag: str) -> str:
    """Of what stands between the tags, as browsers compute them."""
    bodies = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(body.encode()).digest()) for body in bodies]
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
