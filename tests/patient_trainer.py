"""A trainer that waits at the end of a step until replicas that were asked for are up."""

import time

from verl.trainer.ppo.v1 import PPOTrainerSeparateAsync, register_trainer


@register_trainer("separate_async")
class PatientTrainer(PPOTrainerSeparateAsync):
    def finish_step(self, batch, step):
        super().finish_step(batch, step)
        give_up = time.monotonic() + 120
        while self.replicas.is_starting and time.monotonic() < give_up:
            time.sleep(0.01)
