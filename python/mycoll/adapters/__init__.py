"""mycoll under the interfaces of other libraries, each in a module of its own: it is imported where
that library is installed."""
