"""The name that older scripts have for `verl.experimental.transfer_queue.main_ppo`."""

from verl.experimental.transfer_queue.main_ppo import main

if __name__ == "__main__":
    main()
