"""What users' documentation shows: every command, file and key of it resolves to what it says."""

import pytest
from omegaconf import OmegaConf

from tests.config.composing import from_command_line
from verl.config.legacy import CHATML
from verl.config.load import load_config
from verl.config.ppo import PPOConfig, PPOMegatronConfig
from verl.config.sft import SFTConfig
from verl.config.validate import validate
from verl.trainer.plan.layout import placement

SFT_FILE = """
data:
  train_files: /data/sft_train.parquet
  val_files: /data/sft_val.parquet
  prompt_key: prompt
  response_key: response
  micro_batch_size_per_gpu: 4

model:
  path: Qwen/Qwen2.5-7B-Instruct

trainer:
  n_gpus_per_node: 4
  nnodes: 1
  total_epochs: 3
  save_freq: 500
  project_name: my-sft
  logger: ["console", "wandb"]

optim:
  lr: 2e-5
  weight_decay: 0.01
  warmup_steps_proportion: 0.1
  lr_scheduler: cosine
"""

PPO_FILE = """
data:
  train_files: /data/gsm8k/train.parquet
  val_files: /data/gsm8k/test.parquet
  train_batch_size: 256
  max_prompt_length: 512
  max_response_length: 512

actor_rollout_ref:
  model:
    path: Qwen/Qwen2.5-7B-Instruct
  actor:
    optim:
      lr: 1e-6
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 4
    ppo_epochs: 1
    clip_ratio: 0.2
    grad_clip: 1.0
    entropy_coeff: 0.0
    use_torch_compile: true
  rollout:
    name: vllm
    tensor_model_parallel_size: 1
    gpu_memory_utilization: 0.4
    temperature: 1.0
    top_p: 1.0
    n: 1                              # 1 response per prompt for PPO
  ref:
    log_prob_micro_batch_size_per_gpu: 4

critic:
  model:
    path: Qwen/Qwen2.5-7B-Instruct    # same or separate critic model
  optim:
    lr: 1e-5
  ppo_micro_batch_size_per_gpu: 4

algorithm:
  adv_estimator: gae                   # Generalized Advantage Estimation
  kl_ctrl:
    kl_coef: 0.001

trainer:
  n_gpus_per_node: 4
  nnodes: 1
  total_epochs: 15
  save_freq: 10
  logger: ["console", "wandb"]
  project_name: ppo-gsm8k
"""

GRPO_FILE = """
data:
  train_files: /data/gsm8k/train.parquet
  val_files: /data/gsm8k/test.parquet
  train_batch_size: 128
  max_prompt_length: 512
  max_response_length: 1024

actor_rollout_ref:
  model:
    path: Qwen/Qwen2.5-7B-Instruct
  actor:
    optim:
      lr: 1e-6
    use_kl_loss: true                  # KL penalty in loss function
    kl_loss_coef: 0.001
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 2
  rollout:
    name: vllm
    n: 8                               # 8 responses per prompt (key for GRPO)
    temperature: 1.0
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.5

algorithm:
  adv_estimator: grpo                  # group-relative advantage

trainer:
  n_gpus_per_node: 4
  total_epochs: 20
"""


def load_text(text, root):
    return load_config(OmegaConf.create(text), root)


def mistakes(loaded):
    faults = validate(loaded.config, loaded.user_set, known_faults=loaded.faults)
    return [fault.text for fault in faults if not fault.is_about_machine]


def test_the_sft_file():
    loaded = load_config(OmegaConf.create(SFT_FILE), SFTConfig)
    config = loaded.config
    assert mistakes(loaded) == []
    assert loaded.notices == [
        "model.path is now model.partial_pretrain",
        "optim.warmup_steps_proportion is now optim.lr_warmup_steps_ratio",
    ]
    assert config.model.partial_pretrain == "Qwen/Qwen2.5-7B-Instruct"
    assert (config.data.prompt_key, config.data.response_key) == ("prompt", "response")
    assert config.data.micro_batch_size_per_gpu == 4
    assert (config.optim.lr, config.optim.weight_decay) == (2e-5, 0.01)
    assert (config.optim.lr_warmup_steps_ratio, config.optim.lr_scheduler) == (0.1, "cosine")
    assert (config.trainer.total_epochs, config.trainer.save_freq) == (3, 500)
    assert config.trainer.logger == ["console", "wandb"]


