"""What can be said of the page without a browser."""

import base64
import hashlib
import re

from verl.server.app import page_text
from verl.utils.json_server import page_policy

PAGE = page_text()


def hash_of(tag: str) -> str:
    return base64.b64encode(hashlib.sha256(body_of(tag).encode()).digest()).decode()


def body_of(tag: str) -> str:
    return PAGE.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]


def test_the_policy_allows_the_style_and_the_script_of_the_page_and_no_others():
    assert PAGE.count("<script") == PAGE.count("<style") == 1
    rules = dict(rule.split(" ", 1) for rule in page_policy(PAGE).split("; "))
    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{hash_of('style')}'",
        "script-src": f"'sha256-{hash_of('script')}'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_a_changed_script_has_another_policy():
    changed = PAGE.replace("<script>", "<script>0;")
    assert page_policy(changed) != page_policy(PAGE)


def test_the_page_needs_nothing_from_elsewhere():
    assert not re.findall(r"https?://|//cdn|@import|url\(", PAGE)
    assert not re.findall(r"<(?:link|img|iframe|object|embed)\b", PAGE)


def test_text_never_becomes_markup():
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)
    assert not re.findall(r"\son[a-z]+=", PAGE)
