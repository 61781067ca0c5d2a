"""Distillation on two ranks has the gradient of one, however weights and sequences are split."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.parity import models
from tests.parity.rows import LONGEST_ROW
from tests.parity.updates import whole_gradients
from tests.utils.two_ranks import run_on_two_ranks
from tests.workers.actor.test_distiller import KEEPS, TEMPERATURE, rows
from verl.config.actor import FSDPActorConfig
from verl.config.distillation import DistillationLossConfig
from verl.config.engine import FSDPEngineConfig
from verl.workers.actor.distiller import Distiller
from verl.workers.actor.dp_actor import Policy
from verl.workers.actor.teacher import Teacher, teacher_columns
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.inputs import prompt_groups
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.engine.outputs import TEACHER_INDEX
from verl.workers.engine.zero1 import Zero1Engine
from verl.workers.schedule import MicroBatching, plan_update

CASES = {
    "zero1": ("zero1", 1, "reverse_kl_full"),
    "fsdp": ("full", 1, "reverse_kl_full"),
    "fsdp top k": ("full", 1, "forward_kl_topk"),
    "ulysses": ("zero1", 2, "jsd"),
    "ulysses fsdp": ("full", 2, "forward_kl_full"),
    "ulysses top k": ("zero1", 2, "reverse_kl_topk"),
}
TOP_K = 4


def build(folder, architecture, sharding, sequence_group, optimizer):
    model = (folder, architecture, "actor", False)
    load = partial(models.load, *model)
    if sharding == "none":
        engine = OneDeviceEngine(load, optimizer, max_grad_norm=1e9, prefix_sharing=True)
    elif sharding == "zero1":
        engine = Zero1Engine(
            load, optimizer, sequence_group=sequence_group, max_grad_norm=1e9, prefix_sharing=True
        )
    else:
        engine = FSDPEngine(
            load,
            optimizer,
            build_skeleton=partial(models.skeleton, *model),
            config=FSDPEngineConfig(),
            compute_dtype=torch.float32,
            device="cpu",
            sequence_group=sequence_group,
            max_grad_norm=1e9,
            prefix_sharing=True,
        )
    engine.initialize()
    return engine


def gradients_of(folder, case, *, on_ranks, like=None):
    sharding, per_sequence, mode = CASES[case]
    group = dist.group.WORLD if on_ranks and per_sequence == 2 else None
    sharding = sharding if on_ranks else "none"
    engine = build(folder, "llama", sharding, group, KEEPS)
    teachers = [Teacher(build(folder, "qwen2", sharding, group, None)), Teacher(engine)]
    data = rows()
    data[TEACHER_INDEX] = torch.tensor([0, 1, 0, 0, 1, 0, 0])
    actor = FSDPActorConfig(
        use_dynamic_bsz=True, ppo_max_token_len_per_gpu=LONGEST_ROW + 3, use_kl_loss=True
    )
    plan = plan_update(
        data["attention_mask"].sum(-1).tolist(),
        data["response_mask"].sum(-1).tolist(),
        rows_per_step=len(data),
        micro_batching=MicroBatching(tokens=(LONGEST_ROW + 3) * engine.ranks_per_sequence),
        num_ranks=engine.get_data_parallel_size(),
        groups=prompt_groups(data),
    )
    own = data[plan.rows_of(engine.get_data_parallel_rank())]
    loss = DistillationLossConfig(loss_mode=mode, topk=TOP_K)
    if mode.endswith("topk"):
        passes = plan.steps[0].passes[engine.get_data_parallel_rank()]
        answers = teacher_columns(
            teachers, own, micro_batching=passes, temperature=TEMPERATURE, top_k=TOP_K
        )
        own = own.copy().update(answers)
    policy = Policy(actor, engine, Distiller(loss, actor, teachers))
    metrics = policy.update_policy(own, rows_per_step=7, temperature=TEMPERATURE, plan=plan)
    kept = engine.state_dict()["optimizer"]["optimizer"]["state"].values()
    if like is None:
        names = engine.optimizer.masters
        found = {n: s["gradient"].clone() for n, s in zip(names, kept, strict=True)}
    else:
        found = whole_gradients(engine, like)
    return metrics["distillation/loss"], {n: g.numpy() for n, g in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    models.save_models(folder)
    return folder


def test_two_ranks_distil_as_one_does(folder, tmp_path):
    alone = {case: gradients_of(folder, case, on_ranks=False) for case in CASES}

    def work(rank):
        del rank
        found = {}
        for case, (_, expected) in alone.items():
            like = {name: torch.from_numpy(value) for name, value in expected.items()}
            found[case] = gradients_of(folder, case, on_ranks=True, like=like)
        return found

    for found in run_on_two_ranks(work, tmp_path):
        for case, (loss, gradients) in found.items():
            expected_loss, expected = alone[case]
            assert loss == pytest.approx(expected_loss, rel=1e-4), case
            for name, value in expected.items():
                close = torch.from_numpy(value)
                atol = 1e-5 * max(1e-2, float(close.abs().max()))
                torch.testing.assert_close(
                    torch.from_numpy(gradients[name]), close, rtol=1e-4, atol=atol, msg=case
                )
