"""The stack: its series of patches, the trees made from it, and the ways to change and send it.

`pins`, `patches`, `series`   the release, a patch file, their order
`trees`                       the patched environments
`workbench`, `refresh`        the stack as commits to edit, and back
`each`, `own_tests`           whether each patch is needed by its tests, and which these are
`alone`                       a series as it applies without those before it
`export`                      commits on a checkout of PyTorch
`submit`, `ghstack_session`, `fork`   and sent from there
"""

from graft.stack.patches import FileChange, Hunk, Patch, Status, misread_line, release_numbers
from graft.stack.series import (
    COPIES,
    Series,
    Stack,
    check_copies,
    copies,
    copy_path,
    differing_copies,
    files_hash,
    load,
    read_line,
    read_series,
    series_file,
    write_line,
)

__all__ = [
    "COPIES",
    "FileChange",
    "Hunk",
    "Patch",
    "Series",
    "Stack",
    "Status",
    "check_copies",
    "copies",
    "copy_path",
    "differing_copies",
    "files_hash",
    "load",
    "misread_line",
    "read_line",
    "read_series",
    "release_numbers",
    "series_file",
    "write_line",
]
