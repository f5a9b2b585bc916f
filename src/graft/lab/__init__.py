"""Compile for a GPU that is described, not present.

Each request runs in a process of its own (`graft.lab.worker`): Inductor caches what it asks a
device for the life of a process, and Triton's active driver is global.

`devices`   the GPUs that can be described
`fakegpu`   makes torch and Triton answer for one of them
`capture`   a function or a training step -> the graphs that Inductor is given
`between_graphs` what runs between the graphs of a step, on fake tensors
`compile`   a graph -> the wrapper and kernels that Inductor generates
`assemble`  a kernel -> registers, spills, shared memory, occupancy
`interpret` kernels under Triton's interpreter, and `backend` torch.compile on them
`numerics`  what came out, against eager in float64
`worker`    one request, one process
`explain`   asks for stock and patched, and compares; `explain_screen` prints it

What runs in a worker imports torch, triton, numpy and the standard library only.
"""
