"""What only Ray has: placement groups, names, detached actors, custom resources, its store."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.single_controller.workers import Actor, Calculator
from verl.utils.ray_utils import auto_await, get_event_loop, parallel_put

pytestmark = pytest.mark.ray


@pytest.fixture
def rayc(ray_cluster):
    """The package under test, imported only where Ray is wanted."""
    import verl.single_controller.ray as rayc

    return rayc


@pytest.fixture
def small_pool(rayc):
    pools = []

    def make(*args, **kwargs):
        pool = rayc.RayResourcePool(*args, use_gpu=False, max_colocate_count=1, **kwargs)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.release()


@pytest.mark.slow
def test_actors_have_names_and_an_environment_and_end_with_their_group(rayc, ray_pool):
    import ray

    group = rayc.RayWorkerGroup(
        ray_pool, rayc.RayClassWithInitArgs(Calculator), name_prefix="brief", worker_env={"A": "b"}
    )
    assert group.worker_names == ["briefCalculator_0:0", "briefCalculator_0:1"]
    assert group.environment("A") == ["b", "b"]
    assert group.environment("WG_BACKEND") == ["ray", "ray"]
    assert group.environment("WG_PREFIX") == ["brief", "brief"]
    assert group.environment("RAY_LOCAL_WORLD_SIZE") == ["2", "2"]
    assert "briefCalculator_0:1" in ray.util.list_named_actors()
    del group
    gc.collect()
    give_up = time.monotonic() + 60
    while any(name.startswith("brief") for name in ray.util.list_named_actors()):
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_worker_env_must_not_touch_what_the_group_sets(rayc, ray_pool):
    with pytest.raises(ValueError, match=r"worker_env sets \['RANK'\]"):
        rayc.RayWorkerGroup(
            ray_pool, rayc.RayClassWithInitArgs(Calculator), worker_env={"RANK": "7"}
        )


@pytest.mark.slow
def test_detached_actors_are_found_again_and_outlive_their_group(rayc, ray_pool):
    import ray

    spec = rayc.RayClassWithInitArgs(Calculator, offset=7)
    group = rayc.RayWorkerGroup(ray_pool, spec, name_prefix="lasting", detached=True)
    assert group.add(0) == [7, 8]
    names = group.worker_names
    del group
    by_prefix = rayc.RayWorkerGroup.from_detached("lasting", ray_cls_with_init=spec)
    by_name = rayc.RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=spec)
    by_handle = rayc.RayWorkerGroup.from_detached(
        worker_handles=by_name.workers, ray_cls_with_init=spec
    )
    for found in (by_prefix, by_name, by_handle):
        assert found.world_size == 2
        assert found.add(1) == [8, 9]
        found.shutdown()  # it did not start them, so it does not end them
    assert by_name.execute_all_sync("where")
    for worker in by_name.workers:
        ray.kill(worker)


def test_attaching_needs_something_to_attach_to(rayc, ray_cluster):
    with pytest.raises(ValueError, match="no actor whose name starts with 'nobody'"):
        rayc.RayWorkerGroup.from_detached("nobody")
    with pytest.raises(ValueError, match="resource_pool"):
        rayc.RayWorkerGroup()


def test_an_actor_class_may_be_given_remote_or_plain(rayc):
    import ray

    remote = ray.remote(Actor)
    assert rayc.RayClassWithInitArgs(cls=remote).worker_class is Actor
    assert rayc.RayClassWithInitArgs(Actor).worker_class is Actor
    raw = rayc.create_colocated_worker_raw_cls({"actor": rayc.RayClassWithInitArgs(remote)})
    assert raw.__name__ == "FusedWorker_actor"
    assert raw.roles["actor"].cls is Actor


def test_a_single_additional_resource_is_applied(rayc, ray_pool, monkeypatch):
    spec = rayc.RayClassWithInitArgs(Calculator)
    spec.set_additional_resource({"rack": 1})
    spec.update_options({"name": "racked"})
    seen = {}

    class Recorder:
        def options(self, **options):
            seen.update(options)
            return self

        def remote(self, *args, **kwargs):
            return "handle"

    spec.cls = Recorder()
    group = ray_pool.get_placement_groups()[0]
    assert spec(group, 1, use_gpu=False) == "handle"
    assert seen["resources"] == {"rack": 1}
    assert seen["name"] == "racked"
    assert seen["scheduling_strategy"].placement_group_bundle_index == 1
    spec(group, 0, use_gpu=True, num_gpus=0.5, device_name="npu")
    assert seen["resources"] == {"rack": 1, "NPU": 0.5}
    spec(group, 0, use_gpu=True, num_gpus=0.5)
    assert seen["num_gpus"] == 0.5


# ---- pools ---------------------------------------------------------------------------------------


def test_placement_groups_are_made_once_and_come_sorted_at_once(rayc, small_pool):
    pool = small_pool([1, 2])
    first = pool.get_placement_groups()
    assert [group.bundle_count for group in first] == [1, 2]
    assert pool.get_placement_groups() is first
    assert first == rayc.sort_placement_group_by_node_ip(first)
    assert first[0].bundle_specs == [{"CPU": 1}]


def test_bundles_have_a_device_only_where_the_pool_has_devices(rayc):
    pool = rayc.RayResourcePool([2], max_colocate_count=3, accelerator_type="accelerator_type:H200")
    assert pool._bundle("cuda") == {"CPU": 3, "GPU": 1, "accelerator_type:H200": 1e-4}
    assert pool._bundle("npu")["NPU"] == 1
    assert rayc.RayResourcePool([2], use_gpu=False)._bundle("cuda") == {"CPU": 10}


def test_a_pool_without_resources_says_what_it_needs_and_what_there_is(rayc):
    pool = rayc.RayResourcePool([2], use_gpu=False, max_colocate_count=1000)
    with pytest.raises(
        ValueError, match=r"no resources for 2 bundles of .*1000.* max_colocate_count"
    ):
        pool.get_placement_groups(timeout_seconds=0.2)
    assert pool.pgs is None


def test_a_pool_is_split_by_size_or_by_list(rayc, small_pool):
    pool = small_pool([4])
    halves = rayc.split_resource_pool(pool, 2)
    assert [(half.start_bundle_index, half.world_size) for half in halves] == [(0, 2), (2, 2)]
    parts = rayc.split_resource_pool(pool, [1, 3])
    assert [(part.start_bundle_index, part.world_size) for part in parts] == [(0, 1), (1, 3)]
    nested = rayc.split_resource_pool(halves[1], 1)
    assert [part.start_bundle_index for part in nested] == [2, 3]
    for wrong in (3, [1, 2]):
        with pytest.raises(ValueError, match="4"):
            rayc.split_resource_pool(pool, wrong)


def test_a_group_on_a_part_of_a_pool_uses_its_bundles(rayc, small_pool):
    part = rayc.split_resource_pool(small_pool([3]), [2, 1])[1]
    group = rayc.RayWorkerGroup(part, rayc.RayClassWithInitArgs(Calculator, 5), name_prefix="part")
    assert group.world_size == 1
    assert group.worker_names == ["partCalculator_0:2"]
    assert group.add(0) == [5]
    assert group.environment("LOCAL_RANK") == ["0"]
    group.shutdown()


def test_pools_merge_and_lend_their_placement_groups(rayc, small_pool):
    one, two = small_pool([1]), small_pool([2])
    merged = rayc.merge_resource_pool(one, two)
    assert merged.store == [1, 2]
    assert merged.get_placement_groups() == [
        *one.get_placement_groups(),
        *two.get_placement_groups(),
    ]
    wanted = rayc.RayResourcePool([1, 2], use_gpu=False)
    lent = rayc.extract_pg_from_exist({"a": one, "b": two, "c": one}, ["a", "b"], wanted)
    assert [group.bundle_count for group in lent] == [1, 2]
    with pytest.raises(ValueError, match="do not fit"):
        rayc.extract_pg_from_exist({"a": one}, ["a"], wanted)
    with pytest.raises(ValueError, match="differ in use_gpu"):
        rayc.merge_resource_pool(one, rayc.RayResourcePool([1], use_gpu=True))


def test_the_manager_refuses_more_devices_than_there_are(rayc):
    manager = rayc.ResourcePoolManager({"global_pool": [8, 8]}, {"actor": "global_pool"})
    assert manager.get_n_gpus() == 16
    with pytest.raises(
        ValueError, match="Total available GPUs 0 is less than total desired GPUs 16"
    ):
        manager.create_resource_pool()


def test_the_manager_gives_each_role_its_pool(rayc):
    manager = rayc.ResourcePoolManager({"main": [2]}, {"actor": "main"}, use_gpu=False)
    manager.create_resource_pool()
    pool = manager.get_resource_pool("actor")
    assert (pool.store, pool.max_colocate_count) == ([2], 3)
    with pytest.raises(ValueError, match="role critic has no resource pool"):
        manager.get_resource_pool("critic")


def test_older_import_paths_give_the_same_manager(rayc):
    from verl.single_controller.ray import base
    from verl.utils import resource_pool_manager

    assert resource_pool_manager.ResourcePoolManager is rayc.ResourcePoolManager
    assert base.RayWorkerGroup is rayc.RayWorkerGroup


# ---- the driver's end ----------------------------------------------------------------------------

DRIVER = """
    import time, ray
    from tests.single_controller.workers import Calculator
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Calculator))
    print("pids", *group.where(), flush=True)
    group.sleep_on({0}, 600)
