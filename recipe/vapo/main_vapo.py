"""VAPO (arXiv:2504.05118), `main_ppo` with its defaults: `python -m recipe.vapo.main_vapo ...`"""

from verl.trainer.main_ppo import Command

main = Command("vapo_trainer").main

if __name__ == "__main__":
    main()
