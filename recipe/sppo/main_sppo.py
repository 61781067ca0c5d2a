"""The name that scripts have for `verl.trainer.recipes.sppo.main_sppo`."""

from verl.trainer.recipes.sppo.main_sppo import main

if __name__ == "__main__":
    main()
