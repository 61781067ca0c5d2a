"""What a group does with a call, and several roles in one process, the same on every back-end."""

import asyncio

import pytest
import torch

from tests.single_controller.workers import Actor, AsyncCritic, Critic, product, rows_and_rank
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller import ClassWithInitArgs
from verl.single_controller.base.colocation import colocated_class, fused_class
from verl.single_controller.base.decorator import Dispatch, register_dispatch_mode
from verl.utils.tensordict_utils import get_tensordict


def rows(*values, **options):
    return DataProto.from_dict({"x": torch.tensor(values)}, **options)


def test_one_to_all_gives_every_rank_the_same_and_lists_the_results(calculators):
    ranks = range(calculators.world_size)
    assert calculators.add(1) == [101 + rank for rank in ranks]
    assert calculators.add(number=1, more=10) == [111 + rank for rank in ranks]


def test_all_to_all_passes_arguments_unchanged(calculators):
    assert calculators.pass_through("text") == [
        (rank, "text") for rank in range(calculators.world_size)
    ]


def test_dp_compute_gives_each_rank_its_entry(calculators):
    numbers = list(range(calculators.world_size))
    assert calculators.square(numbers) == [number * number for number in numbers]


def test_dp_compute_refuses_lists_of_another_length(calculators):
    with pytest.raises(ValueError, match="one entry per rank"):
        calculators.square([1] * (calculators.world_size + 1))


def test_dp_compute_proto_splits_rows_and_joins_them_in_order(calculators):
    result = calculators.double(rows(1, 2, 3, 4))
    assert result.batch["x"].tolist() == [2, 4, 6, 8]
    share = 4 // calculators.world_size
    assert result.meta_info["metrics"] == {"n": [share] * calculators.world_size}


@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_auto_padding_fills_up_and_takes_away(calculators, num_rows):
    result = calculators.double(rows(*range(num_rows), auto_padding=True))
    assert result.batch["x"].tolist() == [2 * number for number in range(num_rows)]


def test_a_padded_future_loses_its_padding_when_it_is_resolved(calculators):
    future = calculators.double_later(rows(1, 2, 3, auto_padding=True))
    assert future.get(timeout_seconds=30).batch["x"].tolist() == [2, 4, 6]


def test_padded_batches_of_one_call_must_be_equally_long(calculators):
    with pytest.raises(ValueError, match=r"equally many rows, got \[3, 5\]"):
        calculators.two_batches(
            rows(1, 2, 3, auto_padding=True), rows(1, 2, 3, 4, 5, auto_padding=True)
        )


def test_two_batches_are_split_alike(calculators):
    result = calculators.two_batches(rows(1, 2, 3, 4), right=rows(10, 20, 30, 40))
    assert result.batch["x"].tolist() == [11, 22, 33, 44]


