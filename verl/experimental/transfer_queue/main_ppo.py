"""Training over TransferQueue: `python -m verl.experimental.transfer_queue.main_ppo ...`"""

from verl.trainer.main_ppo import TRANSFER_QUEUE

main = TRANSFER_QUEUE.main

__all__ = ["main"]

if __name__ == "__main__":
    main()
