import os
import pickle

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl.utils.py_functional import (
    DynamicEnum,
    NestedNamespace,
    append_to_dict,
    convert_to_regular_types,
    rename_dict,
    temp_env_var,
    union_two_dict,
)


class Color(DynamicEnum):
    pass


class Shape(DynamicEnum):
    pass


RED = Color.register("red")


def test_metrics_of_several_steps_become_lists():
    collected: dict = {}
    append_to_dict(collected, {"loss": 1.0, "actor/lr": 0.5}, prefix="actor/")
    append_to_dict(collected, {"loss": [2.0, 3.0]}, prefix="actor/")
    assert collected == {"actor/loss": [1.0, 2.0, 3.0], "actor/lr": [0.5]}


def test_a_prefix_is_added_once():
    assert rename_dict({"loss": 1, "val/acc": 2}, "val/") == {"val/loss": 1, "val/acc": 2}


def test_dictionaries_join_where_they_agree():
    left = {"a": 1, "b": np.array([1, 2])}
    assert union_two_dict(left, {"b": np.array([1, 2]), "c": 3}) is left
    assert left["a"] == 1
    assert left["c"] == 3


def test_dictionaries_that_disagree_are_refused_and_stay_as_they_were():
    left = {"a": 1}
    with pytest.raises(ValueError, match=r"disagree on 'a': 1 and 2"):
        union_two_dict(left, {"c": 3, "a": 2})
    assert left == {"a": 1}


def test_omegaconf_disappears_at_any_depth():
    config = OmegaConf.create({"a": {"b": [1, 2]}, "c": "${a.b}"})
    regular = convert_to_regular_types({"x": [config, config.a.b]})
    assert regular == {"x": [{"a": {"b": [1, 2]}, "c": [1, 2]}, [1, 2]]}
    assert type(regular["x"][0]["a"]) is dict
    assert type(regular["x"][1]) is list


def test_a_nested_dictionary_reads_as_attributes():
    space = NestedNamespace({"a": {"b": 1}, "c": [2]}, d=3)
    assert (space.a.b, space.c, space.d) == (1, [2], 3)
    with pytest.raises(TypeError, match=r"\[4\]"):
        NestedNamespace({4: 1})  # pyright: ignore


def test_an_enumeration_grows_and_shrinks():
    circle = Shape.register("circle")
    square = Shape.register("SQUARE")
    assert Shape.CIRCLE is circle is Shape["Circle"] is Shape.from_name("circle")
    assert list(Shape) == [circle, square]
    assert (circle.value, square.value, len(Shape)) == (0, 1, 2)
    assert Shape.remove("circle") is circle
    assert circle not in Shape
    assert "circle" not in Shape
    assert "square" in Shape
    assert Shape.register("triangle").value == 2  # a value is not given out twice
    assert Shape.from_name("circle") is None
    with pytest.raises(KeyError, match="known: SQUARE, TRIANGLE"):
        Shape["circle"]
    with pytest.raises(ValueError, match=r"Shape\.SQUARE is already registered"):
        Shape.register("square")


def test_enumerations_do_not_share_members():
    assert "red" not in Shape
    assert "red" in Color


def test_a_pickled_member_is_the_same_object():
    assert pickle.loads(pickle.dumps(RED)) is RED


def test_a_member_unknown_to_the_receiver_is_registered_there():
    member = Color.register("green")
    sent = pickle.dumps(member)
    Color.remove("green")
    received = pickle.loads(sent)
    assert received is Color["green"]
    assert received is not member


def test_an_environment_variable_is_put_back():
    with temp_env_var("VERL_TEST_VARIABLE", "1"):
        with temp_env_var("VERL_TEST_VARIABLE", "2"):
            assert os.environ["VERL_TEST_VARIABLE"] == "2"
        assert os.environ["VERL_TEST_VARIABLE"] == "1"
    assert "VERL_TEST_VARIABLE" not in os.environ


def test_an_environment_variable_is_put_back_after_an_error():
    with pytest.raises(KeyError), temp_env_var("VERL_TEST_VARIABLE", "1"):
        raise KeyError
    assert "VERL_TEST_VARIABLE" not in os.environ
