"""Keys of verl 0.8 and 0.9: each has an effect, is named as having none, or is refused."""

import json
from pathlib import Path

import pytest

from verl.config.legacy import RULES, meaning_of, modernise, renamed
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.schema import family, nested
from verl.config.second_generation import ENTRIES

SURFACE = json.loads(Path(__file__).with_name("surface_keys_09.json").read_text())
KEYS = SURFACE["today"]
"""Keys that 0.8 or 0.9 added, or whose default they changed, with the default; Megatron's too."""
EVERY_KEY = {**SURFACE["removed"], **KEYS}
"""With those that 0.8 dropped: all keys in which the generations differ."""
FORMS = family(PPOConfig)
SCOPES = (FORMS.variants[0].keys, FORMS.keys)
WAYS = ("actor_rollout_ref.actor", "actor_rollout_ref", "critic", "actor_rollout_ref.rollout", "")


def load(values):
    return load_config(nested({tuple(k.split(".")): v for k, v in values.items()}), PPOConfig)


def other_than(default):
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    return {list: ["x"], dict: {"a": 1}}.get(type(default), "x")


def test_every_key_is_known():
    assert len(EVERY_KEY) == 619
    defaults = {tuple(key.split(".")): default for key, default in EVERY_KEY.items()}
    unknown = [
        key
        for key, default in EVERY_KEY.items()
        if key not in FORMS.keys and meaning_of(key, default, defaults, SCOPES) is None
    ]
    assert unknown == []


def test_a_key_without_an_option_is_translated_named_or_refused():
    """Of the keys that the schema has, test_sweep proves the same."""
    others = [key for key in EVERY_KEY if key not in FORMS.keys]
    assert len(others) > 300
    meanings = {key: meaning_of(key, other_than(EVERY_KEY[key]), {}, SCOPES) for key in others}
    assert [key for key, one in meanings.items() if not one.values and one.is_silent] == []


def test_what_the_files_of_another_version_state_is_not_mentioned():
    """A file that was copied whole asks for nothing that is missing."""
    others = [key for key in KEYS if key not in FORMS.keys]
    meanings = {key: meaning_of(key, KEYS[key], {}, SCOPES) for key in others}
    assert [key for key, one in meanings.items() if not one.values and not one.is_silent] == []


def test_a_file_with_every_default_is_accepted():
    loaded = load({key: value for key, value in KEYS.items() if value is not None})
    assert [fault.text for fault in loaded.faults] == []


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("actor_rollout_ref.actor.qat.enable", True, "quantization-aware training is not built in"),
        ("actor_rollout_ref.rollout.disaggregation.enabled", True, "prefills and decodes itself"),
        ("global_profiler.finish_hook_cmd", "rm -r x", "start what should follow after the run"),
        ("skip.rollout.action", "repeat", "a dump serves the step"),
    ],
)
def test_what_does_not_exist_is_refused(key, value, text):
    (fault,) = load({key: value}).faults
    assert fault.text.startswith(f"{key} is ")
    assert text in fault.text


def test_what_has_no_effect_is_named_unless_it_asks_for_nothing():
    assert load({"actor_rollout_ref.rollout.seed": 42}).notices == []
    (notice,) = load({"actor_rollout_ref.rollout.seed": 7}).notices
    assert notice == (
        "actor_rollout_ref.rollout.seed has no effect (data.seed is the seed of the whole run)"
    )


def spellings():
    """Each rename, with a key that both sides have."""
    for rule in RULES:
        if isinstance(rule.new, str):
            for way in WAYS:
                start = f"{way}." if way else ""
                old, new = (text.replace("*.", start, 1) for text in (rule.old, rule.new))
                leaves = [key for key in FORMS.variants[0].keys.leaves if key == new]
                leaves += sorted(
                    key for key in FORMS.variants[0].keys.leaves if key.startswith(f"{new}.")
                )[:2]
                for leaf in leaves:
                    yield old + leaf[len(new) :], leaf
                if not rule.old.startswith("*."):
                    break


PAIRS = sorted(
    {pair for pair in spellings() if renamed(pair[0], FORMS.variants[0].keys) == pair[1]}
)


def another_value(key):
    default = FORMS.variants[0].defaults.get(tuple(key.split(".")))
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "x"


def test_old_and_new_spellings_resolve_to_the_same_configuration():
    assert len(PAIRS) > 40
    variant = FORMS.variants[0]
    for old, new in PAIRS:
        value = another_value(new)
        modern = modernise({tuple(old.split(".")): value}, variant, FORMS.keys)
        as_new = modernise({tuple(new.split(".")): value}, variant, FORMS.keys)
        assert modern.faults == []
        assert modern.values == as_new.values, (old, new)
        assert len(modern.notices) == 1 + len(as_new.notices), old


@pytest.mark.parametrize("pair", PAIRS[::12])
def test_whole_configurations_are_equal_too(pair):
    old, new = pair
    assert load({old: another_value(new)}).config == load({new: another_value(new)}).config


def test_no_entry_hides_behind_another():
    """A later entry that an earlier one covers would never be taken."""
    for number, entry in enumerate(ENTRIES):
        assert entry.old not in [earlier.old for earlier in ENTRIES[:number]], entry.old


def test_no_entry_stands_for_an_option_that_exists():
    """Its rule would never apply, and what it says would be out of date."""
    keys = FORMS.variants[0].keys
    assert [entry.old for entry in ENTRIES if entry.old in keys] == []


def test_a_section_behind_a_switch_is_named_too():
    (notice,) = load({"actor_rollout_ref.actor.qat.mode": "nvfp4"}).notices
    assert notice == (
        "actor_rollout_ref.actor.qat.mode has no effect (quantization-aware training is not built "
        "in)"
    )


def test_the_model_of_an_engine_critic_is_the_critic_s_model():
    assert load({"critic.model_config.path": "m"}).config.critic.model.path == "m"


def test_critics_have_lora_under_both_spellings():
    loaded = load({"critic.model.lora.rank": 8, "critic.model.lora.alpha": 4})
    model = loaded.config.critic.model
    assert (model.lora_rank, model.lora_alpha) == (8, 4)
