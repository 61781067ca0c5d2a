"""Asynchronous training: `python -m verl.experimental.fully_async_policy.fully_async_main ...`"""

from omegaconf import DictConfig

from verl.trainer.main_ppo import FULLY_ASYNC, main_with


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    main_with(FULLY_ASYNC, config)


if __name__ == "__main__":
    main()