def test_the_ppo_file():
    loaded = load_text(PPO_FILE, PPOConfig)
    config = loaded.config
    assert (loaded.notices, mistakes(loaded)) == ([], [])
    assert config.data.train_batch_size == 256
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-7B-Instruct"
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu) == (64, 4)
    assert (actor.optim.lr, actor.clip_ratio, actor.grad_clip) == (1e-6, 0.2, 1.0)
    assert (actor.entropy_coeff, actor.use_torch_compile) == (0.0, True)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.n, rollout.gpu_memory_utilization) == ("vllm", 1, 0.4)
    assert config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 4
    assert (config.critic.model.path, config.critic.optim.lr) == ("Qwen/Qwen2.5-7B-Instruct", 1e-5)
    assert config.critic.ppo_micro_batch_size_per_gpu == 4
    assert config.algorithm.kl_ctrl.kl_coef == 0.001
    assert config.trainer.default_local_dir == "checkpoints/ppo-gsm8k/default"


def test_the_grpo_file():
    loaded = load_text(GRPO_FILE, PPOConfig)
    config = loaded.config
    assert (loaded.notices, mistakes(loaded)) == ([], [])
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.n, rollout.tensor_model_parallel_size) == (8, 2)
    assert (rollout.prompt_length, rollout.response_length) == (512, 1024)
    assert config.actor_rollout_ref.actor.use_kl_loss is True
    assert config.critic.model.path == "Qwen/Qwen2.5-7B-Instruct"  # follows the actor's model
    assert (config.trainer.n_gpus_per_node, config.trainer.total_epochs) == (4, 20)


def test_the_dapo_block():
    config = load_text(
        "actor_rollout_ref: {actor: {clip_ratio_low: 0.2, clip_ratio_high: 0.28}}", PPOConfig
    ).checked()
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.2, 0.28)


def test_the_lora_block():
    text = """
    actor_rollout_ref:
      actor:
        peft:
          peft_type: lora
          lora_rank: 16
          lora_alpha: 32
          target_modules: ["q_proj", "v_proj", "k_proj", "o_proj"]
    """
    loaded = load_text(text, PPOConfig)
    model = loaded.checked().actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (16, 32)
    assert model.target_modules == ["q_proj", "v_proj", "k_proj", "o_proj"]
    assert len(loaded.notices) == 4


def test_the_multi_turn_block():
    text = """
    rollout:
      multi_turn:
        enable: true
        max_turns: 5
        tool_server: "http://tool-server:8080"
    """
    loaded = load_text(text, PPOConfig)
    turns = loaded.checked().actor_rollout_ref.rollout.multi_turn
    assert (turns.enable, turns.max_assistant_turns, turns.max_user_turns) == (True, 5, 5)
    assert turns.tool_server == "http://tool-server:8080"
    assert len(loaded.notices) == 3


def test_the_fp8_block():
    loaded = load_text("rollout: {dtype: fp8}", PPOConfig)
    rollout = loaded.checked().actor_rollout_ref.rollout
    assert (rollout.quantization, rollout.dtype) == ("fp8", "bfloat16")
    renamed, uncorrected = loaded.notices
    assert renamed == "rollout.dtype is now actor_rollout_ref.rollout.quantization"
    assert "nothing corrects for it; algorithm.rollout_correction.rollout_is=token" in uncorrected


def test_the_prometheus_block():
    loaded = load_text("trainer: {prometheus: {enable: true, port: 9091}}", PPOConfig)
    rollout = loaded.checked().actor_rollout_ref.rollout
    assert (rollout.prometheus.enable, rollout.prometheus.port) == (True, 9091)
    assert not mistakes(loaded)


def test_the_resource_pool_block():
    text = """
    resource_pool:
      actor_rollout_ref:
        devices: [0, 1, 2, 3]  # GPUs for actor training and rollout
      critic:
        devices: [4, 5]         # GPUs for critic
      reward_model:
        devices: [6, 7]         # GPUs for reward model
    """
    loaded = load_text(text, PPOConfig)
    assert loaded.checked().resource_pool["critic"] == {"devices": [4, 5]}
    assert mistakes(loaded) == []


