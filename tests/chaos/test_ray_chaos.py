"""RPCs of Ray that fail, before or after they had their effect: each call still runs once.

Ray's own injection (`RAY_testing_rpc_failure`) drops requests and replies, so that its clients send
again what may have been carried out. It is read when a cluster starts; so a cluster of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import sys
import ray
from tests.chaos.counting import Counting
from verl.single_controller import ClassWithInitArgs
from verl.single_controller.ray import RayWorkerGroup, RayResourcePool

ray.init(num_cpus=24, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
group = RayWorkerGroup(pool, ClassWithInitArgs(Counting))
num_calls = int(sys.argv[1])
pending = []
for number in range(num_calls):
    pending.append((number, group.count(number)))
    if len(pending) == 200 or number == num_calls - 1:
        for sent, future in pending:
            found = future.get()
            assert found == [sent, sent], (sent, found)
        pending = []
for rank, seen in enumerate(group.seen()):
    assert seen["calls"] == num_calls, (rank, seen["calls"], num_calls)
    assert seen["repeated"] == [], (rank, seen["repeated"][:5])
group.shutdown()
print("CALLS", num_calls)
"""
FAILURES = {
    "calls": ("CoreWorkerService.grpc_client.PushTask",),
    "placement": (
        "NodeManagerService.grpc_client.PrepareBundleResources",
        "NodeManagerService.grpc_client.CommitBundleResources",
        "NodeManagerService.grpc_client.RequestWorkerLease",
        "ray::rpc::ActorInfoGcsService.grpc_client.CreateActor",
    ),
    "all": ("*",),
}
PERCENT = 5
"""So often each of these RPCs loses its request, and as often its reply."""


def injected(names):
    once = {"num_failures": -1, "req_failure_prob": PERCENT, "resp_failure_prob": PERCENT}
    return json.dumps(dict.fromkeys(names, once))


@pytest.mark.parametrize("name", FAILURES)
def test_each_call_runs_once_when_rpcs_fail_on_ray(name):
    num_calls = 5000
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(num_calls)],
        env={**os.environ, "RAY_testing_rpc_failure": injected(FAILURES[name])},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"CALLS {num_calls}" in ended.stdout
