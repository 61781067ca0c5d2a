"""Who a worker is, and what it tells about its meshes and devices."""

import socket

import pytest

from verl.single_controller import ResourcePool, Worker
from verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo
from verl.single_controller.local import LocalResourcePoolManager


def test_a_worker_reads_its_rank_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    worker = Worker()
    assert (worker.rank, worker.world_size) == (3, 8)
    assert worker.get_master_addr_port() == ("10.0.0.1", "29500")
    assert set(Worker.env_keys()) >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def test_an_available_address_can_be_listened_on():
    address, port = Worker().get_available_master_addr_port()
    with socket.socket() as server:
        server.bind((address, int(port)))
    assert Worker().get_availale_master_addr_port()[0] == address


def test_visible_devices_have_one_name(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,3")
    assert Worker().get_cuda_visible_devices() == "2,3"
    assert Worker("5").get_cuda_visible_devices() == "5"
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    with pytest.raises(ValueError, match="name different devices"):
        Worker()


def test_on_ray_the_local_world_size_is_rays(monkeypatch):
    monkeypatch.setenv("WG_BACKEND", "ray")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert Worker()._local_world_size == 4


def test_a_mesh_is_registered_once():
    worker = Worker()
    worker._register_dispatch_collect_info("actor", dp_rank=2, is_collect=True)
    assert worker._query_dispatch_info("actor") == 2
    assert worker.query_collect_info("actor") is True
    assert worker._query_collect_info("actor") is True
    with pytest.raises(ValueError, match="'actor' is already registered"):
        worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=True)
    with pytest.raises(
        ValueError, match=r"'ref' is not registered on this worker; known: \['actor'"
    ):
        worker._query_dispatch_info("ref")


def test_a_worker_takes_over_the_mesh_of_an_inner_one():
    inner, outer = Worker(), Worker()
    inner._register_dispatch_collect_info("train", dp_rank=1, is_collect=False)
    outer.set_dispatch_collect("actor", **inner.get_dispatch_collect())
    assert outer._query_dispatch_info("actor") == 1
    assert outer.query_collect_info("actor") is False


def test_of_several_meshes_the_one_of_that_name_is_taken_not_the_last():
    inner, outer = Worker(), Worker()
    inner._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)
    inner._register_dispatch_collect_info("rollout", dp_rank=7, is_collect=False)
    outer.set_dispatch_collect("actor", **inner.get_dispatch_collect())
    assert outer._query_dispatch_info("actor") == 1
    assert outer.query_collect_info("actor") is True
    with pytest.raises(ValueError, match="cannot tell which mesh becomes 'critic'"):
        outer.set_dispatch_collect("critic", **inner.get_dispatch_collect())


def test_rank_descriptions_have_the_documented_fields():
    assert DistRankInfo(tp_rank=0, dp_rank=1, pp_rank=2, cp_rank=3).cp_rank == 3
    assert DistGlobalInfo(tp_size=1, dp_size=2, pp_size=3, cp_size=4).dp_size == 2


# ---- pools ---------------------------------------------------------------------------------------


def test_ranks_are_numbered_node_by_node():
    pool = ResourcePool([2, 3])
    assert pool.world_size == 5
    assert pool() == pool.store == [2, 3]
    assert pool.local_rank_list() == [0, 1, 0, 1, 2]
    assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
    pool.add_node(1)
    assert pool.world_size == 6


def test_a_node_without_processes_is_refused():
    with pytest.raises(ValueError, match=r"at least one process, got \[2, 0\]"):
        ResourcePool([2, 0])


def test_local_pools_only_count():
    manager = LocalResourcePoolManager({"main": [2]}, {"actor": "main", "critic": "other"})
    with pytest.raises(ValueError, match="call create_resource_pool"):
        manager.get_resource_pool("actor")
    manager.create_resource_pool()
    assert manager.get_resource_pool("actor").world_size == 2
    assert manager.get_n_gpus() == 2
    with pytest.raises(ValueError, match="unknown pool 'other'"):
        manager.get_resource_pool("critic")
    manager.add_pool("other", [3])
    assert manager.get_resource_pool("critic").world_size == 3
    assert manager.get_n_gpus() == 5
    manager.remove_pool("other")
    assert manager.get_n_gpus() == 2
