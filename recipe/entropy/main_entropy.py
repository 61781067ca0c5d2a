"""Clip-Cov and KL-Cov (arXiv:2505.22617): `python -m recipe.entropy.main_entropy ...`

It is `main_ppo` with its defaults.
"""

from verl.trainer.main_ppo import Command

main = Command("entropy_trainer").main

if __name__ == "__main__":
    main()
