"""The command line. Nothing in the library imports it."""
