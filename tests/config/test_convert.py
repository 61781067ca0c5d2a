"""Values become what the type hints say, or a fault that names the key."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.config.base import BaseConfig, option
from verl.config.convert import (
    Conversion,
    Mismatch,
    converted,
    omega_conf_to_dataclass,
    to_dict,
    to_dictconfig,
)
from verl.config.faults import ConfigError
from verl.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig


@dataclass(kw_only=True)
class Leaf(BaseConfig):
    _target_: str = f"{__name__}.Leaf"

    lr: float = option(1e-3, above=0)
    tags: list[str] = option(default_factory=list)


@dataclass(kw_only=True)
class DeepLeaf(Leaf):
    depth: int = 1


@dataclass(kw_only=True)
class Root(BaseConfig):
    size: int | None = 4
    leaf: Leaf = option(default_factory=Leaf)
    free: dict[str, Any] = option(default_factory=dict)


@dataclass
class Plain:
    count: int = 1
    names: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("1e-6", float, 1e-6),
        (3, float, 3.0),
        (8.0, int, 8),
        ("8.0", int, 8),
        ("1e3", int, 1000),
        ("true", bool, True),
        ("False", bool, False),
        (1, bool, True),
        (123, str, "123"),
        (True, str, "true"),
        (None, int | None, None),
        ("None", int | None, None),
        ("console", list[str], ["console"]),
        (["1", 2.0], list[int], [1, 2]),
        ((0.9, 0.95), list[float], [0.9, 0.95]),
        ("after_each_epoch", int | str, "after_each_epoch"),
        (5, int | str, 5),
        ("a.parquet", str | list[str], "a.parquet"),
        (["a", "b"], str | list[str], ["a", "b"]),
        ({"a": "1"}, dict[str, int], {"a": 1}),
        ({"a": [1]}, dict[str, Any], {"a": [1]}),
    ],
)
def test_a_value_that_means_the_same_is_accepted(value, hint, expected):
    result = converted(value, hint)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        ("abc", float, "a float"),
        (True, float, "a float"),
        (8.5, int, "an int"),
        ("maybe", bool, "a bool (True or False)"),
        (2, bool, "a bool (True or False)"),
        (None, int, "an int"),
        ("None", int, "an int"),
        ("x", int | None, "an int or null"),
        (3, list[int], "a list of int"),
        ([1, "x"], list[int], "a list of int"),
        ("x", dict[str, Any], "a mapping"),
        ([1], str, "a str"),
        ("nan", float, "a float"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_is_wanted(value, hint, wanted):
    with pytest.raises(Mismatch) as mismatch:
        converted(value, hint)
    assert str(mismatch.value) == wanted


def test_all_faults_are_found_in_one_pass():
    conversion = Conversion()
    conversion.section(Root, {"size": "x", "leaf": {"lr": -1, "tags": 3}, "extra": 1})
    assert [fault.text for fault in conversion.faults] == [
        'size is "x" (str); it must be an int or null',
        "leaf.tags is 3 (int); it must be a list of str",
        "leaf.lr is -1.0; it must be greater than 0",
    ]
    assert conversion.unknown == ["extra"]


def test_a_section_that_is_no_mapping_is_a_fault():
    conversion = Conversion()
    conversion.section(Root, {"leaf": 5})
    assert [fault.text for fault in conversion.faults] == ["leaf is 5 (int); it must be a mapping"]


def test_undeclared_keys_are_kept_and_readable_by_attribute():
    root = Conversion().section(Root, {"leaf": {"mine": {"a": 1}}})
    assert root.leaf.mine.a == 1
    assert to_dict(root)["leaf"]["mine"] == {"a": 1}


def test_target_names_the_dataclass_to_make():
    config = OmegaConf.create({"_target_": f"{__name__}.Leaf", "lr": "1e-4"})
    made = omega_conf_to_dataclass(config)
    assert isinstance(made, Leaf)
    assert made.lr == 1e-4


def test_a_target_inside_a_section_may_name_a_subclass_only():
    root = omega_conf_to_dataclass(
        {"leaf": {"_target_": f"{__name__}.DeepLeaf", "depth": 3}}, dataclass_type=Root
    )
    assert isinstance(root.leaf, DeepLeaf)
    assert root.leaf.depth == 3
    with pytest.raises(ConfigError, match=r"leaf\._target_ is .*must name a subclass of Leaf"):
        omega_conf_to_dataclass({"leaf": {"_target_": f"{__name__}.Plain"}}, dataclass_type=Root)


@pytest.mark.parametrize("target", ["os.system", "os.path", "no_such_module.X", "builtins.dict"])
def test_a_target_that_is_no_dataclass_is_refused(target):
    with pytest.raises(ValueError, match="_target_ is"):
        omega_conf_to_dataclass({"_target_": target})


def test_empty_and_finished_configurations_pass_through():
    assert omega_conf_to_dataclass({}) is None
    assert omega_conf_to_dataclass(None, Leaf) == Leaf()
    assert omega_conf_to_dataclass(OmegaConf.create({}), Leaf) == Leaf()
    assert omega_conf_to_dataclass("text") == "text"
    leaf = Leaf(lr=0.5)
    assert omega_conf_to_dataclass(leaf) is leaf


def test_a_configuration_without_target_needs_a_type():
    with pytest.raises(ValueError, match="names no _target_"):
        omega_conf_to_dataclass({"lr": 1})


def test_a_plain_dataclass_of_the_users_works_too():
    assert omega_conf_to_dataclass({"count": "2", "names": ["a"]}, Plain) == Plain(2, ["a"])


def test_an_unknown_key_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="unknown option weight_decy; did you mean weight_decay"):
        omega_conf_to_dataclass({"weight_decy": 1}, FSDPOptimizerConfig)


def test_public_target_paths_are_resolved_by_name_without_importing_them():
    @dataclass(kw_only=True)
    class Holder(BaseConfig):
        optim: FSDPOptimizerConfig | McoreOptimizerConfig = option(
            default_factory=FSDPOptimizerConfig
        )

    made = omega_conf_to_dataclass(
        {"optim": {"_target_": "verl.workers.config.McoreOptimizerConfig"}}, Holder
    )
    assert isinstance(made.optim, McoreOptimizerConfig)


def test_interpolations_are_resolved_before_conversion():
    config = OmegaConf.create({"base": 2, "leaf": {"lr": "${base}"}})
    assert omega_conf_to_dataclass(config.leaf, Leaf).lr == 2.0


def test_the_dictconfig_view_refuses_keys_that_do_not_exist():
    view = to_dictconfig(Conversion().section(Root, {"mine": 3}))
    assert view.leaf.lr == 1e-3
    assert view.mine == 3
    with pytest.raises(AttributeError):
        view.leaf.learning_rate  # noqa: B018
