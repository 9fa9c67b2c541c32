"""`python -m regard` runs the `regard` command."""

from regard.cli import main

if __name__ == "__main__":
    main()
