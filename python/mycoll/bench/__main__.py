"""`python -m mycoll.bench`, the same as `mycoll bench`."""

import sys

from mycoll.bench import main

if __name__ == "__main__":
    sys.exit(main())
