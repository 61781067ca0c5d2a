"""Train with SPIN: `python -m recipe.spin.main_spin key=value ...`"""

from verl.trainer.main_ppo import Command

main = Command.of_recipe("spin").main

if __name__ == "__main__":
    main()
