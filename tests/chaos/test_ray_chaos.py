"""RPCs of Ray that fail, before or after they had their effect: no call runs twice.

Ray's own injection (`RAY_testing_rpc_failure`) drops requests and replies, so that its clients send
again what may have been carried out. It is read when a cluster starts; so a cluster of its own.
A call of which Ray cannot tell whether it ran is a lost worker; a run then starts over from its
last commit. Nothing is ever carried out twice, and no answer is that of another call.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_CALLS = int(os.environ.get("RAY_CALLS", "2000"))
"""To two ranks each."""
SECONDS = 500 + NUM_CALLS / 20
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(SECONDS + 100)]

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import sys
import ray
from tests.chaos.counting import Counting
from verl.single_controller import WorkerDied
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

ray.init(num_cpus=24, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Counting)))
num_calls = int(sys.argv[1])
answered, lost, pending = set(), 0, []
for number in range(num_calls):
    pending.append((number, group.count(number)))
    if len(pending) == 200 or number == num_calls - 1:
        for sent, references in pending:
            try:
                found = group.resolve(references)
            except WorkerDied:  # Ray cannot tell whether it ran; a run would start over
                lost += 1
                continue
            assert found == [sent, sent], (sent, found)
            answered.add(sent)
        pending = []
for attempt in range(100):
    try:
        seen = group.seen()
        break
    except WorkerDied:
        continue
for rank, counts in enumerate(seen):
    assert counts["repeated"] == [], (rank, counts["repeated"][:5])
    assert len(answered) <= counts["calls"] <= num_calls, (rank, counts["calls"])
assert len(answered) + lost == num_calls
group.shutdown()
print("ANSWERED", len(answered), "LOST", lost)
"""
FAILURES = {
    "calls": ("CoreWorkerService.grpc_client.PushTask",),
    "placement": (
        "NodeManagerService.grpc_client.PrepareBundleResources",
        "NodeManagerService.grpc_client.CommitBundleResources",
        "NodeManagerService.grpc_client.RequestWorkerLease",
        "ray::rpc::ActorInfoGcsService.grpc_client.CreateActor",
    ),
}
PERCENT = 5
"""So often each of these RPCs loses its request, and as often its reply."""


def injected(names):
    once = {"num_failures": -1, "req_failure_prob": PERCENT, "resp_failure_prob": PERCENT}
    return json.dumps(dict.fromkeys(names, once))


@pytest.mark.parametrize("name", FAILURES)
def test_no_call_runs_twice_when_rpcs_fail_on_ray(name):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(NUM_CALLS)],
        env={**os.environ, "RAY_testing_rpc_failure": injected(FAILURES[name])},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    _, answered, _, lost = ended.stdout.split()[-4:]
    assert int(answered) > NUM_CALLS / 5, "a busy machine loses more, and then nothing is shown"
    assert int(answered) + int(lost) == NUM_CALLS
