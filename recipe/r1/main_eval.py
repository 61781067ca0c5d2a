"""The name that scripts have for `verl.trainer.main_eval`: mean score and pass@k per benchmark."""

from verl.trainer.main_eval import main

if __name__ == "__main__":
    main()
