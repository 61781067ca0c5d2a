"""Rollout replicas that join a run, and leave it, while it goes on.

    <trainer.default_local_dir>/rollout_replicas      how many engines are wanted; an operator
                                                      writes the number

    between two steps                a thread                   the replica
      more are wanted  ------------>   start its ranks  ----->    load the model
      it is up: publisher.join  ----------------------------->    the published weights
                fleet.add  ---------------------------------->    requests
      fewer are wanted: fleet.retire  ----------------------->    no further requests
      it has none left: publisher.leave  -------------------->    its processes end

A replica is a worker group of its own with one engine, so no process group that runs has to grow.
The engines that the run began with stay. One that joined and is lost costs nothing but its tokens
since the last update, which are asked for elsewhere, and another one is started for it. Tokens
follow from seeds, positions and versions, so a run ends the same whoever joins or leaves.
"""

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.agent_loop.manager import AgentLoopManager
from verl.config.ppo import PPOConfig
from verl.single_controller.base.colocation import ClassWithInitArgs
from verl.single_controller.base.failures import WorkerDied
from verl.trainer.ppo.placing import JOINED_POOL, Placer
from verl.trainer.ppo.utils import Role
from verl.utils.scramble import keyed_seed
from verl.workers.rollout.base import EngineLostError
from verl.workers.rollout.factory import has_own_process, ranks_per_engine
from verl.workers.rollout.fleet import Fleet
from verl.workers.rollout.publish import Publisher, SentWeights
from verl.workers.rollout.remote import RemoteRollout, remote_rollouts

FILE = "rollout_replicas"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """An engine that was asked for while the run went on."""

    pool_name: str
    started: "Future[RemoteRollout]"
    is_serving: bool = False
    is_leaving: bool = False


