"""A run whose ranks shard sequences or the rollout's model is the run of a single rank."""

import pytest

from tests.toy import ACTOR, ROLLOUT, toy_run
from tests.trainer.test_ranks import EVERYTHING, TWO_LOCAL, KeepsResponses, assert_same_run

BY_TOKENS = (
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=40",
    "critic.use_dynamic_bsz=true",
    "critic.ppo_max_token_len_per_gpu=40",
)
LESS_THAN_A_ROW = (  # of up to 14 tokens, but two ranks have room for one
    f"{ACTOR}.ppo_max_token_len_per_gpu=7",
    "critic.ppo_max_token_len_per_gpu=7",
)
SHARDED = {
    "sequences": (
        *LESS_THAN_A_ROW,
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
        "critic.model.use_remove_padding=true",
    ),
    "model of the rollout": (f"{ROLLOUT}.tensor_model_parallel_size=2",),
    "everything": (
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.sharding=full",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SHARDED)
def test_two_ranks_that_divide_something_train_as_one_does(what, toy, tmp_path):
    changes = (*EVERYTHING, *BY_TOKENS)
    expected, alone = toy_run(toy, tmp_path / "one", *changes, trainer_class=KeepsResponses)
    found, pair = toy_run(
        toy, tmp_path / "two", *changes, *TWO_LOCAL, *SHARDED[what], trainer_class=KeepsResponses
    )
    pair.stop_workers()
    assert pair.actor_rollout_wg.world_size == 2
    assert pair.seen == alone.seen
    assert_same_run(found, expected)
