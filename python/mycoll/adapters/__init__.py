"""mycoll under the interfaces of other libraries, in a module for each library."""
