"""The name that older scripts have for `verl.experimental.one_step_off_policy.main_ppo`."""

from verl.experimental.one_step_off_policy.main_ppo import main

if __name__ == "__main__":
    main()
