"""Graft a stack of upstream-shaped patches on a pinned PyTorch release.

A package imports from those below it alone (tests/graft/test_architecture.py):

`cli`, `bootstrap`   the commands; what ./build.sh does
`devtools`           for who fits a model of the stack, or looks for wrong code
`bench`              measures compiled code on a GPU, and writes the pages' figures; beside it
`upstream`           PyTorch's own tests and operators on both sides; new releases
`lab`                compiles for a GPU that is described, not present
`stack`              pins, patches, series; the trees made from them; editing and sending them
`cases`              what is compiled: functions of tensors, training steps, models
`testing`            runs pytest
`errors`, `machine`, `places`, `processes`   what all of them stand on
"""

__version__ = "0.1.0"
