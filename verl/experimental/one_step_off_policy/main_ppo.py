"""One-step-off training: `python -m verl.experimental.one_step_off_policy.main_ppo ...`"""

from verl.trainer.main_ppo import one_step_off_main as main

__all__ = ["main"]

if __name__ == "__main__":
    main()
