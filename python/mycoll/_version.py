"""The version of mycoll, and those of torch that it works with; the build reads both here."""

__version__ = "0.1.0"

SUPPORTED_TORCH = ((2, 11), (2, 15))  # the first and the last minor
