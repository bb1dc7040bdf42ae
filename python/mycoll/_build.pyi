"""Written by the build, beside _C."""

TORCH_VERSION: str
