"""The name that users' scripts have for `verl.trainer.recipes.prime.main_prime`."""

from verl.trainer.recipes.prime.main_prime import main

if __name__ == "__main__":
    main()
