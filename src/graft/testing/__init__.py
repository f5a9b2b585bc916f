"""Running pytest: the tests of this repository, and any tests in a Python of choice."""
