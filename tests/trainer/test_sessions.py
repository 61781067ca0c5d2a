"""Training learns the same from a session however many rows it is, and from broken ones nothing."""

import asyncio
import uuid
import zlib
from typing import ClassVar

import pytest
import torch

from tests.toy import ACTOR, ROLLOUT, toy_run, weights
from verl.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.sessions import BrokenWorld
from verl.protocol.trajectory import InfraFault


def parity(said):
    return float(sum(said.token_ids) % 2)


class Answering(AgentLoopBase):
    """One turn of the model, up to what a subclass makes of it."""

    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        said = await self.server_manager.generate(
            uuid.uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params
        )
        return self.result(prompt, said, sampling_params["seed"])

    def result(self, prompt, said, seed):
        return self.row(prompt, said.token_ids, said.log_probs, 0, reward_score=parity(said))

    def row(self, prompt, ids, log_probs, num_known, **fields):
        """A row whose first tokens are trained in another one."""
        mask = [0] * num_known + [1] * (len(ids) - num_known)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids, response_mask=mask, response_logprobs=log_probs,
            num_turns=2, extra_fields={"tool_outcomes": {"reply": 2}}, **fields,
        )  # fmt: skip


class Cutting(Answering):
    """The same turn as up to three rows: what came before is in the prompt, or masked."""

    def result(self, prompt, said, seed):
        ids, log_probs = said.token_ids, said.log_probs
        first, second = sorted((seed % (len(ids) + 1), seed // 7 % (len(ids) + 1)))
        rows = [self.row(prompt, ids[:first], log_probs[:first], 0, reward_score=parity(said))]
        rows.append(self.row(prompt, ids[:second], log_probs[:second], first))
        rows.append(self.row(prompt + ids[:second], ids[second:], log_probs[second:], 0))
        return rows


class Breaking(Answering):
    """Of some samples, which their seeds choose, the environment is broken."""

    def __init__(self, *args, percent, returns_nothing=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.percent, self.returns_nothing = percent, returns_nothing

    def result(self, prompt, said, seed):
        if zlib.crc32(str(seed).encode()) % 100 < self.percent:
            if self.returns_nothing:
                return None
            raise InfraFault("connection reset by the sandbox", reason="sandbox")
        return super().result(prompt, said, seed)


class Prepared(Breaking):
    """Notes where its class is prepared and closed."""

    events: ClassVar[list] = []

    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        cls.events.append("prepared")

    @classmethod
    def close_class(cls, config):
        cls.events.append("closed")


def run(toy, folder, loop, *changes, **options):
    folder.mkdir()
    lines = [f"- name: tried\n  _target_: tests.trainer.test_sessions.{loop}\n"]
    lines += [f"  {name}: {value}\n" for name, value in options.items()]
    (folder / "loops.yaml").write_text("".join(lines))
    return toy_run(
        toy,
        folder,
        f"{ROLLOUT}.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        f"{ROLLOUT}.agent.default_agent_loop=tried",
        "data.max_prompt_length=16",
        "trainer.total_training_steps=1",
        *changes,
    )


def test_broken_worlds_of_a_validation_are_counted_and_loops_are_closed(toy, tmp_path):
    Prepared.events = []
    changes = ["trainer.val_only=true", "trainer.val_before_train=true"]
    changes += [f"{ROLLOUT}.multi_turn.max_infra_ratio=1.0", f"{ROLLOUT}.val_kwargs.n=8"]
    (step,), _ = run(toy, tmp_path / "broken", "Prepared", *changes, percent=30)
    assert 0 < step["val-aux/env_faults"] < 24
    assert Prepared.events == ["prepared", "closed"]


@pytest.mark.parametrize(
    ("estimator", "mode"),
    [
        ("gae", "seq-mean-token-mean"),
        pytest.param("grpo", "seq-mean-token-sum", marks=pytest.mark.slow),
        pytest.param("rloo", "token-mean", marks=pytest.mark.slow),
        pytest.param("remax", "seq-mean-token-mean", marks=pytest.mark.slow),
        pytest.param("reinforce_plus_plus", "seq-mean-token-sum", marks=pytest.mark.slow),
    ],
)
def test_a_step_learns_the_same_from_sessions_in_several_rows(toy, tmp_path, estimator, mode):
    changes = [
        f"algorithm.adv_estimator={estimator}",
        f"{ACTOR}.loss_agg_mode={mode}",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu=64",
        "algorithm.use_kl_in_reward=true",
        "critic.loss_agg_mode=seq-mean-token-mean",
        # The second mini-batch would show differences of the first, blown up by Adam.
        f"{ACTOR}.optim.lr=1e-9",
        "critic.optim.lr=1e-9",
    ]
    (whole,), _ = run(toy, tmp_path / "whole", "Answering", *changes)
    (cut,), trainer = run(toy, tmp_path / "cut", "Cutting", *changes)
    assert len(trainer.batch) > 30
    assert cut["rollout/rows_per_session"] == len(trainer.batch) / 16
    compared = [
        name
        for name in whole
        if name.startswith(("critic/", "actor/", "reward/", "num_turns", "tool_call_counts"))
        and "mfu" not in name
    ]
    assert {"actor/grad_norm", "critic/score/mean", "critic/advantages/max"} <= set(compared)
    assert whole["actor/num_optimizer_steps"] == 2
    differs = {
        name: (whole[name], cut[name])
        for name in compared
        if cut[name] != pytest.approx(whole[name], rel=2e-5, abs=1e-6)
    }
    assert differs == {}


@pytest.mark.slow
def test_two_ranks_learn_the_same_from_sessions_in_several_rows(toy, tmp_path):
    changes = [
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        f"{ACTOR}.optim.lr=1e-9",
    ]
    ranks = ["trainer.n_gpus_per_node=2", "trainer.controller=local"]
    (whole,), _ = run(toy, tmp_path / "whole", "Answering", *changes)
    (cut,), _ = run(toy, tmp_path / "cut", "Cutting", *changes, *ranks)
    assert cut["rollout/rows_per_session"] > 2
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/advantages/max", "actor/entropy"):
        assert cut[name] == pytest.approx(whole[name], rel=2e-5, abs=1e-6), name


@pytest.mark.slow
def test_dynamic_sampling_and_validation_count_sessions(toy, tmp_path):
    changes = [
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_reward",
        "algorithm.filter_groups.max_num_gen_batches=0",
        "data.gen_batch_size=4",
        "trainer.val_before_train=true",
        f"{ACTOR}.optim.lr=1e-9",
    ]
    whole, _ = run(toy, tmp_path / "whole", "Answering", *changes)
    cut, trainer = run(toy, tmp_path / "cut", "Cutting", *changes)
    assert len(trainer.batch) > 30
    for before, now in zip(whole, cut, strict=True):
        for name in before:
            if name.startswith(("val-", "train/", "critic/", "reward/", "actor/grad_norm")):
                assert now[name] == pytest.approx(before[name], rel=2e-5, abs=1e-6), name
    assert any(name.startswith("val-core") for name in whole[0])
    scores = trainer.batch.batch["token_level_scores"].sum(-1)
    assert len(set(trainer.batch.non_tensor_batch["session_uid"])) == 16
    assert (scores != 0).sum() == sum(step["critic/score/mean"] * 16 for step in cut[1:])


def test_a_broken_environment_takes_its_trajectories_out_and_changes_no_other(toy, tmp_path):
    change = f"{ROLLOUT}.multi_turn.max_infra_ratio=0.5"
    (broken,), trainer = run(toy, tmp_path / "a", "Breaking", change, percent=20)
    (absent,), control = run(
        toy, tmp_path / "b", "Breaking", change, percent=20, returns_nothing="true"
    )
    ours, theirs = trainer.batch, control.batch
    for name in ("responses", "token_level_scores", "advantages"):
        assert torch.equal(ours.batch[name], theirs.batch[name])
    learnt, expected = weights(trainer), weights(control)
    assert all(torch.equal(learnt[name], expected[name]) for name in expected)
    assert broken["rollout/env_faults"] == broken["rollout/env_faults/sandbox"] > 0
    assert broken["rollout/env_faults"] == absent["rollout/empty_sessions"]

    (_,), untouched = run(toy, tmp_path / "c", "Breaking", percent=0)
    everything = rewarded(untouched.batch)
    assert len(ours) < len(everything) == 16
    assert all(row in everything for row in rewarded(ours))


def rewarded(batch):
    """Prompt, response and reward of each row."""
    columns = [batch.batch[name].tolist() for name in ("responses", "token_level_scores")]
    return list(zip(batch.non_tensor_batch["uid"], *columns, strict=True))


def test_a_run_in_a_broken_world_stops_before_it_learns_from_it(toy, tmp_path):
    with pytest.raises(BrokenWorld, match=r"sandbox \d+\), e.g. connection reset by the sandbox"):
        run(toy, tmp_path / "run", "Breaking", percent=60)
