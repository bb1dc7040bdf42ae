"""Becomes the compiled module for the running torch. _C.pyi describes its contents."""

import sys

from mycoll._load import load

sys.modules[__name__] = load()
