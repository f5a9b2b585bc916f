"""Running pytest: the tests of this repository, and any tests in a Python of choice.

`suite`    the tests of this repository
`runner`   tests in another Python: a process, its rows, what came of each test
`plugin`   what that process has loaded
"""

GRACE_S = 30.0
"""What a test over its limit, that Python cannot interrupt, has until its process ends itself."""

GPU_LOST = 75
"""Exit code of a process of tests whose GPU answers no more."""
