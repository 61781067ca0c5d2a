"""An engine with weights of its own that can be made to do everything wrong that engines do."""

from copy import deepcopy
from dataclasses import replace

import torch

from tests.tiny_models import tiny_model
from tests.workers.rollout.helpers import training_log_probs
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.base import Rollout
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.trained import LocalPolicy

LIMITS = EngineLimits(max_num_seqs=8, max_prompt_tokens=160, max_response_tokens=32)


def facts(log_probs="processed", max_model_len=192):
    return EngineFacts(
        name="faulty",
        version="1",
        log_probs=log_probs,
        can_sleep=True,
        max_model_len=max_model_len,
    )


class FaultyEngine(Rollout):
    """The built-in engine on a copy of `model`.

    `skips(name, number)` says whether update `number` leaves a tensor out; `reports(engine,
    request, output)` gives the log-probabilities that are reported.
    """

    def __init__(self, model, *, skips=None, reports=None, keeps_cache=False, ignores_seeds=False):
        self.model = deepcopy(model)
        self._engine = NativeEngine(
            self.model, LIMITS, eos_token_ids=[2], version=lambda: self.version
        )
        self._skips = skips or (lambda name, number: False)
        self._reports = reports
        self._keeps_cache = keeps_cache
        self._ignores_seeds = ignores_seeds
        self._first_run = {}  # prompt -> how many updates there had been
        self.version = 0
        self.num_updates = 0

    def update(self, weights, version):
        targets = self.model.state_dict()
        with torch.no_grad():
            for name, weight in weights:
                if not self._skips(name, self.num_updates):
                    targets[name].copy_(weight)
        self.num_updates += 1
        self.version = version

    @property
    def policy_version(self):
        return self.version

    def generate_batch(self, requests):
        if self._ignores_seeds:
            requests = [without_seed(request) for request in requests]
        answers = self._engine.generate_batch(requests)
        for request, (output,) in zip(requests, answers, strict=True):
            if self._reports is not None:
                output.log_probs = self._reports(self, request, output)
        if self._keeps_cache:
            for request, (output,) in zip(requests, answers, strict=True):
                first_run = self._first_run.setdefault(tuple(request.prompt_ids), self.num_updates)
                if first_run < self.num_updates:
                    output.log_probs = [value - 1 for value in output.log_probs]
        return answers

    def submit(self, request, on_end=None):
        raise NotImplementedError

    def abort(self, request_id):
        pass

    def close_session(self, session_id):
        pass

    def sleep(self):
        self._engine.sleep()

    def wake_up(self):
        self._engine.wake_up()


def without_seed(request):
    return replace(request, params=replace(request.params, seed=None))


def tempered(engine, request, output):
    """Log-probabilities after temperature, before top-p."""
    prompt, temperature = list(request.prompt_ids), request.params.temperature or 1.0
    return training_log_probs(engine.model, prompt, output.token_ids, temperature).tolist()


def raw(engine, request, output):
    """Log-probabilities before temperature."""
    prompt = list(request.prompt_ids)
    return training_log_probs(engine.model, prompt, output.token_ids).tolist()


def processed(engine, request, output):
    """Log-probabilities after temperature and top-p."""
    return output.log_probs


def trained_policy(model=None, update=lambda weights, version: None):
    """A policy in training and the engine behind it."""
    model = model or tiny_model("llama")
    engine = OneDeviceEngine(lambda: model)
    engine.initialize()
    return LocalPolicy(engine, update), engine
