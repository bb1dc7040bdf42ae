"""Stand-ins for hardware and libraries: see README.md in this folder."""
