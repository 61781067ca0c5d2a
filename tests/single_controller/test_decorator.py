"""Modes and the note that `register` leaves on a method."""

import inspect
import pickle

import numpy as np
import pytest
import torch

from tests.single_controller.scripted import answer, scripted_group
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.base import decorator
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    MAGIC_ATTR,
    Dispatch,
    Execute,
    _check_dispatch_mode,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.base.worker_group import WorkerGroup, _narrowed
from verl.utils.tensordict_utils import get_tensordict


@pytest.fixture
def modes():
    before = dict(DISPATCH_MODE_FN_REGISTRY)
    yield
    DISPATCH_MODE_FN_REGISTRY.clear()
    DISPATCH_MODE_FN_REGISTRY.update(before)


def nothing(group, *args, **kwargs):
    return args, kwargs


def test_register_leaves_a_note_and_keeps_the_method():
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def method(self, number: int) -> int:
        """Doc."""
        return number + 1

    assert vars(method)[MAGIC_ATTR] == {
        "dispatch_mode": Dispatch.ONE_TO_ALL,
        "execute_mode": Execute.ALL,
        "blocking": False,
    }
    assert (method.__name__, method.__doc__) == ("method", "Doc.")
    assert next(iter(inspect.signature(method).parameters)) == "self"
    assert method(None, 1) == 2


def test_a_future_argument_arrives_as_its_value_unless_told_otherwise():
    future = DataProtoFuture(collect_fn=lambda parts: "batch", futures=[])

    @register()
    def takes_value(self, batch):
        return batch

    @register(materialize_futures=False)
    def takes_future(self, batch):
        return batch

    assert takes_value(None, future) == "batch"
    assert takes_value(None, batch=future) == "batch"
    assert takes_future(None, future) is future


async def test_async_methods_stay_async():
    @register()
    async def method(self, number):
        return number + 1

    assert inspect.iscoroutinefunction(method)
    assert await method(None, 1) == 2


def test_the_predefined_modes_are_those_of_the_enumeration():
    assert set(Dispatch.names()) >= {
        "RANK_ZERO",
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
        "DIRECT_ROLLOUT_METHOD",
    }
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO)["execute_fn_name"] == "execute_rank_zero"
    assert pickle.loads(pickle.dumps(Dispatch.ONE_TO_ALL)) is Dispatch.ONE_TO_ALL
    with pytest.raises(ValueError, match=r"RANK_ZERO.* has no dispatch"):
        get_predefined_dispatch_fn(Dispatch.RANK_ZERO)


def test_users_add_and_replace_modes(modes):
    register_dispatch_mode("MINE", nothing, nothing)
    try:
        _check_dispatch_mode(Dispatch.MINE)
        mine = {"dispatch_fn": nothing, "collect_fn": nothing}
        assert get_predefined_dispatch_fn(Dispatch.MINE) == mine
        with pytest.raises(ValueError, match="already registered"):
            register_dispatch_mode("MINE", nothing, nothing)
    finally:
        Dispatch.remove("MINE")
    update_dispatch_mode(Dispatch.ONE_TO_ALL, nothing, nothing)
    assert get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["dispatch_fn"] is nothing
    with pytest.raises(ValueError, match="has no functions to replace"):
        update_dispatch_mode(Dispatch.RANK_ZERO, nothing, nothing)


@pytest.mark.parametrize("mode", [3, "ONE_TO_ALL", {"dispatch_fn": nothing}])
def test_a_wrong_dispatch_mode_is_refused_where_it_is_written(mode):
    with pytest.raises(ValueError, match="dispatch_mode"):
        register(dispatch_mode=mode)


def test_a_wrong_execute_mode_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match="execute_mode is 'ALL'"):
        register(execute_mode="ALL")


