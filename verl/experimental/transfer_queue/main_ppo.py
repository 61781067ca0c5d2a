"""Training over TransferQueue: `python -m verl.experimental.transfer_queue.main_ppo ...`"""

from verl.trainer.main_ppo import transfer_queue_main as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
