"""``python -m fxremat`` is the command ``fxremat``."""

import sys

from fxremat.cli import main

if __name__ == "__main__":
    sys.exit(main())
