"""Search-R1 (arXiv:2503.09516): `python -m recipe.search_r1.main_search_r1 ...`

It is `main_ppo` with its defaults; the commands before it, and the toy, are in README.md.
"""

from verl.trainer.main_ppo import Command

main = Command("search_r1_trainer").main

if __name__ == "__main__":
    main()
