"""`python -m anyformer.laws N`."""

import sys

from anyformer.laws.command import main

if __name__ == "__main__":
    sys.exit(main())
