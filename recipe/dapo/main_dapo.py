"""DAPO (arXiv:2503.14476): `python -m recipe.dapo.main_dapo ...` is `main_ppo` with its defaults."""

from verl.trainer.main_ppo import Command

main = Command("dapo_trainer").main

if __name__ == "__main__":
    main()
