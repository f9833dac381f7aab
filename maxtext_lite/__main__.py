"""`python -m maxtext_lite COMMAND ...`: the console script."""

import sys

from maxtext_lite.cli import main

if __name__ == "__main__":
    sys.exit(main())