def test_dp_compute_metric_lists_the_results_of_the_ranks(calculators):
    world_size = calculators.world_size
    assert calculators.count_rows(rows(1, 2, 3, 4)) == [4 // world_size] * world_size
    padded = calculators.count_rows(rows(1, 2, 3, auto_padding=True))
    assert len(padded) == world_size  # padding is rows, not ranks


def test_rank_zero_runs_once_and_answers_alone(calculators):
    assert calculators.rank_zero_of_all(5) == (0, 5)
    assert calculators.rank_zero([1, 2]) == (0, [1, 2])


def test_a_direct_rollout_method_cannot_be_called_through_the_group(calculators):
    with pytest.raises(NotImplementedError):
        calculators.direct()


def test_a_user_may_dispatch_and_collect_in_an_own_way(calculators):
    world_size = calculators.world_size
    values = list(range(1, world_size + 1))
    expected = sum(value * (rank + 1) for rank, value in enumerate(reversed(values)))
    assert calculators.weigh(values) == expected


def test_a_function_runs_on_every_rank_with_its_rows(calculators):
    result = calculators.execute_with_func_generator(rows_and_rank, rows(0, 0, 0, 0))
    share = 4 // calculators.world_size
    expected = [10 * rank for rank in range(calculators.world_size) for _ in range(share)]
    assert result.batch["x"].tolist() == expected


def test_a_function_runs_on_rank_zero(calculators):
    assert calculators.execute_func_rank_zero(product, 6, 7) == 42


def test_only_the_declared_columns_travel(calculators):
    batch = DataProto.from_dict(
        {"x": torch.arange(4), "huge": torch.zeros(4, 10)},
        {"label": list("abcd"), "text": list("efgh")},
        {"temperature": 0.5},
    )
    result = calculators.seen_columns(batch)
    assert set(result.non_tensor_batch["seen"]) == {"label,x"}
    assert result.meta_info["temperature"] == 0.5
    assert sorted(batch.batch.keys()) == ["huge", "x"]  # the driver's batch is as it was


def test_async_methods_are_awaited_on_the_worker(calculators):
    assert calculators.add_soon(1) == [1 + rank for rank in range(calculators.world_size)]


async def test_a_group_can_be_called_from_a_running_event_loop(calculators):
    assert calculators.add_soon(1)[0] == 1


async def test_references_can_be_awaited(calculators):
    results = await asyncio.gather(*calculators.add_later(1))
    assert results == [1 + rank for rank in range(calculators.world_size)]


def test_non_blocking_calls_give_references_that_resolve_later(calculators):
    references = calculators.add_later(5)
    assert all(isinstance(reference, calculators.reference_type) for reference in references)
    assert calculators.resolve(references) == [5 + rank for rank in range(calculators.world_size)]


def test_results_pass_from_call_to_call_without_the_driver(calculators):
    first = calculators.double_later(rows(1, 2, 3, 4))
    second = calculators.double_later(first)
    assert isinstance(second, DataProtoFuture)
    assert calculators.double(second).batch["x"].tolist() == [8, 16, 24, 32]


def test_execute_all_shards_lists_of_world_size_and_broadcasts_the_rest(calculators):
    world_size = calculators.world_size
    each = list(range(world_size))
    assert calculators.execute_all_sync("square", each) == [n * n for n in each]
    wide = [1] * (world_size + 1)
    assert calculators.execute_all_sync("pass_through", wide) == [(r, wide) for r in each]
    assert calculators.execute_rank_zero_sync("pass_through", "me") == (0, "me")
    references = calculators.execute_all_async("square", each)
    assert calculators.resolve(references) == [n * n for n in each]


def test_a_registered_mode_is_as_good_as_a_built_in_one(calculators):
    register_dispatch_mode(
        "FIRST_ONLY",
        lambda group, value: (([value] * group.world_size,), {}),
        lambda group, output: output[0],
    )
    try:
        calculators._bind_worker_method(_with_mode(Dispatch.FIRST_ONLY))
        assert calculators.add(1) == 101
    finally:
        Dispatch.remove("FIRST_ONLY")
        calculators._bind_worker_method(calculators._worker_class)
    assert len(calculators.add(1)) == calculators.world_size


def _with_mode(mode):
    from verl.single_controller.base.decorator import register

    class Other:
        @register(dispatch_mode=mode)
        def add(self, number):
            raise AssertionError("only the note of this method is used")

    return Other


def test_workers_know_who_they_are(calculators):
    world_size = calculators.world_size
    assert calculators.environment("RANK") == [str(rank) for rank in range(world_size)]
    assert calculators.environment("WORLD_SIZE") == [str(world_size)] * world_size
    assert calculators.environment("LOCAL_RANK") == [str(rank) for rank in range(world_size)]
    assert calculators.environment("LOCAL_WORLD_SIZE") == [str(world_size)] * world_size
    assert calculators.environment("MASTER_ADDR") == [calculators.master_address] * world_size
    assert calculators.environment("MASTER_PORT") == [calculators.master_port] * world_size


def test_ranks_form_a_process_group(calculators):
    world_size = calculators.world_size
    total = sum(1 + rank for rank in range(world_size))
    assert calculators.all_reduce(1) == [total] * world_size


def test_each_call_runs_once(calculators):
    before = calculators.count_calls(rows(1, 2, 3, 4)).batch["calls"]
    after = calculators.count_calls(rows(1, 2, 3, 4)).batch["calls"]
    assert (after - before).tolist() == [1, 1, 1, 1]


def test_an_unknown_role_is_refused_by_name(calculators):
    with pytest.raises(ValueError, match="no role 'actor'"):
        calculators.spawn(["actor"])


# ---- meshes --------------------------------------------------------------------------------------


def test_ranks_of_a_data_parallel_group_get_the_same_rows_and_one_answers(calculators):
    num_pairs = max(1, calculators.world_size // 2)
    result = calculators.mark(rows(1, 2, 3, 4))
    assert result.batch["x"].tolist() == [1, 2, 3, 4]
    share = 4 // num_pairs
    first_of_pairs = [2 * pair for pair in range(num_pairs) for _ in range(share)]
    assert result.batch["rank"].tolist() == first_of_pairs


def test_rows_return_in_order_whatever_rank_held_them(calculators):
    world_size = calculators.world_size
    result = calculators.mark_mirrored(rows(1, 2, 3, 4))
    assert result.batch["x"].tolist() == [1, 2, 3, 4]
    holders = [rank for rank in reversed(range(world_size)) for _ in range(4 // world_size)]
    assert result.batch["rank"].tolist() == holders


def test_futures_of_a_mesh_keep_the_order_of_rows(calculators):
    later = calculators.increment_later(calculators.increment_later(rows(1, 2, 3, 4)))
    assert calculators.mark(later).batch["x"].tolist() == [3, 4, 5, 6]


def test_a_mesh_takes_tensordicts_and_padded_batches(calculators):
    table = calculators.triple_tensordict(get_tensordict({"x": torch.tensor([1, 2])}))
    assert table["x"].tolist() == [3, 6]
    padded = calculators.mark_mirrored(rows(1, 2, 3, auto_padding=True))
    assert padded.batch["x"].tolist() == [1, 2, 3]


def test_an_unknown_mesh_is_refused_by_name(calculators):
    with pytest.raises(RuntimeError, match="mesh 'absent' is not registered"):
        calculators.on_absent_mesh(rows(1, 2, 3, 4))


@pytest.mark.parametrize("call", ["double", "mark_mirrored"])
def test_a_batch_that_does_not_divide_is_refused_with_a_way_out(calculators, call):
    num_rows = calculators.world_size + 1
    if calculators.world_size == 1:
        pytest.skip("one rank divides everything")
    with pytest.raises(ValueError, match=f"{num_rows} rows cannot be split evenly .* pad it"):
        vars(calculators)[call](rows(*range(num_rows)))


def test_some_of_the_ranks_may_be_called_alone(calculators):
    everywhere = calculators.add(5)
    last = calculators.world_size - 1
    assert calculators.execute_ranks([last], "add", 5) == [everywhere[last]]
    assert calculators.execute_ranks([last, 0], "add", 5) == [everywhere[last], everywhere[0]]


def test_roles_share_a_process_and_keep_their_own_methods(launcher):
    roles = {"actor": launcher.spec(Actor, "leader"), "critic": launcher.spec(Critic, base=50)}
    spec = launcher.controller.create_colocated_worker_cls(roles)
    group = launcher.start_spec(spec)
    ranks = range(launcher.world_size)
    assert group.actor_who() == [f"leader {rank}" for rank in ranks]

    spawned = group.spawn(roles.keys())
    actor, critic = spawned["actor"], spawned["critic"]
    del group  # the roles keep the processes alive
    assert actor.who() == [f"leader {rank}" for rank in ranks]
    assert critic.who() == [f"critic {rank}" for rank in ranks]
    assert critic.value() == [50 + rank for rank in ranks]
    assert critic.ask_actor() == [f"leader {rank}" for rank in ranks]
    assert actor.init_flag() == [None] * launcher.world_size  # only set while roles are built

    batch = DataProto.from_dict({"x": torch.arange(4)})
    assert actor.update(batch).batch["x"].tolist() == [1, 2, 3, 4]  # its own mesh
    assert actor.with_deadline(30).update(batch).batch["x"].tolist() == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match=r"'critic', ask_actor.*unexpected keyword"):
        critic.ask_actor(loudly=True)


def test_fused_roles_are_attributes_of_the_group(launcher):
    roles = {"actor": launcher.spec(Actor), "critic": launcher.spec(AsyncCritic, base=50)}
    spec = launcher.controller.create_colocated_worker_cls_fused(roles)
    assert spec.fused_worker_used
    assert spec.worker_class.__name__ == "FusedWorker_actor_critic"
    group = launcher.start_spec(spec)
    group.fuse(roles.keys())
    ranks = range(launcher.world_size)
    assert group.actor.who() == [f"actor {rank}" for rank in ranks]
    assert group.critic.ask_actor() == [f"actor {rank}" for rank in ranks]
    assert group.critic.value_soon() == [50 + rank for rank in ranks]
    assert group.with_deadline(30).critic.value() == [50 + rank for rank in ranks]
    batch = DataProto.from_dict({"x": torch.arange(4)})
    assert group.actor.update(batch).batch["x"].tolist() == [1, 2, 3, 4]


def test_role_names_may_be_prefixes_of_each_other():
    roles = {"actor": ClassWithInitArgs(Actor), "actor_rollout": ClassWithInitArgs(Critic, base=1)}
    members = vars(colocated_class(roles))
    assert {"actor_who", "actor_rollout_who", "actor_rollout_value"} <= members.keys()


@pytest.mark.parametrize("build", [colocated_class, fused_class])
def test_nothing_cannot_be_colocated(build):
    with pytest.raises(ValueError, match="class_dict is empty"):
        build({})