def test_all_documented_functions_can_be_imported_from_the_decorator_module():
    for name in [
        "dispatch_one_to_all",
        "dispatch_all_to_all",
        "collect_all_to_all",
        "dispatch_dp_compute",
        "collect_dp_compute",
        "dispatch_dp_compute_data_proto",
        "collect_dp_compute_data_proto",
        "dispatch_dp_compute_data_proto_with_func",
        "dispatch_nd_compute",
        "collect_nd_compute",
        "dispatch_nd_compute_dataproto",
        "collect_nd_compute_dataproto",
        "dispatch_lazy_compute_data_proto",
        "collect_lazy_compute_data_proto",
        "make_nd_compute_dataproto_dispatch_fn",
    ]:
        assert callable(vars(decorator)[name])


def test_a_method_with_the_name_of_a_group_member_is_refused():
    class Clashing:
        @register()
        def world_size(self): ...

    with pytest.raises(ValueError, match=r"method Clashing.world_size has the name of"):
        scripted_group([answer(1)])._bind_worker_method(Clashing)


def test_users_may_generate_the_group_methods_themselves():
    class Simple:
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def f(self): ...

    def generator(group, method_name, dispatch_fn, collect_fn, execute_fn, blocking):
        assert isinstance(group, WorkerGroup)
        return lambda: (method_name, execute_fn.__name__, blocking)

    group = scripted_group([answer(1)])
    assert group._bind_worker_method(Simple, generator) == ["f"]
    assert group.f() == ("f", "execute_all", True)


# ---- dispatch functions --------------------------------------------------------------------------


def test_parts_are_put_once_and_placed_by_data_parallel_rank():
    group = scripted_group([answer(None)] * 4)
    batch = DataProto.from_dict({"x": torch.arange(4)})
    args, kwargs = dispatch_nd_compute_dataproto([1, 1, 0, 0], 2, group, batch)
    assert [part.batch["x"].tolist() for part in args[0]] == [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert args[0][0] is args[0][1]
    assert group._backend.num_put == 2  # one per part, not one per rank
    assert kwargs == {}


def test_a_mesh_of_another_size_is_refused():
    group = scripted_group([answer(None)] * 4)
    with pytest.raises(ValueError, match="2 workers, but the group has 4"):
        dispatch_nd_compute([0, 1], 2, group, [1, 2])
    with pytest.raises(ValueError, match="list of 2 parts"):
        dispatch_nd_compute([0, 0, 1, 1], 2, group, "text")


def test_only_batches_can_be_split():
    group = scripted_group([answer(None)] * 2)
    dispatch = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)["dispatch_fn"]
    with pytest.raises(ValueError, match="got int; put plain values into meta_info"):
        dispatch(group, 3)


def test_a_result_that_is_no_batch_is_refused_where_batches_are_joined():
    group = scripted_group([answer(None)] * 2)
    collect = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)["collect_fn"]
    with pytest.raises(ValueError, match="a rank returned str"):
        collect(group, ["a", "b"])
    with pytest.raises(ValueError, match="different types"):
        collect(group, [DataProto(), "b"])


def test_only_a_plain_function_can_be_sent_to_all():
    group = scripted_group([answer(None)] * 2)
    dispatch = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)["dispatch_fn"]
    with pytest.raises(ValueError, match="must be a plain function, got int"):
        dispatch(group, 3)


def test_columns_of_a_tensordict_are_narrowed_but_batch_wide_values_stay():
    table = get_tensordict({"x": torch.zeros(2), "y": torch.zeros(2)}, {"temperature": 0.5})
    (narrow,), _ = _narrowed(nothing, ("x", "missing"))(None, table)
    assert sorted(narrow.keys()) == ["temperature", "x"]


def test_a_batch_without_tensors_is_narrowed_too():
    batch = DataProto.from_dict(non_tensors={"a": np.array([1, 2]), "b": np.array([3, 4])})
    (narrow,), _ = _narrowed(nothing, ("a",))(None, batch)
    assert list(narrow.non_tensor_batch) == ["a"]
