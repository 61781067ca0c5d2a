"""DAPO (arXiv:2503.14476), `main_ppo` with its defaults: `python -m recipe.dapo.main_dapo ...`"""

from verl.trainer.main_ppo import Command

main = Command("dapo_trainer").main

if __name__ == "__main__":
    main()