class Replicas:
    """Starts and ends replicas; `update` is called between steps, when the actor is idle."""

    def __init__(
        self,
        config: PPOConfig,
        placer: Placer,
        spec: ClassWithInitArgs | None,
        publisher: Publisher,
        manager: AgentLoopManager,
        *,
        seed: int,
    ) -> None:
        """`spec` is the worker of a rollout rank; None where engines share the trainer's ranks."""
        self._config, self._placer, self._seed = config, placer, seed
        self._spec, self._publisher, self._manager = spec, publisher, manager
        self._file = Path(config.trainer.default_local_dir).expanduser() / FILE
        self._replicas: list[Replica] = []
        self._num_at_start = 0 if spec is None else len(self._fleet.engines)
        self._num_wanted: int | None = None
        """None until somebody asks."""

        self._can_start = True
        """False once a start has failed, until the number is written again."""

        self._read = ("", 0)
        """What the file said last, and when that was written."""

        self._is_closed = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the replicas that serve."""
        size = ranks_per_engine(self._config.actor_rollout_ref.rollout)
        return size * sum(replica.is_serving for replica in self._replicas)

    @property
    def is_starting(self) -> bool:
        """Whether a replica is on its way that the next `update` cannot let in yet."""
        return any(not replica.started.done() for replica in self._replicas)

    def want(self, num_engines: int) -> None:
        """Ask for so many engines, those of the start included; the file does the same."""
        if self._spec is None:
            raise ValueError("no engine has ranks of its own (actor_rollout_ref.hybrid_engine)")
        if num_engines < self._num_at_start:
            raise ValueError(
                f"{num_engines} engines are asked for, but the {self._num_at_start} that the run "
                "began with stay: ask for more, or end the run and begin it with fewer"
            )
        self._num_wanted, self._can_start = num_engines, True

    def update(self) -> dict[str, float]:
        """Let replicas join and leave, once a number was asked for; how many engines serve then."""
        self._read_file()
        if self._num_wanted is None:
            return {}
        for replica in list(self._replicas):
            if not replica.is_serving and replica.started.done():
                self._join(replica)
            elif replica.is_serving and not replica.is_leaving and self._is_lost(replica):
                replica.is_leaving = True
        staying = [replica for replica in self._replicas if not replica.is_leaving]
        num_missing = self._num_wanted - self._num_at_start - len(staying)
        for _ in range(num_missing if self._can_start else 0):
            self._start()
        for replica in staying[len(staying) + min(num_missing, 0) :]:
            replica.is_leaving = True
        for replica in list(self._replicas):
            if replica.is_leaving:
                self._leave(replica)
        return {"rollout/num_engines": sum(slot.is_serving for slot in self._fleet.slots)}

    def close(self) -> None:
        """Let nobody join any more; the placer ends the processes."""
        self._is_closed = True

    @property
    def _fleet(self) -> Fleet:
        return self._manager.rollouter.servers.fleet

    def _read_file(self) -> None:
        if not self._file.exists():
            return
        read = self._file.read_text().strip(), self._file.stat().st_mtime_ns
        if read == self._read:
            return
        self._read, text = read, read[0]
        try:
            self.want(int(text))
        except ValueError as error:
            logger.warning("%s says %r, which changes nothing: %s", self._file, text, error)

    def _start(self) -> None:
        """Start ranks and load the model on a thread; the run does not wait."""
        taken = {replica.pool_name for replica in self._replicas}
        names = (f"{JOINED_POOL}{number}" for number in range(len(taken) + 1))
        name = next(name for name in names if name not in taken)
        replica = Replica(name, Future())
        self._replicas.append(replica)

        def run() -> None:
            try:
                engine = self._started(name)
            except BaseException as error:  # told where it is waited for
                replica.started.set_exception(error)
            else:
                replica.started.set_result(engine)

        threading.Thread(target=run, name=name, daemon=True).start()

    def _started(self, pool_name: str) -> RemoteRollout:
        role, size = str(Role.Rollout), ranks_per_engine(self._config.actor_rollout_ref.rollout)
        assert self._spec is not None
        group = self._placer.start_further(pool_name, [size], {role: self._spec})[role]
        try:
            (engine,) = expendable_engines(group, self._config, self._seed)
            if self._is_closed:
                raise RuntimeError("the run has ended")
        except BaseException:
            self._placer.stop_further(pool_name)
            raise
        return engine

    def _join(self, replica: Replica) -> None:
        """Weights first, then requests."""
        assert isinstance(self._publisher, SentWeights)
        error = replica.started.exception(timeout=0)
        if error is not None:
            self._replicas.remove(replica)
            self._can_start = False
            logger.error("a rollout replica could not be started; write the number into %s again "
                         "to try again: %s", self._file, error)  # fmt: skip
            return
        engine = replica.started.result(timeout=0)
        try:
            self._publisher.join(engine)
        except WorkerDied as error:
            logger.warning("a rollout replica was lost before it had the weights: %s", error)
            self._replicas.remove(replica)
            self._placer.stop_further(replica.pool_name)
            return
        self._fleet.add(engine)
        replica.is_serving = True
        logger.info("a rollout replica has joined: %d engines", len(self._fleet.engines))

    def _leave(self, replica: Replica) -> None:
        """End it once it has no requests; until then it finishes those it has."""
        if not replica.is_serving:
            return
        engine = replica.started.result(timeout=0)
        if not self._fleet.retire(engine):
            return
        assert isinstance(self._publisher, SentWeights)
        self._publisher.leave(engine)
        self._placer.stop_further(replica.pool_name)
        self._replicas.remove(replica)
        logger.info("a rollout replica has left: %d engines", len(self._fleet.engines))

    def _is_lost(self, replica: Replica) -> bool:
        """Whether its ranks have ended; an engine alone is restarted by its rank."""
        engine = replica.started.result(timeout=0)
        try:
            engine.is_alive()
        except EngineLostError as error:
            logger.warning("a rollout replica is lost and will be replaced: %s", error)
            return True
        return False


def expendable_engines(group: Any, config: PPOConfig, seed: int) -> list[RemoteRollout]:
    """Load the model on the ranks of a group; its engines, without which a run can go on."""
    group.seed_rank(keyed_seed(seed, "ranks"))
    group.init_model()
    rollout = config.actor_rollout_ref.rollout
    leads = has_own_process(rollout.name)
    size = ranks_per_engine(rollout)
    return remote_rollouts(group, size, first_rank_leads=leads, is_expendable=True)
