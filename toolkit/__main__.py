"""`python -m toolkit`."""

from toolkit.tools.main import main

if __name__ == "__main__":
    main()
