"""PRIME: its model's gradient, its stages, and that both of its rewards teach."""

import numpy as np
import pytest
import torch

from tests.tiny_tokenizer import save_tiny_model
from tests.toy import ACTOR, ROLLOUT, recipe_run
from tests.trainer.test_ranks import TWO_LOCAL, assert_same_run
from verl.algos.prime import implicit_rewards
from verl.config.engine import FSDPEngineConfig
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.config.presets import PRESETS
from verl.config.reward import (
    FSDPRewardModelConfig,
    FSDPRewardModelModelConfig,
    ImplicitOptimizerConfig,
)
from verl.config.validate import validate
from verl.protocol import DataProto
from verl.single_controller import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.recipes.prime import (
    ACCURACY,
    LOG_PROBS,
    REF_LOG_PROBS,
    TEMPERATURE,
    ImplicitRewardWorker,
    outcomes,
    refuse_split_sessions,
)

B, P, T = 6, 3, 5


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("implicit")
    save_tiny_model(folder)
    return str(folder)


def prime_settings(toy, *changes):
    defaults = [f"{key}={value}" for key, value in PRESETS["prime_trainer"].values.items()]
    return [
        *defaults,
        f"reward_model.model.path={toy / 'model'}",
        "reward_model.micro_batch_size_per_gpu=64",
        "reward_model.reward_manager=naive",  # the preset's grades in processes
        "data.filter_accuracy=false",
        "data.filter_truncate=false",
        "data.val_files=[]",
        *changes,
    ]


def prime_run(toy, output, *changes):
    return recipe_run(toy, output, "prime", *prime_settings(toy, *changes))


def rows():
    """Responses of various lengths to random prompts, half of them right."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 20, (B, P + T), generator=draw)
    lengths = torch.tensor([5, 2, 4, 1, 3, 5])
    mask = (torch.arange(T) < lengths[:, None]).long()
    attention = torch.cat([torch.ones(B, P, dtype=torch.long), mask], 1)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1) * attention,
            "responses": ids[:, P:],
            "response_mask": mask,
            ACCURACY: torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 1.0]),
        },
        non_tensors={"uid": np.array(list("aabbcc"), dtype=object)},
        meta_info={TEMPERATURE: 1.0},
    )


def group_of(path, *, micro_batch=64, mini_batch=3, update="before", lr=0.01):
    model = FSDPRewardModelModelConfig(
        path=path,
        update=update,
        beta_train=0.5,
        enable_gradient_checkpointing=False,
        fsdp_config=FSDPEngineConfig(),
        optim=ImplicitOptimizerConfig(lr=lr),
    )
    config = FSDPRewardModelConfig(
        enable=True,
        model=model,
        micro_batch_size_per_gpu=micro_batch,
        mini_batch_size=mini_batch,
        rollout_n=2,
    )
    group = LocalWorkerGroup(
        ResourcePool([1]), ClassWithInitArgs(ImplicitRewardWorker, config, device="cpu")
    )
    group.init_model()
    return group


def test_a_fresh_model_rewards_nothing_and_has_the_loss_of_a_coin(model_path):
    group = group_of(model_path)
    batch = rows().union(group.compute_ref_log_prob(rows()))
    assert torch.equal(
        group.compute_rm_log_prob(batch).batch[LOG_PROBS], batch.batch[REF_LOG_PROBS]
    )
    metrics = group.update_rm(batch).meta_info["metrics"]
    assert metrics["reward_model/dpo_loss"] == [pytest.approx(np.log(2), abs=1e-6)]


def trained(path, **options):
    """The model's log-probs after two updates on a batch, and its gradient norm."""
    group = group_of(path, **options)
    batch = rows().union(group.compute_ref_log_prob(rows()))
    metrics = [group.update_rm(batch).meta_info["metrics"] for _ in range(2)]
    norms = [found["reward_model/grad_norm"][0] for found in metrics]
    return group.compute_rm_log_prob(batch).batch[LOG_PROBS], norms


