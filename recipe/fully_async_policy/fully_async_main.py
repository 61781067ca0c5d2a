"""The name that older scripts have for `verl.experimental.fully_async_policy.fully_async_main`."""

from verl.experimental.fully_async_policy.fully_async_main import main

if __name__ == "__main__":
    main()
