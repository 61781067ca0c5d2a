"""Scripts and YAML of verl itself, of any generation: the keys of today, and what is different."""

from collections.abc import Mapping
from typing import Any

from verl.config.base import BaseConfig
from verl.config.command import Override
from verl.config.legacy import meaning_of
from verl.config.schema import FILE_ROOTS, Values, family, flattened
from verl.migrate.plan import Migration, written
from verl.migrate.reading import Found, plain

MODULES = {
    "main_ppo": ("verl.trainer.main_ppo", "ppo_trainer"),
    "main_dapo": ("recipe.dapo.main_dapo", "dapo_trainer"),
    "fsdp_sft_trainer": ("verl.trainer.fsdp_sft_trainer", "sft_trainer"),
    "sft_trainer": ("verl.trainer.sft_trainer", "sft_trainer_engine"),
    "sft_trainer_ray": ("verl.trainer.sft_trainer_ray", "sft_trainer_engine"),
    "main_generation": ("verl.trainer.main_generation", "generation"),
    "main_generation_server": ("verl.trainer.main_generation_server", "ppo_trainer"),
    "main_eval": ("verl.trainer.main_eval", "evaluation"),
}
"""By the last part of a module's name: the command here, and the file it starts from."""

OWN_FILES = {
    "one_step_off_policy": "one_step_off_ppo_trainer",
    "fully_async_policy": "fully_async_ppo_trainer",
    "transfer_queue": "transfer_queue_ppo_trainer",
}
"""By the folder of a module, where it is not the name of a recipe: the file it starts from."""

TAKES_FLAGS = ("verl.model_merger",)
"""Commands without options of a run; their flags are the same here."""

PPO_SECTIONS = {"actor_rollout_ref", "algorithm", "critic"}
OTHER_MEANINGS = {
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": (
        "since 0.8 `left` keeps the end of a tool's reply, before it kept the beginning; here it "
        "keeps the end"
    ),
}


def migrate(found: Found, num_gpus: int) -> Migration:
    """The same run under today's keys."""
    if found.module in TAKES_FLAGS:
        return Migration(f"verl ({found.module})", found.module, flags=found.arguments)
    is_sft = "model" in found.settings and not PPO_SECTIONS & found.settings.keys()
    name = found.module.rpartition(".")[2] or ("fsdp_sft_trainer" if is_sft else "main_ppo")
    folder = found.module.rpartition(".")[0].rpartition(".")[2]
    own_file = OWN_FILES.get(folder, f"{folder}_trainer")
    is_own = own_file in FILE_ROOTS and found.module.startswith(("recipe.", "verl."))
    module, config_name = MODULES.get(name, MODULES["main_ppo"])
    if is_own:
        module, config_name = found.module, own_file
    migration = Migration(f"verl ({found.module or 'YAML'})", module)
    if found.module and name not in MODULES and not is_own:
        text = "a program of its own; verl.trainer.main_ppo is what its options are read as"
        migration.changes.append((found.module, text))
    values: Values = {}
    for word in found.arguments:
        if word.startswith("--config-name"):
            config_name = word.partition("=")[2].removesuffix(".yaml") or config_name
            migration.flags.append(word)
        elif word.startswith("-") and not word.startswith("--"):
            continue
        elif word.startswith("--"):
            migration.flags.append(word)
        else:
            override = Override.parse(word)
            values[tuple(override.key.split("."))] = plain(override.value or "")
    tree = {key: one for key, one in found.settings.items() if key not in ("hydra", "defaults")}
    values |= flattened(tree)
    root = FILE_ROOTS.get(config_name, FILE_ROOTS["ppo_trainer"])
    modernise_into(migration, values, root)
    return migration


def modernise_into(migration: Migration, values: Values, root: type[BaseConfig]) -> None:
    forms = family(root)
    variant = forms.chosen_by(values, otherwise=forms.variants[0])
    settings = variant.defaults | values
    for path, value in values.items():
        key = ".".join(path)
        meaning = meaning_of(key, value, settings, (variant.keys, forms.keys))
        if meaning is None and key in forms.keys and key not in OTHER_MEANINGS:
            migration.values[key] = value
        elif meaning is None and key in forms.keys:
            migration.set(key, {key: value}, OTHER_MEANINGS[key])
        elif meaning is None:
            close = forms.keys.closest(key)
            hint = f"did you mean {close[0]}?" if close else "a key of the program's own"
            migration.missing.append((key, f"unknown option; {hint}"))
        elif meaning.is_refused:
            migration.missing.append((key, f"{written(value)} is refused: {meaning.why}"))
        elif not meaning.values:
            migration.changes.append((key, f"has no effect: {meaning.why}"))
        else:
            is_rename = list(meaning.values.values()) == [value]
            note = "" if is_rename else meaning.why or "its value has another form"
            migration.set(key, meaning.values, note)


def as_values(settings: Mapping[str, Any]) -> Values:
    return {tuple(key.split(".")): value for key, value in settings.items()}