def test_the_command_line_guide():
    composed = from_command_line(
        "algorithm.adv_estimator=grpo",
        "data.train_files=/root/data/train.parquet",
        "data.train_batch_size=1024",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct",
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.n=5",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=1",
        'trainer.logger=["console","wandb"]',
    )
    config = composed.config
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert config.actor_rollout_ref.rollout.n == config.actor_rollout_ref.actor.rollout_n == 5
    assert config.trainer.logger == ["console", "wandb"]
    assert (composed.notices, mistakes(composed.loaded)) == ([], [])


def test_the_quick_settings():
    composed = from_command_line(
        "actor_rollout_ref.rollout.name=sglang",
        "data.chat_template=chatml",
        "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.top_p=0.9",
        "actor_rollout_ref.rollout.n=5",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.strategy=fsdp",
        "data.train_files=/root/data/gsm8k/train.parquet",
        "data.val_files=/root/data/gsm8k/test.parquet",
        "data.custom_cls.path=my_dataset.py",
        "data.custom_cls.name=MyDataset",
        "data.sampler.class_path=my_sampler.py",
        "data.sampler.class_name=CurriculumSampler",
        "reward_model.custom_reward_function.path=my_reward.py",
        "reward_model.custom_reward_function.name=compute_reward",
        "reward_model.sandbox_fusion.url=http://localhost:8000",
    )
    config = composed.config
    assert config.actor_rollout_ref.model.custom_chat_template == CHATML
    assert config.custom_reward_function.path == "my_reward.py"
    assert config.custom_reward_function.name == "compute_reward"
    assert config.data.sampler.class_name == "CurriculumSampler"
    assert config.reward_model.sandbox_fusion.url == "http://localhost:8000"
    assert len(composed.notices) == 3
    assert mistakes(composed.loaded) == []


def test_reward_functions_and_reward_models():
    composed = from_command_line(
        "reward_model.reward_fn.path=verl/utils/reward_score/my_reward.py",
        "reward_model.reward_fn.name=compute_reward",
        "reward_model.enable=True",
        "reward_model.model.path=my-org/reward-model-7b",
        "reward_model.micro_batch_size_per_gpu=4",
    )
    config = composed.config
    assert config.custom_reward_function.path == "verl/utils/reward_score/my_reward.py"
    assert config.custom_reward_function.name == "compute_reward"
    assert (config.reward_model.enable, config.reward_model.micro_batch_size_per_gpu) == (True, 4)
    assert composed.notices == [
        "reward_model.reward_fn.path is now custom_reward_function.path",
        "reward_model.reward_fn.name is now custom_reward_function.name",
    ]


def test_scaling_and_megatron():
    composed = from_command_line(
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        "trainer.save_freq=10",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    )
    config = composed.config
    assert isinstance(config, PPOMegatronConfig)
    assert config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 4
    assert config.actor_rollout_ref.ref.megatron.pipeline_model_parallel_size == 2  # follows
    assert config.critic.strategy == "megatron"
    assert mistakes(composed.loaded) == []
    assert placement(config).roles[0].layout == "megatron: tensor 4, pipeline 2, context 1, data 1"


def test_the_overview_command():
    config = from_command_line(
        "data.train_batch_size=256",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm.kl_ctrl.kl_coef=0.001",
    ).config
    assert config.algorithm.kl_ctrl.kl_coef == 0.001


DOCUMENTED_DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.use_torch_compile": True,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.enforce_eager": True,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.use_kl_in_reward": False,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.logger": ["console"],
    "trainer.project_name": "verl",
    "trainer.experiment_name": "default",
}


@pytest.fixture(scope="module")
def defaults():
    return load_config({}, PPOConfig).checked()


@pytest.mark.parametrize("key", DOCUMENTED_DEFAULTS)
def test_a_documented_default_holds(defaults, key):
    value = defaults
    for name in key.split("."):
        value = value[name]
    assert value == DOCUMENTED_DEFAULTS[key]


def test_rollout_keys_may_be_written_short():
    text = """
    rollout:
      name: hf
      temperature: 0.9
      top_p: 0.8
      n: 8
      tensor_model_parallel_size: 2
      gpu_memory_utilization: 0.6
      enforce_eager: false
    """
    loaded = load_text(text, PPOConfig)
    rollout = loaded.checked().actor_rollout_ref.rollout
    assert (rollout.name, rollout.temperature, rollout.top_p, rollout.n) == ("hf", 0.9, 0.8, 8)
    assert (rollout.tensor_model_parallel_size, rollout.enforce_eager) == (2, False)
    assert len(loaded.notices) == 7
