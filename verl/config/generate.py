"""Write the YAML files and the reference page from the dataclasses, or check that they are current.

python -m verl.config.generate            writes what changed
python -m verl.config.generate --check    fails when a file differs from what would be written
"""

import argparse
import sys
from functools import cache
from pathlib import Path

from verl.config.reference import rendered_page
from verl.config.yaml_files import COMMAND, HEADER, rendered_files

REPOSITORY = Path(__file__).resolve().parents[2]
YAML_FOLDER = Path("verl/trainer/config")
PAGE = Path("docs/config.md")


@cache
def wanted_files() -> dict[Path, str]:
    """Every generated file with its text, by its path in the repository."""
    files = {YAML_FOLDER / name: text for name, text in rendered_files().items()}
    return files | {PAGE: rendered_page()}


def stale_files(repository: Path) -> list[Path]:
    """Files that are missing, that differ, or that were generated once and are not any more."""
    wanted = wanted_files()
    stale = [path for path, text in wanted.items() if current_text(repository / path) != text]
    for path in sorted((repository / YAML_FOLDER).rglob("*.yaml")):
        inside = path.relative_to(repository)
        if inside not in wanted and path.read_text().startswith(HEADER):
            stale.append(inside)
    return stale


def current_text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def write_files(repository: Path) -> list[Path]:
    """Bring every generated file up to date; returns those that changed."""
    stale, wanted = stale_files(repository), wanted_files()
    for path in stale:
        if path in wanted:
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            (repository / path).write_text(wanted[path])
        else:
            (repository / path).unlink()
    return stale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when stale")
    if not parser.parse_args(arguments).check:
        for path in write_files(REPOSITORY):
            sys.stdout.write(f"wrote {path}\n")
        return 0
    stale = stale_files(REPOSITORY)
    for path in stale:
        sys.stdout.write(f"{path} is not what the dataclasses say; run {COMMAND}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
