"""Trainers of the modes of `trainer.v1.trainer_mode`, with hooks around what a run does.

A recipe derives one of the three, overrides hooks or stages, and registers it for its mode:

    @register_trainer("colocate_async")
    class Mine(PPOTrainerColocateAsync):
        def on_step_end(self): ...

in a module that `actor_rollout_ref.model.external_lib` names. Runs of that mode then use it.

    fit                              on_train_begin ... on_train_end
      _validate                        on_validate_begin, on_validate_end
      train_step                       on_step_begin, on_step_end
        rollout                          on_sample_begin, on_sample_end
"""

from collections.abc import Callable

from verl.protocol import DataProto
from verl.trainer.ppo import trainer
from verl.trainer.ppo.asynchronous import AsyncTrainer
from verl.trainer.ppo.context import Report, StepContext
from verl.trainer.ppo.session import Metrics
from verl.utils.registry import Registry


class PPOTrainer(trainer.PPOTrainer):
    """The trainer of every mode; `self.global_steps` is the step that a hook is about."""

    def on_init_end(self) -> None:
        """Workers run and models are loaded."""

    def on_train_begin(self) -> None:
        """Before a checkpoint is looked for."""

    def on_train_end(self) -> None:
        """After the last step, with its validation and checkpoint."""

    def on_validate_begin(self) -> None:
        """Before responses to the validation set are generated."""

    def on_validate_end(self) -> None:
        """When they are graded."""

    def on_step_begin(self) -> None:
        """Before a training step."""

    def on_step_end(self) -> None:
        """After its update, before it is reported and saved."""

    def on_sample_begin(self) -> None:
        """Before a step waits for its responses."""

    def on_sample_end(self) -> None:
        """When they are there."""

    def init_workers(self) -> None:
        super().init_workers()
        self.on_init_end()

    def fit(self) -> None:
        self.on_train_begin()
        super().fit()
        self.on_train_end()

    def _validate(self, report: Report | None = None) -> Metrics:
        self.on_validate_begin()
        metrics = super()._validate(report)
        self.on_validate_end()
        return metrics

    def train_step(self, step: StepContext) -> DataProto:
        self.on_step_begin()
        batch = super().train_step(step)
        self.on_step_end()
        return batch

    def rollout(self, step: StepContext) -> DataProto:
        self.on_sample_begin()
        batch = super().rollout(step)
        self.on_sample_end()
        return batch


class PPOTrainerSync(PPOTrainer):
    """A step trains on what the current policy sampled."""


class PPOTrainerColocateAsync(PPOTrainer, AsyncTrainer):
    """Generation pauses for each update and goes on with the new weights, on the same devices."""


class PPOTrainerSeparateAsync(PPOTrainer, AsyncTrainer):
    """Generation runs beside training, on ranks of its own."""


trainers: Registry[type[trainer.PPOTrainer]] = Registry(
    "trainer mode",
    sync=PPOTrainerSync,
    colocate_async=PPOTrainerColocateAsync,
    separate_async=PPOTrainerSeparateAsync,
    one_step_off=PPOTrainerSeparateAsync,
    fully_async=PPOTrainerSeparateAsync,
)
WITHOUT_HOOKS: dict[type, type[trainer.PPOTrainer]] = {
    PPOTrainerSync: trainer.PPOTrainer,
    PPOTrainerColocateAsync: AsyncTrainer,
    PPOTrainerSeparateAsync: AsyncTrainer,
}
"""What the built-in classes, whose hooks do nothing, come to."""


def register_trainer(mode: str) -> Callable[[type], type]:
    """A decorator: runs of this mode use the class, which derives the one of its mode."""

    def add(cls: type) -> type:
        base = WITHOUT_HOOKS.get(trainers[mode], trainers[mode])  # an unknown mode is refused
        if not issubclass(cls, AsyncTrainer if issubclass(base, AsyncTrainer) else base):
            raise ValueError(
                f"{cls.__name__} is registered for the mode {mode!r} and is no {base.__name__}; "
                "derive it from the class of its mode in verl.trainer.ppo.v1"
            )
        return trainers.register(mode)(cls)

    return add


def get_trainer_cls(mode: str) -> type[trainer.PPOTrainer]:
    """The class of a mode: a registered one, or the built-in."""
    return trainers[mode]


def trainer_of_mode(mode: str) -> type[trainer.PPOTrainer]:
    """What a run of this mode makes."""
    cls = trainers[mode]
    return WITHOUT_HOOKS.get(cls, cls)
