"""The name that scripts have for `verl.trainer.recipes.spin.main_spin`."""

from verl.trainer.recipes.spin.main_spin import main

if __name__ == "__main__":
    main()
