"""Every option has an effect, is accepted without one, or is refused: one of the three.

An option that claims an effect must have a reader in the package, so an option that nobody reads
fails here. What is refused ends a run with exit code 2 before a model is loaded.
"""

import re
import sys
from functools import cache

import pytest

from tests.config.readers import reads
from verl.config import packages
from verl.config.effects import OTHER_BACK_END, default_of, key_parts, why_idle, without_effect
from verl.config.engine import McoreEngineConfig
from verl.config.legacy import meaning_of
from verl.config.optimizer import McoreOptimizerConfig
from verl.config.roles import OWN_LOOPS
from verl.config.schema import ROOTS, Keys, family
from verl.config.sft import SFTEngineConfig
from verl.trainer import (
    fsdp_sft_trainer,
    main_eval,
    main_generation,
    main_ppo,
    main_rm,
    sft_trainer,
)
from verl.trainer.sft.launch import OF_ENGINE, OF_MEGATRON, OF_REWARD_MODEL

COMMANDS = (
    "ppo_trainer",
    "ppo_megatron_trainer",
    "sft_trainer",
    "sft_trainer_engine",
    "rm_trainer",
    "generation",
    "evaluation",
)
CHECKED = {"use_remove_padding"}
"""Options without a reader whose value validation insists on, where sequences are shared."""


@cache
def root_of(command):
    return ROOTS[command]()


@cache
def keys_of(command):
    keys = Keys(root_of(command))
    return sorted(keys.leaves | keys.free)


def refusal_of(command, parts):
    """The rule that refuses every value but the default."""
    key = ".".join(part.item.name for part in parts)
    if command in ("sft_trainer_engine", "rm_trainer") and key in OF_ENGINE:
        return key
    if command == "rm_trainer" and key in OF_REWARD_MODEL:
        return key
    rules = [part.rule("absent") for part in parts]
    return next((r for r in rules if r is not None and r.values in (None, (False,))), None)


def is_never_used(parts):
    for part in parts:
        listed = part.rule("reads")
        if listed is not None and part.rest.split(".")[0] not in listed[0]:
            return True
        if any(condition.is_never for condition in part.rule("used_if") or ()):
            return True
    return False


def has_reader(parts):
    *_, last = parts
    owners = reads().get(last.item.name, set())
    parent = parts[-2].item.name if len(parts) > 1 else ""
    classes = {cls.__name__ for cls in type(last.section).__mro__}
    is_listed = "*" in owners and "_" in last.item.name
    return bool(owners & ({parent} | classes)) or is_listed


@cache
def followers(command):
    """Each key with those whose default follows it."""
    found = {}
    for path, value in family(ROOTS[command]).variants[0].defaults.items():
        for dots, name in re.findall(r"\$\{(?:oc\.select:)?(\.*)([\w.]+)", str(value)):
            base = path[: len(path) - len(dots)] if dots else ()
            found.setdefault(".".join((*base, name)), []).append(".".join(path))
    return found


def is_translated(command, key, value):
    """Whether loading turns the key into others: an older spelling, or a count over all ranks."""
    forms = family(ROOTS[command])
    keys = forms.variants[0].keys
    other = "x" if isinstance(value, str) or value is None else 7
    is_size = key.endswith("micro_batch_size") and f"{key}_per_gpu" in keys
    return is_size or meaning_of(key, other, {}, (keys, forms.keys)) is not None


def has_effect(command, key):
    root = root_of(command)
    parts = key_parts(root, key)
    if has_reader(parts) or parts[-1].item.name in CHECKED:
        return True
    if any(OWN_LOOPS in (part.rule("used_if") or ()) for part in parts):
        return True  # agent loops of the user's own read it
    if tuple(key.split(".")) == family(ROOTS[command]).strategy_key or key.endswith(".strategy"):
        return True  # it chooses the schema, or is refused
    if is_translated(command, key, default_of(parts[-1].item)):
        return True
    return any(has_effect(command, one) for one in followers(command).get(key, ()))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_in_one_of_three_states(command):
    root, wrong = root_of(command), []
    for key in keys_of(command):
        parts = key_parts(root, key)
        is_refused, is_idle = refusal_of(command, parts) is not None, is_never_used(parts)
        is_read = not is_refused and not is_idle and has_effect(command, key)
        if not (is_refused or is_idle or is_read):
            wrong.append(f"{key}: nothing reads it, and no rule says so")
        absent, conditions = parts[-1].rule("absent"), parts[-1].rule("used_if") or ()
        if absent and absent.values is None and any(one.is_never for one in conditions):
            wrong.append(f"{key}: it is refused, and it is said to have no effect")
    assert wrong == []


def test_every_key_of_fine_tuning_on_megatron_is_in_one_of_three_states():
    root = SFTEngineConfig(engine=McoreEngineConfig(), optim=McoreOptimizerConfig())
    wrong = []
    for key in sorted(Keys(root).leaves | Keys(root).free):
        parts = key_parts(root, key)
        is_own = key.startswith(("engine.", "optim.")) and not key.endswith(".strategy")
        is_refused = key in OF_MEGATRON or any(part.rule("absent") for part in parts)
        is_idle = is_never_used(parts[1:])  # what the section reads of other back-ends aside
        if is_own and not (is_refused or is_idle or has_reader(parts)):
            wrong.append(key)
    assert wrong == []
    assert why_idle(root, "engine.param_offload") is None
    assert why_idle(root, "engine.use_mbridge")


