"""The name that scripts have for `verl.trainer.recipes.pf_ppo.main_pf_ppo`."""

from verl.trainer.recipes.pf_ppo.main_pf_ppo import main

if __name__ == "__main__":
    main()
