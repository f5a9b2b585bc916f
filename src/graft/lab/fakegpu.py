"""Make torch and Triton answer for a GPU that is described, not present.

After `install(device)` this process believes that it has one CUDA GPU. Fake tensors can live on it,
autograd can record on it, Inductor generates its CUDA code, and Triton compiles for its target.
Nothing can run on it.

One process, one described GPU: `DeviceProperties.create` and many of Inductor's own questions are
cached for the life of the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graft.errors import GraftError
from graft.lab import attention, gradients
from graft.lab.devices import (
    KIB,
    MAX_THREADS_PER_BLOCK,
    WARP_SIZE,
    Device,
)

_installed: Device | None = None


def installed() -> Device | None:
    """The GPU that this process was told to describe, if any."""
    return _installed


def install(device: Device) -> None:
    """Describe `device` to torch, Inductor and Triton in this process.

    Raises GraftError where a real GPU is visible (hide it first: CUDA_VISIBLE_DEVICES=), where
    torch has no CUDA build, and where another GPU was described before.
    """
    global _installed
    if _installed == device:
        return
    if _installed is not None:
        raise GraftError(
            f"this process already describes {_installed.key}; it cannot describe {device.key} too"
        )
    if not torch.backends.cuda.is_built():
        raise GraftError(
            f"torch {torch.__version__} was built without CUDA: compiling offline needs a CUDA "
            "build (no GPU or driver)",
            next="./build.sh",
        )
    if torch.cuda.is_available():
        raise GraftError(
            "a real GPU is visible: a process either uses it or describes another",
            next="CUDA_VISIBLE_DEVICES= graft explain",
        )
    _describe_to_torch(device)
    _describe_to_autograd()
    attention.describe(device)
    _fold_constants_on_the_host()
    _keep_constants_on_the_host()
    _pad_without_a_benchmark()
    _convolve_by_cudnn()
    _describe_to_triton(device)
    _installed = device


def _properties(device: Device) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` returns."""
    return SimpleNamespace(
        name=device.name,
        major=device.major,
        minor=device.minor,
        multi_processor_count=device.sm_count,
        regs_per_multiprocessor=device.registers_per_sm,
        max_threads_per_multi_processor=device.max_threads_per_sm,
        max_threads_per_block=MAX_THREADS_PER_BLOCK,
        warp_size=WARP_SIZE,
        shared_memory_per_block=48 * KIB,
        shared_memory_per_block_optin=device.shared_memory_per_block_optin_bytes,
        shared_memory_per_multiprocessor=device.shared_memory_per_sm_bytes,
        L2_cache_size=device.l2_bytes,
        total_memory=device.memory_bytes,
        memory_bus_width=device.memory_bus_bits,
        memory_clock_rate=device.memory_clock_khz,
        clock_rate=device.sm_clock_mhz * 1000,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName=device.name,
    )


def _describe_to_torch(device: Device) -> None:
    import torch._utils_internal
    from torch._dynamo import device_interface
    from torch._subclasses import fake_tensor

    # Without a driver the CUDA device guard raises; this puts one in its place that does nothing.
    # Autograd asks it for the stream of every tensor that requires a gradient.
    torch._C._ensureCUDADeviceGuardSet()

    properties = _properties(device)
    rng_state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "get_rng_state": lambda device="cuda": rng_state.clone(),
        "set_rng_state": lambda new_state, device="cuda": None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    interface = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in (
        "current_device",
        "device_count",
        "get_device_properties",
        "is_bf16_supported",
        "memory_allocated",
        "set_device",
        "synchronize",
    ):
        setattr(interface, name, staticmethod(answers[name]))
    interface.exchange_device = staticmethod(answers["_exchange_device"])  # type: ignore[assignment]
    interface.maybe_exchange_device = staticmethod(  # type: ignore[assignment]
        answers["_maybe_exchange_device"]
    )
    # Stream 0 is what a raw stream is on a machine with one GPU and no streams of its own.
    interface.get_raw_stream = staticmethod(lambda device: 0)  # type: ignore[assignment]
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    # Allocates on the device so that C++ autograd finds a context; there is none to find.
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
    # Otherwise `torch.tensor(..., device="cuda")` is made on the device before it is made fake.
    fake_tensor.FakeTensorMode.avoid_device_init = True  # type: ignore[assignment,method-assign]
    # Inductor reads the clock from nvidia-smi to judge whether padding a matrix product pays.
    torch._utils_internal.max_clock_rate = lambda: device.sm_clock_mhz
    _forget_earlier_answers()


