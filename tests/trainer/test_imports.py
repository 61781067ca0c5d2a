from tests.compat.test_light_imports import loaded_by


def test_the_trainer_loads_no_cluster_and_no_foreign_engine():
    loaded = loaded_by(
        "verl.trainer.ppo.trainer",
        "verl.trainer.task_runner",
        "verl.agent_loop",
        "verl.workers.reward_manager",
    )
    assert "torch" in loaded
    assert not {"ray", "vllm", "sglang", "megatron", "wandb", "mlflow", "torchdata"} & loaded


def test_the_command_loads_no_torch_before_it_knows_that_it_will_train():
    assert not {"torch", "transformers"} & loaded_by("verl.trainer.main_ppo")
