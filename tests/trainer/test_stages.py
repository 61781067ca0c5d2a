"""Each stage adds the columns that docs/batch.md promises, and no others."""

import gc
import re
from itertools import islice
from pathlib import Path

import pytest

from tests.toy import toy_run
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.device import NEW_OBJECTS

STAGES = ("prompts", "rollout", "score", "annotate", "assign_credit")
DOCUMENT = Path(__file__).parents[2] / "docs" / "batch.md"


def documented() -> dict[str, set[str]]:
    """What the table says each stage adds."""
    rows = re.findall(r"^\| (\w+) \| [^|]* \| ([\w, ]+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {stage: set(columns.split(", ")) for stage, columns in rows if stage in STAGES}


class RecordingTrainer(PPOTrainer):
    """Notes which columns a batch has gained after each stage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.added = {}

    def draw_prompts(self, step, num_prompts):
        prompts = super().draw_prompts(step, num_prompts)
        self.added = {"prompts": set(prompts.non_tensor_batch)}
        return prompts

    def rollout(self, step):
        batch = super().rollout(step)
        self.added["rollout"] = set(batch.batch.keys())
        return batch

    def score(self, batch, step):
        return self.note("score", batch, step, super().score)

    def annotate(self, batch, step):
        return self.note("annotate", batch, step, super().annotate)

    def assign_credit(self, batch, step):
        return self.note("assign_credit", batch, step, super().assign_credit)

    def note(self, stage, batch, step, run):
        before = set(batch.batch.keys())
        result = run(batch, step)
        self.added[stage] = set(result.batch.keys()) - before
        return result


@pytest.fixture(scope="module")
def full_run(toy, tmp_path_factory):
    """An algorithm that uses every role: critic, reference policy, KL in the reward."""
    changes = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]
    output = tmp_path_factory.mktemp("full")
    return toy_run(toy, output, *changes, trainer_class=RecordingTrainer)


def test_the_table_lists_every_stage():
    assert tuple(documented()) == STAGES


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_stage_adds_exactly_the_columns_of_the_table(full_run, stage):
    _, trainer = full_run
    assert trainer.added[stage] == documented()[stage]


def test_prompts_have_at_least_the_columns_of_the_table(full_run):
    _, trainer = full_run
    assert documented()["prompts"] <= trainer.added["prompts"]


def test_a_step_reports_every_metric_that_users_know(full_run):
    metrics, _ = full_run
    names = set(metrics[-1])
    expected = {
        *(f"critic/{what}/{how}" for what in ("score", "rewards", "advantages", "returns", "values")
          for how in ("mean", "max", "min")),
        *(f"{what}_length/{how}" for what in ("response", "prompt")
          for how in ("mean", "max", "min", "clip_ratio")),
        *(f"actor/{what}" for what in ("entropy", "pg_loss", "pg_clipfrac", "pg_clipfrac_lower",
          "ppo_kl", "grad_norm", "lr", "reward_kl_penalty", "reward_kl_penalty_coeff")),
        *(f"critic/{what}" for what in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr",
          "vf_explained_var")),
        *(f"timing_s/{what}" for what in ("step", "gen", "reward", "old_log_prob", "ref", "values",
          "adv", "update_critic", "update_actor")),
        *(f"timing_per_token_ms/{what}" for what in ("gen", "ref", "values", "adv", "update_critic",
          "update_actor")),
        *(f"perf/{what}" for what in ("total_num_tokens", "time_per_step", "throughput")),
        *(f"global_seqlen/{what}" for what in ("min", "max", "minmax_diff", "balanced_min",
          "balanced_max", "mean")),
        *(f"training/{what}" for what in ("global_step", "epoch", "rollout_probs_diff_max",
          "rollout_actor_probs_pearson_corr")),
        *(f"num_turns/{what}" for what in ("min", "max", "mean")),
        "response/aborted_ratio",
        "timing_s/agent_loop/generate_sequences/mean",
    }  # fmt: skip
    assert expected <= names, expected - names


def test_the_rollout_and_the_trainer_agree_and_the_first_ratio_is_one(full_run):
    for step in full_run[0]:
        assert step["training/rollout_probs_diff_max"] < 1e-6
        assert step["actor/ppo_kl"] == 0.0
        assert step["actor/pg_clipfrac"] == 0.0
        assert step["actor/old_log_prob_error"] < 1e-5


def test_the_policy_starts_as_its_own_reference(full_run):
    metrics, trainer = full_run
    assert metrics[0]["actor/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[1]["actor/ref_kl"] != 0.0
    assert "reference_differs_at_start" not in trainer.tripwires.counts


def test_a_recipe_replaces_one_stage_and_keeps_the_loop(toy, tmp_path):
    class Constant(PPOTrainer):
        """Every response is worth its place in the group."""

        def score(self, batch, step):
            batch = super().score(batch, step)
            for row in range(len(batch)):
                batch.batch["token_level_scores"][row] = 0
                batch.batch["token_level_scores"][row, 0] = float(row % 4)
            return batch

    metrics, _ = toy_run(toy, tmp_path, trainer_class=Constant)
    assert [step["critic/score/mean"] for step in metrics] == [1.5, 1.5]


def test_no_stage_is_held_up_by_full_collections_of_garbage(toy, tmp_path):
    before, during = gc.get_threshold(), []

    class Watched(PPOTrainer):
        def rollout(self, step):
            during.append(gc.get_threshold()[0])
            return super().rollout(step)

    toy_run(toy, tmp_path, trainer_class=Watched)
    assert during == [NEW_OBJECTS, NEW_OBJECTS]
    assert gc.get_threshold() == before


class TwoInFlight(PPOTrainer):
    """Generates for the second step before it trains the first."""

    def fit(self):
        with self.session():
            first, second = self.contexts = list(islice(self.steps(), 2))
            batches = [self.rollout(first), self.rollout(second)]
            for step, batch in zip(self.contexts, batches, strict=True):
                for stage in (self.score, self.annotate, self.assign_credit, self.update):
                    batch = stage(batch, step)


def test_two_steps_are_in_flight_and_each_reports_its_own(toy, tmp_path):
    _, trainer = toy_run(toy, tmp_path, trainer_class=TwoInFlight)
    first, second = trainer.contexts
    assert [group.uid for group in first.groups] == [f"1-{row}" for row in range(4)]
    assert [group.uid for group in second.groups] == [f"2-{row}" for row in range(4)]
    for step in trainer.contexts:
        assert {"gen", "reward", "update_actor"} <= step.report.timing.keys()
        assert step.report.metrics["actor/num_optimizer_steps"] == 1
    assert [step.groups[0].version for step in trainer.contexts] == [0, 0], "one is a step old"
    assert first.report.metrics["actor/ppo_kl"] == 0.0
    assert first.report.metrics["actor/grad_norm"] != second.report.metrics["actor/grad_norm"]
