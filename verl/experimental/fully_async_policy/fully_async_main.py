"""Asynchronous training: `python -m verl.experimental.fully_async_policy.fully_async_main ...`"""

from verl.trainer.main_ppo import FULLY_ASYNC

main = FULLY_ASYNC.main

__all__ = ["main"]

if __name__ == "__main__":
    main()
