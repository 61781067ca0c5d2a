"""Sections: frozen, read-only mappings."""

from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar

import pytest

from verl.config.base import BaseConfig, FreeSection, option


@dataclass(kw_only=True)
class Inner(BaseConfig):
    rate: float = option(0.1, above=0, maximum=1)
    kwargs: dict[str, int] = option(default_factory=dict)


@dataclass(kw_only=True)
class Outer(BaseConfig):
    _mutable_fields: ClassVar[set[str]] = {"steps"}

    steps: int = option(3, minimum=1)
    mode: str = option("left", choices=("left", "right"))
    kinds: list[str] = option(default_factory=list, choices=("a", "b"))
    inner: Inner = option(default_factory=Inner)


def test_a_section_reads_like_a_mapping_and_like_an_object():
    section = Outer(steps=5)
    assert section.steps == section["steps"] == section.get("steps") == 5
    assert section.get("missing", 7) == 7
    assert list(section) == ["_target_", "steps", "mode", "kinds", "inner"]
    assert len(section) == 5
    with pytest.raises(KeyError):
        section["missing"]


def test_only_mutable_fields_may_change():
    section = Outer()
    section.steps = 9
    assert section.steps == 9
    with pytest.raises(FrozenInstanceError, match=r"Outer\.mode cannot change"):
        section.mode = "right"


def test_every_broken_rule_is_named_at_once():
    with pytest.raises(ValueError, match="steps is 0") as error:
        Outer(steps=0, mode="lft", kinds=["a", "c"])
    assert str(error.value).splitlines() == [
        "steps is 0; it must be at least 1",
        "mode is 'lft'; it must be one of: left, right (did you mean 'left'?)",
        "kinds is 'c'; it must be one of: a, b",
    ]


def test_bounds_are_exclusive_above_and_inclusive_below_the_maximum():
    assert Inner(rate=1).rate == 1
    with pytest.raises(ValueError, match="rate is 0; it must be greater than 0"):
        Inner(rate=0)
    with pytest.raises(ValueError, match=r"rate is 1\.5; it must be at most 1"):
        Inner(rate=1.5)
    with pytest.raises(ValueError, match="rate is nan"):
        Inner(rate=float("nan"))


def test_a_misspelled_attribute_names_the_option():
    with pytest.raises(AttributeError, match="no option 'step'; did you mean 'steps'"):
        Outer().step  # noqa: B018


def test_undeclared_keys_are_read_like_options():
    section, free = Outer(), FreeSection()
    vars(free)["extras"]["depth"] = 2
    vars(section)["extras"]["mine"] = free
    assert section.mine.depth == section["mine"]["depth"] == 2
    assert "mine" in section