def test_the_update_does_not_depend_on_the_split_into_micro_batches(model_path):
    expected, norms = trained(model_path, micro_batch=64)
    assert norms[0] > 0.01
    for size in (1, 2, 5):
        found, others = trained(model_path, micro_batch=size)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        assert others == pytest.approx(norms, rel=1e-4)


def test_the_model_learns_to_tell_right_from_wrong(model_path):
    group = group_of(model_path, lr=0.02)
    batch = rows().union(group.compute_ref_log_prob(rows()))
    for _ in range(8):
        group.update_rm(batch)
    found = group.compute_rm_log_prob(batch).batch[LOG_PROBS]
    mask = batch.batch["response_mask"]
    logits = implicit_rewards(found, batch.batch[REF_LOG_PROBS], mask, beta=0.5).sum(-1)
    accuracy = batch.batch[ACCURACY]
    assert (logits[accuracy == 1] > 0.5).all()
    assert (logits[accuracy == 0] < -0.5).all()


def test_passes_that_train_give_the_log_probs_from_before_their_step(model_path):
    group = group_of(model_path, update="after", micro_batch=2)
    batch = rows().union(group.compute_ref_log_prob(rows()))
    before = group.compute_rm_log_prob(batch).batch[LOG_PROBS]
    found = group.update_rm(batch).batch[LOG_PROBS]
    torch.testing.assert_close(found, before, rtol=0, atol=1e-6)
    assert not torch.equal(group.compute_rm_log_prob(batch).batch[LOG_PROBS], before)


def test_scoring_before_the_update_or_within_it_is_the_same_for_one_mini_batch(toy, tmp_path):
    changes = ["reward_model.model.optim.lr=0.003"]
    after, reverse = (
        prime_run(toy, tmp_path / style, *changes, f"reward_model.model.update={style}")
        for style in ("after", "reverse")
    )
    assert_same_run(after[0], reverse[0])
    scores = after[1].batch.batch["rm_scores"]
    assert scores.any()
    torch.testing.assert_close(scores, reverse[1].batch.batch["rm_scores"], rtol=0, atol=1e-4)


def test_outcomes_must_be_accuracies_and_a_response_one_row():
    batch = rows()
    batch.batch["token_level_scores"] = torch.zeros(B, T)
    assert outcomes(batch).tolist() == [0] * B
    batch.non_tensor_batch["acc"] = np.array([True, False, 1, 0, 0.5, 1], dtype=object)
    assert outcomes(batch).tolist() == [1, 0, 1, 0, 0.5, 1]
    batch.non_tensor_batch["acc"][2] = -1
    with pytest.raises(ValueError, match=r"acc of a response is -1; .*from 0 to 1"):
        outcomes(batch)
    refuse_split_sessions(batch)
    batch.non_tensor_batch["session_uid"] = np.array(list("aabcde"), dtype=object)
    with pytest.raises(ValueError, match="6 rows are 5 sessions"):
        refuse_split_sessions(batch)


WIDE = (
    "data.train_batch_size=8",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ROLLOUT}.n=8",
    "reward_model.model.optim.lr=0.003",
    "trainer.total_training_steps=15",
)


def scores_of(toy, output, *changes):
    metrics, _ = prime_run(toy, output, *WIDE, *changes)
    return [step["critic/score/mean"] for step in metrics]


@pytest.mark.slow
def test_the_toy_is_learned_from_both_rewards_and_from_token_rewards_alone(toy, tmp_path):
    both = scores_of(toy, tmp_path / "both", "reward_model.prime_norm=none")
    assert both[-1] > 0.9
    # Of three seeds this one learns; docs/algorithms/prime.md has all.
    assert scores_of(toy, tmp_path / "process", "algorithm.reward_gt_coef=0")[-1] > 0.7


@pytest.mark.slow
def test_token_rewards_of_a_model_that_is_not_trained_teach_nothing(toy, tmp_path):
    alone = "algorithm.reward_gt_coef=0"
    assert max(scores_of(toy, tmp_path / "a", alone, "reward_model.model.update=none")) < 0.1
    assert max(scores_of(toy, tmp_path / "b", alone, "reward_model.model.optim.lr=0")) < 0.1
    assert max(scores_of(toy, tmp_path / "c", f"{ACTOR}.optim.lr=0")) < 0.1


