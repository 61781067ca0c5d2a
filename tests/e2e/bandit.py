"""A task small enough to be known exactly, played by an engine that rounds its weights.

A response is three of twelve tokens, its reward the share of sevens. All 1728 responses can be
listed, so the gradient of the expected reward, and what an estimate from the engine's responses is
on average, are sums and not samples.
"""

import itertools
from functools import cached_property

import torch
from tensordict import TensorDict

from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from tests.workers.rollout.mismatched import mismatched_spec, rounded
from verl.algos.rollout_correction import (
    apply_bypass_mode,
    compute_rollout_correction_and_add_to_batch,
)
from verl.config.actor import FSDPActorConfig
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.optimizer import FSDPOptimizerConfig
from verl.protocol import DataProto
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.sequence import EngineLimits
from verl.workers.rollout.process.client import EngineProcess
from verl.workers.rollout.sequences import padded_sequences

VOCABULARY, NUM_TOKENS, SEVEN, PROMPT = 12, 3, 7, [3, 4, 5]
BITS, NUM_SAMPLES, NUM_ESTIMATES = 4, 4096, 16
LIMITS = EngineLimits(max_num_seqs=512, max_prompt_tokens=8, max_response_tokens=8)


class Bandit:
    """A policy in training, the engine that plays for it, and what the engine played."""

    def __init__(self, folder):
        model = tiny_model("llama", vocab_size=VOCABULARY)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        optimizer = FSDPOptimizerConfig(lr=1.0, optimizer="SGD", weight_decay=0.0)
        self.training = OneDeviceEngine(lambda: model, optimizer, max_grad_norm=1e9)
        self.training.initialize()
        self.start = copies(model)
        self.process = EngineProcess(mismatched_spec(folder, LIMITS, bits=BITS))
        self.process.start()

    def play(self, num_samples=NUM_SAMPLES, seed=0):
        """What the engine makes of the current weights."""
        self.process.update_weights(self.training.get_per_tensor_param(), version=1)
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
        request = GenerationRequest(
            request_id="play", prompt_ids=PROMPT, params=params, num_samples=num_samples
        )
        (outputs,) = self.process.generate_batch([request])
        played = self.rows([output.token_ids for output in outputs])
        played["rollout_log_probs"] = torch.tensor([output.log_probs for output in outputs])
        return played

    @cached_property
    def played(self):
        return self.play()

    def rows(self, responses):
        """A batch as the trainer has it before the update; advantages are rewards less a tenth,
        which is about their expectation at the start."""
        columns = padded_sequences(
            [PROMPT] * len(responses),
            responses,
            [[1] * NUM_TOKENS] * len(responses),
            prompt_length=len(PROMPT),
            response_length=NUM_TOKENS,
            pad_token_id=0,
        )
        rows = TensorDict(columns, batch_size=len(responses))
        rows["old_log_probs"] = self.log_probs(rows)
        rows["advantages"] = (rewards(rows) - 0.1)[:, None].expand(-1, NUM_TOKENS)
        return rows

    def log_probs(self, rows):
        found = self.training.infer_batch(rows, micro_batching=MicroBatching(rows=2048))
        return found["log_probs"]

    # ---- known exactly ---------------------------------------------------------------------------

    @cached_property
    def all_rows(self):
        return self.rows(list(itertools.product(range(VOCABULARY), repeat=NUM_TOKENS)))

    @cached_property
    def rollout_log_probs(self):
        """Of all responses, as the engine with its rounded weights gives them."""
        rows = self.all_rows
        with torch.no_grad():
            for weight in self.training.module.parameters():
                weight.copy_(rounded(weight, BITS))
        found = self.log_probs(rows)
        self.restore()
        return found

    def exact_gradient(self, weights):
        """The descent direction of sum_y weights(y) A(y) log pi(y), over all responses."""

        def loss(columns, rows):
            log_prob = columns["log_probs"].sum(1)
            return -(rows["weight"] * rows["advantages"][:, 0] * log_prob).sum(), {}

        rows = self.all_rows.copy().update({"weight": weights})
        self.training.train_batch(rows, loss, micro_batching=MicroBatching(rows=1728))
        return self.take_step()

    @cached_property
    def policy_gradient(self):
        return self.exact_gradient(self.all_rows["old_log_probs"].sum(1).exp())

    def share(self, gradient):
        """How much of the policy gradient there is in another: 1 if nothing is missing."""
        return float(gradient @ self.policy_gradient / self.policy_gradient.norm() ** 2)

    def expected_reward(self):
        """Of the policy in training, as it is."""
        return float(self.log_probs(self.all_rows).sum(1).exp() @ rewards(self.all_rows))

    # ---- estimated through the actor -------------------------------------------------------------

    def estimates(self, correction: RolloutCorrectionConfig):
        """(NUM_ESTIMATES,) shares of the policy gradient, each from a part of what was played."""
        return torch.tensor(
            [
                self.share(self.estimate(part, correction))
                for part in self.played.split(NUM_SAMPLES // NUM_ESTIMATES)
            ]
        )

    def estimate(self, rows, correction):
        config = FSDPActorConfig(
            loss_agg_mode="seq-mean-token-sum", ppo_micro_batch_size_per_gpu=len(rows)
        )
        batch = DataProto(batch=rows.copy())
        if correction.bypass_mode:
            apply_bypass_mode(batch, correction, config.policy_loss)
        elif correction.rollout_is or correction.rollout_rs:
            batch, _ = compute_rollout_correction_and_add_to_batch(batch, correction)
        version = None if correction.bypass_mode else self.training.policy_version
        DataParallelPPOActor(config, self.training).update_policy(
            batch.batch, rows_per_step=len(rows), temperature=1.0, old_policy_version=version
        )
        return self.take_step()

    def take_step(self):
        """The step that was made, as a vector; the weights are then as before it."""
        moved = dict(self.training.module.named_parameters())
        step = torch.cat([(w.detach() - self.start[n]).flatten() for n, w in moved.items()])
        self.restore()
        return step

    @torch.no_grad()
    def restore(self):
        for name, weight in self.training.module.named_parameters():
            weight.copy_(self.start[name])

    # ---- learning --------------------------------------------------------------------------------

    def learn(self, correction: RolloutCorrectionConfig | None, *, num_steps, rate=0.03):
        """The expected reward before and after each step; None goes along the exact gradient.

        Every step is made from 512 responses of the engine to the weights of that moment.
        """
        first, rewards_so_far = self.start, [self.expected_reward()]
        for seed in range(num_steps):
            self.start = copies(self.training.module)
            if correction is None:
                step = self.exact_gradient(self.log_probs(self.all_rows).sum(1).exp())
            else:
                step = self.estimate(self.play(num_samples=512, seed=seed), correction)
            parameters = dict(self.training.module.named_parameters())
            parts = step.split([weight.numel() for weight in parameters.values()])
            with torch.no_grad():
                for weight, part in zip(parameters.values(), parts, strict=True):
                    weight.add_(part.view_as(weight), alpha=rate)
            rewards_so_far.append(self.expected_reward())
        self.start = first
        self.restore()
        return rewards_so_far


def copies(module):
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def rewards(rows):
    return (rows["responses"] == SEVEN).float().mean(1)
