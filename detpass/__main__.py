"""``python -m detpass``: the command line without the console script."""

from detpass.cli import main

if __name__ == "__main__":
    main()
