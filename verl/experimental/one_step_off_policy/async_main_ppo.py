"""The name that older documentation has for `main_ppo` beside it."""

from verl.experimental.one_step_off_policy.main_ppo import main

if __name__ == "__main__":
    main()
