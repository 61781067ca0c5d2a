"""Train with SPPO: `python -m recipe.sppo.main_sppo key=value ...`"""

from verl.trainer.main_ppo import Command

main = Command("sppo_trainer").main

if __name__ == "__main__":
    main()
