"""Rollout replicas join a run and leave it while it goes on, and it ends the same."""

import time

from tests.toy import toy_run
from tests.trainer.test_async_placing import separate, stopped, straight  # noqa: F401
from tests.trainer.test_asynchronous import Records
from tests.trainer.test_resume import same_weights
from verl.trainer.ppo.replicas import FILE

PATIENCE_SECONDS = 120


class Operated(Records):
    """At the end of these steps an operator writes these numbers of engines; the run waits until
    what was asked for is up, so that it joins at the next step."""

    numbers: dict
    in_service: list
    requests: list

    def finish_step(self, batch, step):
        number = self.numbers.get(step.step)
        if number is not None:
            path = self.output / FILE
            path.write_text(f"{number}\n")
        super().finish_step(batch, step)
        wait_for_start(self)
        slots = self.async_rollout_manager.rollouter.servers.fleet.slots
        self.in_service.append(step.report.metrics["rollout/num_engines"])
        self.requests.append([slot.num_requests for slot in slots])


def wait_for_start(trainer):
    give_up = time.monotonic() + PATIENCE_SECONDS
    while trainer.replicas.is_starting and time.monotonic() < give_up:
        time.sleep(0.01)


def operated(toy, folder, numbers, *changes, cls=Operated, **fields):
    record = {"seen": [], "numbers": numbers, "output": folder, "in_service": [], "requests": []}
    kind = type("Operated", (cls,), {**record, **fields})
    changes = (*changes, f"trainer.default_local_dir={folder}")
    metrics, trainer = toy_run(toy, folder, *changes, trainer_class=kind)
    trainer.stop_workers()
    return kind, trainer, metrics


def test_a_replica_joins_and_leaves_and_the_run_is_the_same(toy, tmp_path, straight):  # noqa: F811
    numbers = {1: 2, 4: 1}
    kind, trainer, _ = operated(toy, tmp_path, numbers, *separate(tmp_path, "rank"))
    assert kind.in_service == [1, 2, 2, 1, 1, 1]
    assert min(kind.requests[2]) > 0  # both have worked
    assert [len(requests) for requests in kind.requests][-1] == 1
    assert kind.seen == straight[0]
    assert same_weights(trainer, straight[1])