def _describe_to_autograd() -> None:
    real_grad = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if not any(tensor.is_cuda for tensor in tensors):
            return real_grad(outputs, inputs, grad_outputs, **options)
        return gradients.grad(
            tensors,
            [inputs] if isinstance(inputs, torch.Tensor) else list(inputs),
            [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else grad_outputs,
            allow_unused=bool(options.get("allow_unused")),
        )

    torch.autograd.grad = grad  # type: ignore[assignment]


class _OnHost(TorchDispatchMode):
    """Real tensors that are asked for on the described GPU are made on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def host(value: Any) -> Any:
            is_gpu = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_gpu else value

        return func(*map(host, args), **{k: host(v) for k, v in (kwargs or {}).items()})


def _fold_constants_on_the_host() -> None:
    """Inductor folds uniform constants with real one-element tensors; only their value is used."""
    from torch._inductor.fx_passes import joint_graph

    class HostConstantFolder(joint_graph.UniformValueConstantFolder):
        def _add_peephole_patterns(self) -> None:
            with _OnHost():
                super()._add_peephole_patterns()

        def run(self) -> Any:  # type: ignore[override]
            with _OnHost():
                return super().run()

    joint_graph.UniformValueConstantFolder = HostConstantFolder  # type: ignore[misc]


def _keep_constants_on_the_host() -> None:
    """What a trace knows of constants, one-element tensors, it computes with real ones."""
    from torch.fx.experimental import proxy_tensor

    without_fakes = proxy_tensor.unset_fake_temporarily

    @contextlib.contextmanager
    def without_fakes_on_the_host() -> Iterator[Any]:
        with without_fakes() as mode, _OnHost():
            yield mode

    proxy_tensor.unset_fake_temporarily = without_fakes_on_the_host  # type: ignore[assignment]


def _pad_without_a_benchmark() -> None:
    """Matrix products that Inductor would time with and without padding are padded.

    What is asked comes after `is_mm_compute_bound`: rows that are not aligned, of a vocabulary of
    50257, say, are padded on a GPU too.
    """
    from torch._inductor.fx_passes import pad_mm

    pad_mm.get_cached_should_pad = lambda key: True  # type: ignore[assignment]


def _convolve_by_cudnn() -> None:
    """fp16 and bf16 convolutions are cuDNN's, which returns channels last where it is given that.

    Without a driver cuDNN is not asked, since bfloat16 needs a device that has it.
    """
    backends = torch._C._ConvBackend  # type: ignore[attr-defined]
    select = torch._C._select_conv_backend  # type: ignore[attr-defined]
    in_place_of = {
        backends.Slow2d: backends.Cudnn,
        backends.SlowDilated2d: backends.Cudnn,
        backends.SlowDilated3d: backends.Cudnn,
        backends.SlowTranspose2d: backends.CudnnTranspose,
        backends.SlowTranspose3d: backends.CudnnTranspose,
    }

    def select_conv_backend(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = select(input, *args, **kwargs)
        return in_place_of.get(chosen, chosen) if input.is_cuda else chosen

    torch._C._select_conv_backend = select_conv_backend  # type: ignore[attr-defined]


def _forget_earlier_answers() -> None:
    """Drop what was cached while there was no GPU to ask."""
    from torch._dynamo import device_interface
    from torch.utils import _triton

    device_interface.caching_worker_device_properties.pop("cuda", None)
    device_interface.caching_worker_current_devices.pop("cuda", None)
    for value in vars(_triton).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def _describe_to_triton(device: Device) -> None:
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    class DescribedDriver(CudaDriver):  # type: ignore[misc]
        """CUDA's driver as far as compiling asks it; it loads and launches nothing."""

        def __init__(self) -> None:
            # CudaDriver's own builds a C module against libcuda, which comes with a driver.
            self.utils = SimpleNamespace(
                get_device_properties=lambda index: {
                    "max_shared_mem": device.shared_memory_per_block_optin_bytes,
                    "max_num_regs": device.registers_per_sm,
                    "multiprocessor_count": device.sm_count,
                    "warpSize": WARP_SIZE,
                    "sm_clock_rate": device.sm_clock_mhz * 1000,
                    "mem_clock_rate": device.memory_clock_khz,
                    "mem_bus_width": device.memory_bus_bits,
                }
            )
            self.get_device_capability = lambda index=0: (device.major, device.minor)
            self.get_current_stream = lambda index=0: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda index: None

    # A subclass of CudaDriver: `triton_helpers.set_driver_to_gpu`, which every generated kernel
    # calls, then finds the right driver already active and leaves it.
    triton.runtime.driver.set_active(DescribedDriver())
