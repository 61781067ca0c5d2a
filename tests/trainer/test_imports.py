from tests.compat.test_light_imports import loaded_by


def test_the_command_loads_no_torch_before_it_knows_that_it_will_train():
    assert not {"torch", "transformers"} & loaded_by("verl.trainer.main_ppo")
