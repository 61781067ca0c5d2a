import pytest

from verl.utils.registry import Registry


def registry():
    return Registry("colour", red="builtins:int")


def test_a_name_in_a_string_is_imported_on_first_use():
    assert registry()["red"] is int


def test_an_unknown_name_is_refused_with_the_closest_one_and_the_list():
    with pytest.raises(ValueError, match=r"unknown colour 'rde'. Did you mean 'red'\? Known: red"):
        registry()["rde"]


def test_a_users_entry_replaces_a_built_in_one():
    colours = registry()
    colours.register("red")(float)
    assert colours["red"] is float


def test_a_users_entry_stays_when_the_built_in_one_is_loaded_later():
    colours = Registry("colour")
    colours.register("blue")(float)
    colours.register("blue", built_in=True)(int)
    assert colours["blue"] is float


def test_two_different_user_entries_of_one_name_are_an_error():
    colours = Registry("colour")
    colours.register("blue")(float)
    colours.register("blue")(float)
    with pytest.raises(ValueError, match="'blue' is already registered as <class 'float'>"):
        colours.register("blue")(int)


def test_names_can_be_listed_counted_and_asked_for():
    colours = registry()
    colours.register("blue")(float)
    assert list(colours) == ["blue", "red"]
    assert len(colours) == 2
    assert "blue" in colours
    assert "green" not in colours
