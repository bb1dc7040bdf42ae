"""Becomes the compiled module for the torch that is running; what that contains is in _C.pyi."""

import sys

from mycoll._registration import load

sys.modules[__name__] = load()
