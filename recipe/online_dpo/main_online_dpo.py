"""The name that scripts have for `verl.trainer.recipes.online_dpo.main_online_dpo`."""

from verl.trainer.recipes.online_dpo.main_online_dpo import main

if __name__ == "__main__":
    main()
