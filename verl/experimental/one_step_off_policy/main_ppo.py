"""One-step-off training: `python -m verl.experimental.one_step_off_policy.main_ppo ...`"""

from verl.trainer.main_ppo import ONE_STEP_OFF

main = ONE_STEP_OFF.main

__all__ = ["main"]

if __name__ == "__main__":
    main()
