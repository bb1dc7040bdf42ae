"""Stand-ins for hardware and libraries: README.md beside this."""
