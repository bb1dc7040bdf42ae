"""The version of mycoll: pyproject.toml and CMakeLists.txt read it here."""

__version__ = "0.1.0"
