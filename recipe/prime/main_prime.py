"""Train with PRIME: `python -m recipe.prime.main_prime key=value ...`"""

from verl.trainer.main_ppo import Command

main = Command.of_recipe("prime").main

if __name__ == "__main__":
    main()
