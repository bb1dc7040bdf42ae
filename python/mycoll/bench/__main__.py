"""`python -m mycoll.bench`, the same as `mycoll bench`."""

import sys

from mycoll.bench import main

sys.exit(main())
