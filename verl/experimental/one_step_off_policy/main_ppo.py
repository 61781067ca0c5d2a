"""One-step-off training: `python -m verl.experimental.one_step_off_policy.main_ppo ...`"""

from omegaconf import DictConfig

from verl.trainer.main_ppo import ONE_STEP_OFF, main_with


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    main_with(ONE_STEP_OFF, config)


if __name__ == "__main__":
    main()