def test_a_key_that_nobody_reads_is_noticed():
    parts = key_parts(ROOTS["ppo_trainer"](), "trainer.del_local_ckpt_after_load")
    assert not has_reader(parts)
    assert has_reader(key_parts(ROOTS["ppo_trainer"](), "trainer.save_freq"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_condition_can_be_asked_of_the_defaults(command):
    """Predicates meet every root that mounts their section; reasons are sentences' ends."""
    config = ROOTS[command]()
    for key in keys_of(command):
        reason = why_idle(config, key)
        assert reason is None or (reason and not reason.endswith(".")), key


def test_keys_of_another_back_end_are_named():
    siblings = family(ROOTS["ppo_trainer"]).keys
    config = ROOTS["ppo_trainer"]()
    others = sorted(siblings.leaves - Keys(config).leaves)
    assert len(others) > 100
    assert dict(without_effect(config, others)) == dict.fromkeys(others, OTHER_BACK_END)


def wrong_value(part):
    """A value that is not the default, as a command line writes it."""
    default = default_of(part.item)
    choices = [one for one in part.item.metadata.get("choices", ()) if one not in (default, None)]
    if choices:
        return str(choices[0])
    if isinstance(default, bool):
        return str(not default)
    if isinstance(default, int | float):
        return str(type(default)(default + 1)) if default < 1 else "2"
    if isinstance(default, dict):
        return "{a:1}"
    return "x"


@cache
def refused(command):
    root = root_of(command)
    return [
        key for key in keys_of(command) if refusal_of(command, key_parts(root, key)) is not None
    ]


MAINS = {
    "ppo_trainer": main_ppo.main,
    "ppo_megatron_trainer": main_ppo.main,
    "sft_trainer": fsdp_sft_trainer.main,
    "sft_trainer_engine": sft_trainer.main,
    "rm_trainer": main_rm.main,
    "generation": main_generation.main,
    "evaluation": main_eval.main,
}


def exit_code(monkeypatch, command, *arguments):
    if command == "ppo_megatron_trainer":
        arguments = ("--config-name=ppo_megatron_trainer", *arguments)
    monkeypatch.setattr(sys, "argv", [command, *arguments])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as end:
        MAINS[command]()
    return end.value.code


def test_evaluation_refuses_no_key():
    assert not refused("evaluation")


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "evaluation"])
def test_a_run_with_refused_keys_ends_before_a_model_is_loaded(command, monkeypatch, capsys):
    """All together; then those that another one stood for, the switch of their section. The
    command of `ppo_megatron_trainer` is that of `ppo_trainer`: it tries what that has not."""
    tried = refused("ppo_trainer") if command == "ppo_megatron_trainer" else []
    unnamed = [key for key in refused(command) if key not in tried]
    assert unnamed
    while unnamed:
        values = {key: wrong_value(key_parts(root_of(command), key)[-1]) for key in unnamed}
        assert exit_code(monkeypatch, command, *(f"{key}={values[key]}" for key in unnamed)) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        rest = [key for key in unnamed if not re.search(rf"{re.escape(key)}( is |:|\.)", said)]
        assert len(rest) < len(unnamed), f"{rest} are not named in: {said}"
        unnamed = rest


BY_VALUE = [
    "actor_rollout_ref.actor.strategy=veomni",
    "actor_rollout_ref.rollout.name=trtllm",
    "actor_rollout_ref.rollout.quantization=torchao",
    "actor_rollout_ref.actor.peft.peft_type=dora",
    "trainer.v1.sampler.custom_sampler.path=mine.py",
]


@pytest.mark.parametrize("argument", BY_VALUE)
def test_values_that_ask_for_what_does_not_exist_are_refused_in_one_line(
    argument, monkeypatch, capsys
):
    assert exit_code(monkeypatch, "ppo_trainer", argument) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "note:" not in line]
    assert len(errors) == 1, errors


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ("<0.1", r"megatron-core 0\.\d+\.\d+ is installed, not <0\.1; pip install"),
        (None, "megatron-core >=0.16.1,<0.17 is not installed; pip install"),
    ],
)
def test_an_unsuitable_megatron_core_is_named_before_anything_loads(
    versions, text, monkeypatch, capsys
):
    if versions is None:
        monkeypatch.setattr(packages.metadata, "version", missing_package)
    else:
        monkeypatch.setattr(packages, "MEGATRON_VERSIONS", versions)
    assert exit_code(monkeypatch, "ppo_megatron_trainer") == 2
    said = capsys.readouterr().err
    assert re.search(f'actor.strategy is "megatron", but {text}', said), said


def missing_package(name):
    raise packages.metadata.PackageNotFoundError(name)


def test_defaults_that_scripts_state_are_accepted_silently(monkeypatch, capsys):
    """Every refused key at its default, and False, null or 0 where it asks for nothing."""
    off = []
    for key in refused("ppo_trainer"):
        last = key_parts(root_of("ppo_trainer"), key)[-1]
        if not isinstance(default_of(last.item), dict):
            value = default_of(last.item)
            off.append(f"{key}={'null' if value is None else value}")
    monkeypatch.setattr(sys, "argv", ["main_ppo", "trainer.dry_run=True", *off])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    main_ppo.main()
    assert "without effect" not in capsys.readouterr().out
