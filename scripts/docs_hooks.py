"""What the site needs beyond mkdocs: links that leave `docs/` name the file instead."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?!docs/)[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """On the site there are no sources to link to."""
    depth = page.file.src_uri.count("/")

    def named(found: re.Match[str]) -> str:
        ups = found[0].count("../")
        return f"{found[1]} (`{found[2]}`)" if ups > depth else found[0]

    return OUTSIDE.sub(named, markdown)
