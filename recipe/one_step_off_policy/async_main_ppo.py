"""The name that older scripts have for `verl.experimental.one_step_off_policy.async_main_ppo`."""

from verl.experimental.one_step_off_policy.async_main_ppo import main

if __name__ == "__main__":
    main()
