"""`python -m verl.migrate SCRIPT_OR_YAML_OR_PAGE [--gpus N]`; `--page` prints docs/migration.md."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from verl.config.faults import ConfigError
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.schema import nested
from verl.config.validate import validate
from verl.migrate import older, openrlhf, trl
from verl.migrate.page import page
from verl.migrate.plan import Expression, Migration, written
from verl.migrate.reading import Found, Unreadable, read

MISTAKE = 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.migrate", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a shell script, Python file or YAML")
    parser.add_argument("--gpus", type=int, default=1, help="devices of a machine (TRL: processes)")
    parser.add_argument("--page", action="store_true", help="print the table of all keys")
    options = parser.parse_args(arguments)
    if options.page:
        sys.stdout.write(page())
        return 0
    if options.file is None or not options.file.is_file():
        named = f"{options.file} is not a file" if options.file else "no file is named"
        sys.stderr.write(f"error: {named}; name a shell script, a Python file or a YAML file\n")
        return MISTAKE
    try:
        runs = read(options.file)
    except Unreadable as error:
        sys.stderr.write(f"error: {error}\n")
        return MISTAKE
    for number, (place, found) in enumerate(runs.items()):
        if len(runs) > 1:
            sys.stdout.write(f"{chr(10) if number else ''}# ---- {place}\n")
        sys.stdout.writelines(f"{line}\n" for line in report(migrate(found, options.gpus)))
    return 0


def migrate(found: Found, num_gpus: int) -> Migration:
    if found.program == "verl":
        return older.migrate(found, num_gpus)
    program = trl if found.program == "trl" else openrlhf
    return program.migrate(found.settings, num_gpus)


def report(migration: Migration) -> Iterator[str]:
    """The command, then what became of each setting."""
    yield f"# From {migration.origin}:"
    words = [f"{key}={written(value)}" for key, value in migration.values.items()]
    lines = [f"python -m {migration.module}", *migration.flags, *map(quoted, words)]
    yield " \\\n    ".join(lines)
    for title, entries in (
        ("maps", migration.maps),
        ("changes its meaning", migration.changes),
        ("has no equivalent", migration.missing),
        ("our check says", [("", text) for text in mistakes(migration)]),
    ):
        if entries:
            yield f"\n# {title}:"
            yield from (f"#   {name:<40} {text}".rstrip() for name, text in entries)


def quoted(word: str) -> str:
    """For a shell: variables stay, and everything else is what it is."""
    return f'"{word}"' if "$" in word and '"' not in word else shlex.quote(word)


def mistakes(migration: Migration) -> Iterator[str]:
    """What the command would be refused for, whatever machine it runs on."""
    if migration.module != "verl.trainer.main_ppo":
        return
    known = {
        key: one
        for key, one in migration.values.items()
        if not isinstance(one, Expression) and "$" not in str(one)
    }
    try:
        loaded = load_config(
            nested(older.as_values(known)), PPOConfig, overrides=[f"++{key}=" for key in known]
        )
    except ConfigError as error:
        yield str(error)
        return
    faults = validate(loaded.config, loaded.user_set, known_faults=loaded.faults)
    yield from (fault.text for fault in faults if not fault.is_about_machine)


if __name__ == "__main__":
    sys.exit(main())
