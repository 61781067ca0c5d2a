"""The algorithms that are compared and have a page: settings, formula, what to watch, paper.

A new recipe is one entry here. `settings` are options of `main_ppo` beyond those that all runs
share (`benchmarks.algorithms.COMMON`); `{model}` in them is the folder of the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
ESTIMATOR = "algorithm.adv_estimator"
WHOLE_BATCH = (f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.ppo_epochs=1")
WHOLE_ADVISED = {f"{ACTOR}.ppo_mini_batch_size": "1024", f"{ACTOR}.ppo_epochs": None}
CLIPS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One line of the comparison, and one page."""

    title: str
    settings: tuple[str, ...]
    formula: str
    """Notation of the pages: r reward, A advantage, rho = pi / pi_old, g a prompt's group."""

    paper: str
    """The number at arXiv."""

    what: str
    """What it does and when it pays, in a sentence or two."""

    watch: tuple[str, ...]
    """Metrics."""

    command: str = "verl.trainer.main_ppo"
    folder: str | None = None
    """Of the recipe, below the repository."""

    page: str | None = None
    """A page written by hand that has it, in docs/algorithms."""

    samples: int = 8
    """Responses to a prompt in the page's command; 1 where none is compared with another."""

    advised: Mapping[str, str | None] = field(default_factory=dict)
    """Values in the page's command where those of the toy do not suit a real model; None: none."""


ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(
        title="PPO",
        settings=(f"{ESTIMATOR}=gae",),
        formula="A_t = sum_k (gamma lam)^k d_{t+k},   d_t = r_t + gamma V_{t+1} - V_t\n"
        "L = -min(rho A, clip(rho, 1 - low, 1 + high) A)",
        paper="1707.06347",
        what="A critic learns what to expect of each token, so credit is per token. Needs a second "
        "model; pays where responses are long or rewards come in between.",
        samples=1,
        watch=("critic/vf_loss", "critic/vf_explained_var", *CLIPS),
    ),
    "grpo": Algorithm(
        title="GRPO",
        settings=(f"{ESTIMATOR}=grpo",),
        formula="A_i = (r_i - mean_g r) / (std_g r + 1e-6)",
        paper="2402.03300",
        what="Responses to one prompt are compared with each other; no critic. The usual choice "
        "for verifiable rewards.",
        watch=("reward/ratio_groups_without_spread", "critic/score/mean", *CLIPS),
    ),
    "dr_grpo": Algorithm(
        title="Dr. GRPO",
        settings=(
            f"{ESTIMATOR}=grpo",
            "algorithm.norm_adv_by_std_in_grpo=false",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        ),
        formula="A_i = r_i - mean_g r,   L = (1 / B) sum_i (1 / T_max) sum_t l_it",
        paper="2503.20783",
        what="GRPO without the two divisions that favour easy prompts and long wrong answers.",
        watch=("response_length/mean", "actor/grad_norm", *CLIPS),
    ),
    "dapo": Algorithm(
        title="DAPO",
        settings=(
            f"{ESTIMATOR}=grpo",
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=score",
            "algorithm.filter_groups.max_num_gen_batches=24",
            f"{ACTOR}.clip_ratio_high=0.28",
        ),
        formula="GRPO with clip(rho, 1 - 0.2, 1 + 0.28), mean over tokens, prompts whose responses "
        "all\nscore alike replaced by others, and a penalty for overlong responses",
        paper="2503.14476",
        what="Clip-higher keeps exploration alive; dynamic sampling spends the update on prompts "
        "that teach something. Samples more than `data.train_batch_size` prompts a step.",
        advised={"algorithm.filter_groups.max_num_gen_batches": "10"},
        watch=("train/num_gen_batches", "train/num_groups_dropped", "actor/entropy"),
        command="recipe.dapo.main_dapo",
        folder="recipe/dapo",
    ),
    "rloo": Algorithm(
        title="RLOO",
        settings=(f"{ESTIMATOR}=rloo",),
        formula="A_i = r_i - mean of the other responses to the prompt",
        paper="2402.14740",
        what="An unbiased baseline without a critic and without a division by the spread.",
        watch=("critic/advantages/mean", "actor/grad_norm", *CLIPS),
    ),
    "reinforce_plus_plus": Algorithm(
        title="REINFORCE++",
        settings=(f"{ESTIMATOR}=reinforce_plus_plus",),
        formula="A_t = whiten(sum_k gamma^k r_{t+k}) over all tokens of the batch",
        paper="2501.03262",
        what="Needs no groups: one response per prompt will do. The baseline is the batch's mean.",
        samples=1,
        watch=("critic/returns/mean", *CLIPS),
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        title="REINFORCE++ with a group baseline",
        settings=(f"{ESTIMATOR}=reinforce_plus_plus_baseline",),
        formula="A_i = whiten(r_i - mean_g r) over all tokens of the batch",
        paper="2501.03262",
        what="Groups for the baseline, one scale for the whole batch.",
        watch=("critic/returns/mean", *CLIPS),
    ),
    "remax": Algorithm(
        title="ReMax",
        settings=(f"{ESTIMATOR}=remax",),
        formula="A_t = sum_k r_{t+k} - r(greedy response)",
        paper="2310.10505",
        what="The greedy response to the same prompt is the baseline: one more rollout per prompt.",
        samples=1,
        watch=("critic/advantages/mean", *CLIPS),
    ),
    "opo": Algorithm(
        title="OPO",
        settings=(f"{ESTIMATOR}=opo", *WHOLE_BATCH),
        formula="A_i = r_i - sum_g l_j r_j / sum_g l_j,   exactly on-policy",
        paper="2505.23585",
        what="The baseline of least variance where longer responses have longer gradients; one "
        "optimizer step per batch, no KL or entropy term.",
        advised=WHOLE_ADVISED,
        watch=("actor/grad_norm", "actor/entropy"),
    ),
    "gpg": Algorithm(
        title="GPG",
        settings=(f"{ESTIMATOR}=gpg", f"{LOSS}=gpg", *WHOLE_BATCH),
        formula="A_i = B / count(r != 0) (r_i - mean_g r),   L = -A log pi",
        paper="2504.02546",
        what="The plain policy gradient, scaled up where few responses earn anything.",
        advised=WHOLE_ADVISED,
        watch=("actor/grad_norm", "actor/entropy"),
    ),
    "gspo": Algorithm(
        title="GSPO",
        settings=(
            f"{ESTIMATOR}=grpo",
            f"{LOSS}=gspo",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            f"{ACTOR}.clip_ratio_low=0.03",
            f"{ACTOR}.clip_ratio_high=0.04",
        ),
        formula="s_i = exp(mean_t log rho_it),   L = -min(s A, clip(s, 1 - low, 1 + high) A)",
        paper="2507.18071",
        what="One ratio per sequence, the geometric mean of its tokens': stable for mixtures of "
        "experts. The ratio moves less than a token's, so the clip is narrow (3e-4, 4e-4 for long "
        "responses).",
        advised={f"{ACTOR}.clip_ratio_low": "3e-4", f"{ACTOR}.clip_ratio_high": "4e-4"},
        watch=CLIPS,
    ),
    "gmpo": Algorithm(
        title="GMPO",
        settings=(
            f"{ESTIMATOR}=grpo",
            f"{LOSS}=geo_mean",
            f"{ACTOR}.clip_ratio_low=0.4",
            f"{ACTOR}.clip_ratio_high=0.4",
        ),
        formula="L_i = -A exp(mean_t c_t),   c_t = min(log rho, high) if A > 0, "
        "max(log rho, -low) if A < 0",
        paper="2507.20673",
        what="The geometric mean of clipped token ratios; less moved by outliers than the sum.",
        watch=("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/entropy"),
    ),
    "cispo": Algorithm(
        title="CISPO",
        settings=(
            f"{ESTIMATOR}=grpo",
            f"{LOSS}=cispo",
            f"{ACTOR}.clip_ratio_low=10",
            f"{ACTOR}.clip_ratio_high=0.2",
        ),
        formula="L = -sg(clip(rho, 1 - low, 1 + high)) A log pi",
        paper="2506.13585",
        what="The importance weight is clipped, not the gradient: every token keeps teaching.",
        watch=CLIPS,
    ),
    "sapo": Algorithm(
        title="SAPO",
        settings=(f"{ESTIMATOR}=grpo", f"{LOSS}=sapo"),
        formula="L = -A (4 / tau) sigmoid(tau (rho - 1)),   tau = tau_pos if A > 0 else tau_neg",
        paper="2511.20347",
        what="A soft gate instead of a clip; negative advantages decay faster.",
        watch=("actor/ppo_kl", "actor/entropy"),
    ),
    "clip_cov": Algorithm(
        title="Clip-Cov",
        settings=(f"{ESTIMATOR}=grpo", f"{LOSS}=clip_cov"),
        formula="cov_t = (log pi_t - mean)(A_t - mean);   no gradient for a draw of tokens with "
        "cov in (lb, ub)",
        paper="2505.22617",
        what="Entropy falls by the few tokens whose log-prob and advantage vary together; some of "
        "them are left out.",
        watch=("actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl"),
        command="recipe.entropy.main_entropy",
        folder="recipe/entropy",
    ),
    "kl_cov": Algorithm(
        title="KL-Cov",
        settings=(f"{ESTIMATOR}=grpo", f"{LOSS}=kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=0.02"),
        formula="L = -A rho + ppo_kl_coef |log rho|   for the tokens of largest covariance, "
        "-A rho for the others",
        paper="2505.22617",
        what="The same tokens as in Clip-Cov, held back by a KL instead of dropped.",
        advised={f"{ACTOR}.policy_loss.kl_cov_ratio": None},
        watch=("actor/entropy", "actor/ppo_kl"),
        command="recipe.entropy.main_entropy",
        folder="recipe/entropy",
    ),
    "passk": Algorithm(
        title="Pass@k",
        settings=(f"{ESTIMATOR}=grpo_passk",),
        formula="A_best = (r_best - r_second) / (std_g r + 1e-6),   0 for the others",
        paper="2503.19595",
        what="Only the best response of a group is reinforced: raises the best of k, not the mean.",
        watch=("critic/score/max", "actor/entropy"),
    ),
    "otb": Algorithm(
        title="Optimal token baseline",
        settings=(f"{ESTIMATOR}=optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared=true"),
        formula="A_t = G_t - sum_g W_t G_t / sum_g W_t,   W_t = sum_{s<=t} rho_s^2 "
        "(1 - 2 pi_s + sum_v pi_sv^2)",
        paper="2602.07078",
        what="A baseline per token that weighs responses by the variance of their gradient so far.",
        watch=("actor/grad_norm", *CLIPS),
    ),
    "pf_ppo": Algorithm(
        title="PF-PPO",
        settings=(f"{ESTIMATOR}=gae", "algorithm.use_pf_ppo=true"),
        formula="draw the batch anew with weights |r|^2 (pow), 1 for the extremes (max_min), "
        "or mostly the best (max_random)",
        paper="2409.06957",
        what="Trains where a reward model is reliable, at its extremes; with `pf_ppo.replay_size` "
        "also on responses of earlier steps.",
        samples=1,
        watch=("critic/score/mean", "critic/vf_explained_var", *CLIPS),
    ),
    "pf_ppo_replay": Algorithm(
        title="PF-PPO with a replay buffer",
        settings=(
            "trainer.recipe=pf_ppo",
            f"{ESTIMATOR}=gae",
            "algorithm.use_pf_ppo=true",
            "algorithm.pf_ppo.replay_size=256",
            "algorithm.rollout_correction.rollout_is=token",
        ),
        formula="draw as many responses as were sampled now from those and the last "
        "`replay_size`,\nby score; weigh each token by min(pi_prox / pi_behave, C)",
        paper="2409.06957",
        what="Responses of earlier steps take part again, corrected for the policy that sampled "
        "them: more updates per response where sampling is what costs.",
        samples=1,
        advised={"algorithm.pf_ppo.replay_size": "2048"},
        watch=("training/replayed_ratio", "rollout_corr/rollout_is_mean", *CLIPS),
        command="recipe.pf_ppo.main_pf_ppo",
        folder="recipe/pf_ppo",
    ),
    "vapo": Algorithm(
        title="VAPO",
        settings=(
            f"{ESTIMATOR}=gae",
            "algorithm.lam_critic=1.0",
            "algorithm.lam_actor_alpha=1.0",
            f"{ACTOR}.positive_nll_coef=0.1",
            f"{ACTOR}.clip_ratio_high=0.28",
            "trainer.critic_warmup=5",
        ),
        formula="V: returns with lam = 1, alone for the first steps\n"
        "A: GAE with lam = 1 - 1 / (alpha l) for a response of l tokens\n"
        "L = L_clip-higher + mu L_NLL(right responses)",
        paper="2504.05118",
        what="Makes a critic work for long responses; pays where value learning is what fails.",
        watch=("critic/vf_explained_var", "actor/ce_loss", *CLIPS),
        command="recipe.vapo.main_vapo",
        folder="recipe/vapo",
    ),
    "online_dpo": Algorithm(
        title="Online DPO",
        settings=("trainer.recipe=online_dpo", f"{ESTIMATOR}=null", f"{LOSS}=dpo"),
        formula="L = -log sigmoid(beta (h_best - h_worst)),   h = sum_t log pi - log pi_ref",
        paper="2402.04792",
        what="The best against the worst response to a prompt, by a contrastive loss.",
        watch=("actor/dpo_accuracy", "actor/dpo_margin", "preference/num_prompts_tied"),
        page="dpo",
    ),
    "spin": Algorithm(
        title="SPIN",
        settings=("trainer.recipe=spin", f"{ESTIMATOR}=null", f"{LOSS}=dpo"),
        formula="online DPO whose reference is the policy of the step before",
        paper="2401.01335",
        what="DPO against the policy's own earlier self, or demonstrations against its responses.",
        watch=("critic/score/mean", "actor/ref_distance"),
        page="spin",
    ),
    "sppo": Algorithm(
        title="SPPO",
        settings=(f"{ESTIMATOR}=sppo", f"{LOSS}=sppo"),
        formula="L = (sum_t log rho - eta (r - mean_g r))^2",
        paper="2405.00675",
        what="The log-ratio of a whole response follows its reward above the group's.",
        watch=("actor/sequence_residual", "critic/score/mean"),
        page="sppo",
    ),
    "gvpo": Algorithm(
        title="GVPO",
        settings=(
            f"{ESTIMATOR}=grpo",
            "algorithm.norm_adv_by_std_in_grpo=false",
            f"{LOSS}=gvpo",
            f"{ACTOR}.policy_loss.gvpo_beta=0.1",
        ),
        formula="L = (beta (h - mean_g h) - (A - mean_g A))^2",
        paper="2504.19599",
        what="A regression of centred log-ratios on centred rewards.",
        watch=("actor/sequence_residual", "critic/score/mean"),
        page="gvpo",
    ),
    "dppo_tv": Algorithm(
        title="DPPO-TV",
        settings=(f"{ESTIMATOR}=grpo", f"{LOSS}=dppo_tv", f"{ACTOR}.clip_ratio=0.15"),
        formula="L = -A rho,   0 where |pi - pi_old| is beyond the bound and rho moves on",
        paper="2602.04879",
        what="A trust region by divergence instead of ratio.",
        watch=("actor/dppo_divergence", "actor/pg_clipfrac"),
        page="dppo",
    ),
    "dppo_kl": Algorithm(
        title="DPPO-KL",
        settings=(f"{ESTIMATOR}=grpo", f"{LOSS}=dppo_kl", f"{ACTOR}.clip_ratio=0.05"),
        formula="DPPO-TV with the KL of this token or another",
        paper="2602.04879",
        what="A trust region by divergence instead of ratio.",
        watch=("actor/dppo_divergence", "actor/pg_clipfrac"),
        page="dppo",
    ),
    "dro": Algorithm(
        title="DRO",
        settings=(f"{ESTIMATOR}=grpo", f"{LOSS}=dro", f"{ACTOR}.policy_loss.dro_beta=0.05"),
        formula="L = -A log pi + (beta / 2) (log rho)^2",
        paper="2405.19107",
        what="The policy gradient with a quadratic pull to the old policy and no clip.",
        watch=("actor/dro_penalty", "actor/ppo_kl"),
        page="dro",
    ),
    "gdpo": Algorithm(
        title="GDPO",
        settings=(f"{ESTIMATOR}=gdpo", "algorithm.gdpo_reward_keys=[acc]"),
        formula="A = whiten(sum_k w_k (r_k - mean_g r_k) / std_g r_k) over the batch",
        paper="2601.05242",
        what="Several rewards, each normalised within the prompt on its own.",
        watch=("critic/score/mean",),
        page="gdpo",
    ),
    "prime": Algorithm(
        title="PRIME",
        settings=(
            "trainer.recipe=prime",
            f"{ESTIMATOR}=rloo",
            "reward_model.enable=true",
            "reward_model.model.path={model}",
            "reward_model.micro_batch_size_per_gpu=128",
        ),
        formula="r_t = beta (log pi_rm - log pi_ref) beside the outcome, RLOO each, reverse sums",
        paper="2502.01456",
        what="An implicit process reward model, trained online on outcomes, rewards each token.",
        watch=("critic/score/mean", "actor/entropy"),
        page="prime",
    ),
}

CONTROLS: dict[str, tuple[str, ...]] = {
    "lr_0": (f"{ESTIMATOR}=grpo", f"{ACTOR}.optim.lr=0.0"),
    "shuffled": (f"{ESTIMATOR}=grpo", "custom_reward_function.name=shuffled_score"),
}
"""What must not learn: no learning rate, and rewards that have nothing to do with the response."""
