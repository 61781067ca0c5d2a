"""Training over TransferQueue: `python -m verl.experimental.transfer_queue.main_ppo ...`"""

from omegaconf import DictConfig

from verl.trainer.main_ppo import TRANSFER_QUEUE, main_with


def main(config: DictConfig | None = None) -> None:
    """The command; with a configuration, run that one instead of the command line's."""
    main_with(TRANSFER_QUEUE, config)


if __name__ == "__main__":
    main()