"""


@pytest.mark.slow
def test_actors_die_with_a_killed_driver(ray_cluster):
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)], stdout=subprocess.PIPE, text=True
    )
    with driver:
        pids = [int(pid) for pid in driver.stdout.readline().split()[1:]]
        driver.send_signal(signal.SIGKILL)
        driver.wait(timeout=60)
    assert pids
    give_up = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < give_up, "an actor has outlived its driver by a minute"
        time.sleep(0.1)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@auto_await
async def soon(value):
    await asyncio.sleep(0)
    return value


def test_an_async_function_can_be_called_like_a_plain_one():
    assert soon(3) == 3
    assert soon(4) == 4


async def test_and_awaited_inside_a_loop():
    assert await soon(3) == 3


def test_each_thread_has_its_own_loop():
    loops = [get_event_loop()]
    thread = threading.Thread(target=lambda: loops.append(get_event_loop()))
    thread.start()
    thread.join(timeout=60)
    assert loops[0] is get_event_loop()
    assert loops[0] is not loops[1]


async def test_inside_a_loop_that_loop_is_given():
    assert get_event_loop() is asyncio.get_running_loop()


@pytest.mark.ray
@pytest.mark.parametrize("count", [1, 5])
def test_objects_are_put_in_order(ray_cluster, count):
    import ray

    references = parallel_put(list(range(count)), max_workers=2)
    assert ray.get(references, timeout=30) == list(range(count))


def test_there_must_be_something_to_put():
    with pytest.raises(ValueError, match="data_list is empty"):
        parallel_put([])