SHUFFLED = """
import hashlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return hashlib.sha256(solution_str.encode()).digest()[0] % 9 / 8
"""


@pytest.mark.slow
def test_rewards_that_have_nothing_to_do_with_the_task_do_not_teach_it(toy, tmp_path):
    reward = tmp_path / "shuffled.py"
    reward.write_text(SHUFFLED)
    changes = (*WIDE, f"custom_reward_function.path={reward}")
    _, trainer = prime_run(toy, tmp_path / "run", *changes)
    (seven,) = trainer.tokenizer("7")["input_ids"]
    mask = trainer.batch.batch["response_mask"].bool()
    assert (trainer.batch.batch["responses"][mask] == seven).float().mean() < 0.5


@pytest.mark.slow
def test_two_ranks_train_both_models_as_one_does(toy, tmp_path):
    changes = (
        "reward_model.model.optim.lr=0.003",
        "reward_model.mini_batch_size=2",
        "reward_model.micro_batch_size_per_gpu=3",
        "data.filter_accuracy=true",
        "data.oversample_factor=1.5",
    )
    expected, _ = prime_run(toy, tmp_path / "one", *changes)
    found, pair = prime_run(toy, tmp_path / "two", *changes, *TWO_LOCAL)
    pair.stop_workers()
    assert pair.rm_wg.world_size == 2
    assert_same_run(found, expected)


OLD_FILE = {
    "data": {"filter_accuracy": True, "oversample_factor": 4.0, "filter_truncate": True},
    "actor_rollout_ref": {"hybrid_engine": True, "rollout": {"n": 4, "mode": "sync"}},
    "reward_model": {
        "enable": True,
        "strategy": "fsdp",
        "model": {
            "ref_path": "${reward_model.model.path}",
            "use_remove_padding": True,
            "fused_kernel_options": {"impl_backend": "torch"},
            "tokenizer_path": "${actor_rollout_ref.model.path}",
            "ref_type": "freeze",
            "fsdp_config": {"min_num_params": 0, "param_offload": False},
            "update": "before",
            "optim": {"lr": 1e-6, "grad_clip": 7.0, "warmup_style": "constant"},
            "beta_train": 0.05,
            "loss_type": "ce",
        },
        "prime_granularity": "token",
        "prime_norm": "batch_norm",
        "mini_batch_size": "${actor_rollout_ref.actor.ppo_mini_batch_size}",
        "reward_manager": "prime",
    },
    "algorithm": {"adv_estimator": "rloo", "reward_gt_coef": 5, "reward_dpo_coef": 5},
    "trainer": {"recipe": "prime", "balance_batch": False},
}


def test_keys_of_older_files_are_known():
    loaded = load_config(OLD_FILE, PPOConfig)
    config = loaded.checked()
    assert config.reward_model.model.optim.clip_grad == 7.0
    assert config.reward_model.model.ref_path == config.reward_model.model.path
    assert config.reward_model.mini_batch_size == 256


def test_what_prime_would_not_do_is_refused_by_name():
    wrong = {
        **OLD_FILE,
        "algorithm": {
            "adv_estimator": "grpo",
            "use_kl_in_reward": True,
            "filter_groups": {"enable": True, "metric": "acc"},
        },
        "reward_model": {"enable": False},
        "data": {"filter_accuracy": True, "accuracy_lower_bound": 0.9},
    }
    loaded = load_config(wrong, PPOConfig)
    said = "\n".join(fault.text for fault in validate(loaded.config, loaded.user_set))
    for part in (
        'algorithm.adv_estimator is "grpo"; trainer.recipe=prime has an estimator of its own',
        "algorithm.use_kl_in_reward is True; trainer.recipe=prime makes advantages",
        "reward_model.enable is False; trainer.recipe=prime trains an implicit reward model",
        "data.filter_accuracy and algorithm.filter_groups.enable are both on",
        "data.accuracy_lower_bound (0.9) must not be above data.accuracy_upper_bound (0.8)",
    ):
        assert part in said
