"""What the site needs beyond mkdocs: links that leave `docs/`, and formulas.

A link to a file outside names the file, since the site has no sources; a picture outside becomes a
file of the site. Formulas become MathML, which browsers draw without a script, also offline.
"""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"(!?)\[([^\]]+)\]\(((?:\.\./)+)((?!docs/)[^)#\s]+)(?:#[^)]*)?\)")
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files outside `docs/`."""
    depth = page.file.src_uri.count("/")

    def replaced(found: re.Match[str]) -> str:
        is_picture, text, ups, path = found.groups()
        if ups.count("../") <= depth:
            return found[0]
        if not is_picture:
            return f"{text} (`{path}`)"
        uri = f"outside/{path}"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        return f"![{text}]({'../' * depth}{uri})"

    return OUTSIDE.sub(replaced, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Turn the formulas that `pymdownx.arithmatex` marks into MathML."""
    content = INLINE.sub(lambda found: convert(html.unescape(found[1])), content)
    content = DISPLAYED.sub(displayed, content)
    assert 'class="arithmatex"' not in content, f"a formula of {page.file.src_uri} is not converted"
    return content


def displayed(found: re.Match[str]) -> str:
    formula = convert(html.unescape(found[1]).strip(), display="block")
    return f'<div style="overflow-x: auto">{formula}</div>'  # a long one scrolls on a narrow screen
