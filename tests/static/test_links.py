"""Every page can be reached from another, and every relative link leads to a file."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    folders = ("docs", "examples", "recipe", "benchmarks")
    return [*ROOT.glob("*.md"), *(page for one in folders for page in (ROOT / one).rglob("*.md"))]


def links(page: Path) -> Iterator[tuple[str, Path]]:
    for target in LINK.findall(page.read_text()):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            yield target, (page.parent / target.partition("#")[0]).resolve()


def test_every_relative_link_leads_to_a_file():
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages()
        for target, path in links(page)
        if not path.exists()
    ]
    assert dead == []


def test_every_page_is_linked_from_another():
    linked = {path for page in pages() for _, path in links(page) if path != page}
    alone = [str(page.relative_to(ROOT)) for page in pages() if page not in linked]
    assert [page for page in alone if page != "README.md"] == []
