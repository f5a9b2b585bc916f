# Owner(s): ["module: inductor"]
"""What the tests of mix-order reduction share."""

import ast
import dataclasses
import re
import unittest
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.device_model import DeviceModel
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.test_case import TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.inductor_utils import GPU_TYPE
from torch.utils._pytree import tree_map_only


DEBUG = "triton.mix_order_reduction_debug"
MAX_READS = "triton.mix_order_reduction_max_reads"
SPLIT_SIZE = "triton.mix_order_reduction_split_size"


# Fuse whatever can be fused: a test is about what a fused kernel does.
FUSE = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_non_strict_mode": True,
    "deterministic": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
}
# However much a kernel reads, and by no measurement. Reductions that are split in two
# layers are another patch's business.
FUSE_ALL = {
    **FUSE,
    "triton.mix_order_reduction_max_reads": 0,
    "triton.mix_order_reduction_split_size": None,
    "triton.mix_order_reduction_autotune_split_size": False,
    "split_reductions": False,
}
CPP_WRAPPER = {
    "cpp_wrapper": True,
    "triton.autotune_at_compile_time": True,
    # neither of which is worth its time in a test
    "cpp.vec_isa_ok": True,
    "cpp_cache_precompile_headers": False,
}
nvidia_only = unittest.skipIf(
    GPU_TYPE != "cuda" or torch.version.hip is not None, "not an NVIDIA GPU"
)


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=GPU_TYPE).to(dtype)


def rms_norm_backward(x, weight, dy, rstd):
    xhat = x * rstd
    wdy = weight * dy
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
    return dx, (dy * xhat).sum(0)


def rms_norm_args(rows, columns, dtype=torch.float32):
    x, dy = (randn(rows, columns, dtype=dtype) for _ in range(2))
    return x, randn(columns, dtype=dtype), dy, torch.rand(rows, 1, device=GPU_TYPE)


def centered_and_sums(x, *others):
    """A row's output, and a partial sum for each of ``others``."""
    y = (x - x.mean(-1, keepdim=True)).to(x.dtype)
    return y, *((x * other).sum(0) for other in others)


def device_properties(cc=90, sms=132):
    """Of an H200, or another GPU of the compute capability ``cc`` and as many SMs."""
    return DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=sms,
        cc=cc,
        regs_per_multiprocessor=65536,
    )


def device_model(cc=90, sms=132):
    return DeviceModel.of(device_properties(cc, sms))


H200 = device_model()


def with_split(**changes):
    """A class of choices by which a row split has these ``changes``."""

    class Changed(InductorChoices):
        @staticmethod
        def mix_order_row_split(*args, **kwargs):
            split = InductorChoices.mix_order_row_split(*args, **kwargs)
            return dataclasses.replace(split, **changes)

    return Changed


# Every row is loaded again, however narrow.
Reload = with_split(reload=True)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Triton kernel that was generated, and what it hands to triton_heuristics."""

    name: str
    text: str
    triton_meta: dict[str, object]
    inductor_meta: dict[str, object]
    function: ast.FunctionDef

    @classmethod
    def all_of(cls, code):
        """Those that a generated module defines, in their order."""
        return [
            cls.of(*(argument.value for argument in node.value.args[:2]))
            for node in ast.parse(code).body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "async_compile.triton"
        ]

    @classmethod
    def of(cls, name, text):
        """Of the text that is compiled. What is no literal is text in its meta."""
        (function,) = (
            node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
        )
        heuristics = function.decorator_list[0]
        meta = {each.arg: each.value for each in heuristics.keywords}
        return cls(
            name,
            text,
            literals(meta["triton_meta"]),
            literals(meta["inductor_meta"]),
            function,
        )

    @property
    def is_mix_order(self):
        """Whether it splits its rows over programs."""
        return "RSPLIT_" in self.text

    @property
    def arguments(self):
        return [each.arg for each in self.function.args.args]

    @property
    def loop(self):
        """Its first loop, as a node; None where it has none."""
        return next((n for n in self.function.body if isinstance(n, ast.For)), None)

    @property
    def halves(self):
        """Its text before its loop over rows, and the loop's."""
        before, _, loop = self.text.partition("for _ in tl.range(")
        return before, loop

    def calls(self, function, node=None):
        """The arguments of each call of ``function``, as text: in the whole, or in ``node``."""
        return [
            [ast.unparse(argument) for argument in (*each.args, *each.keywords)]
            for each in ast.walk(node or self.function)
            if isinstance(each, ast.Call) and ast.unparse(each.func) == function
        ]

    def loads(self):
        """How many loads are before its first loop, and how many in it."""
        inside = len(self.calls("tl.load", self.loop)) if self.loop else 0
        return len(self.calls("tl.load")) - inside, inside


def literals(node):
    """A dictionary that is written down; of what is no literal, the text."""
    found = {}
    for key, value in zip(node.keys, node.values):
        try:
            found[key.value] = ast.literal_eval(value)
        except ValueError:
            found[key.value] = ast.unparse(value)
    return found


class Generated(Exception):
    """Raised with the code that was generated, instead of running it."""


class MixOrderTestCase(TestCase):
    fuse = FUSE
    ulps = 2

    def setUp(self):
        super().setUp()
        metrics.reset()

    def compare(self, f, actual, args, ulps=None):
        """
        ``actual`` is what eager returns for ``f(*args)`` in shape, stride and dtype,
        and no further from eager in float64 than eager is in the same dtype, or
        ``ulps``, which are the class's where they are not given.
        """
        ulps = self.ulps if ulps is None else ulps
        reference = f(
            *tree_map_only(
                torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, args
            )
        )
        eager = f(*args)
        self.assertEqual(len(actual), len(eager))
        for act, expect, ref in zip(actual, eager, reference):
            self.assertEqual(act.shape, expect.shape)
            self.assertEqual(act.stride(), expect.stride())
            self.assertEqual(act.dtype, expect.dtype)
            if not act.is_floating_point():
                self.assertTrue(torch.equal(act, expect))
                continue
            error = (act.double() - ref.double()).norm()
            eager_error = (expect.double() - ref.double()).norm()
            ulp = torch.finfo(act.dtype).eps * ref.double().norm()
            self.assertLessEqual(error, max(1.1 * eager_error, ulps * ulp))

    def check(self, f, *args, fused=1, ulps=None, **options):
        """
        Compile ``f``, expect ``fused`` mix-order kernels and what eager returns.
        Returns the generated code.
        """
        with inductor_config.patch({**self.fuse, **options}):
            try:
                actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
            except InductorError as error:
                self.fail(f"does not compile: {error}")
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        self.compare(f, actual, args, ulps)
        return "\n".join(code)

    def generate(self, f, *args, **options):
        """The code for ``f``, which is not run."""

        def save(code):
            raise Generated(code)

        with mock.patch.object(GraphLowering, "save_output_code", save):
            return self.generated(f, args, options)

    def check_fused(self, f, *args, fused, **options):
        """
        As ``check``. Where nothing is fused the code is not run: its kernels are those
        without mix-order reductions.
        """
        if fused:
            return self.check(f, *args, fused=fused, **options)
        code = self.generate(f, *args, **options)
        self.assertEqual(metrics.codegen_mix_order_reduction, 0)
        return code

    def generate_cpp(self, f, *args, aot=False, **options):
        """The C++ wrapper for ``f``, which is neither built nor run."""

        def codegen(graph):
            with (
                mock.patch.object(
                    PythonWrapperCodegen, "generate_and_run_autotune_block"
                ),
                mock.patch.object(DeferredTritonCallWrapper, "generate"),
                mock.patch.object(graph, "aot_mode", aot),
            ):
                wrapper, _ = graph.codegen()
            raise Generated(wrapper.value)

        with mock.patch.object(GraphLowering, "codegen_with_cpp_wrapper", codegen):
            return self.generated(f, args, {**CPP_WRAPPER, **options})

    def generated(self, f, args, options):
        """What `Generated` is raised with when ``f`` is compiled."""
        with (
            inductor_config.patch({**self.fuse, **options}),
            self.assertRaises(InductorError) as raised,
        ):
            torch.compile(f, fullgraph=True)(*args)
        error = raised.exception.inner_exception
        self.assertIsInstance(error, Generated)
        (code,) = error.args
        return code

    def calls(self, code, buffer=r"\w+"):
        """The kernels, of those that use ``buffer``, in the order of their calls."""
        return re.findall(rf"(triton_\w+)\.run\((?!\*args).*\b{buffer}\b", code)

    def source(self, code, name):
        """Of the kernel ``name``."""
        return code.partition(f"def {name}(")[2].partition("''', device")[0]

    def mix_order_kernel(self, code):
        """The one mix-order kernel."""
        kernels = [kernel for kernel in Kernel.all_of(code) if kernel.is_mix_order]
        self.assertEqual(len(kernels), 1)
        return kernels[0]

    def row_split(self, code):
        """What the one mix-order kernel carries of its row split."""
        meta = self.mix_order_kernel(code).inductor_meta
        self.assertIn("launch_plan", meta)
        return meta["launch_plan"]

    def kernel(self, code):
        """The one mix-order kernel: what is before its loop over rows, and the loop."""
        return self.mix_order_kernel(code).halves

    def loads(self, code):
        """How many loads are before the loop over rows, and how many are in it."""
        return self.mix_order_kernel(code).loads()

    def alignments(self, code):
        """Bytes that each type's pointers of the mix-order kernel are aligned to."""
        triton_meta = self.mix_order_kernel(code).triton_meta
        (attributes,) = triton_meta["configs"]
        found = {}
        for i, (name, kind) in enumerate(triton_meta["signature"].items()):
            if kind.startswith("*") and "ws_ptr" not in name:
                (bytes_,) = (
                    value
                    for key, value in attributes.get((i,), [("tt.divisibility", 1)])
                    if key == "tt.divisibility"
                )
                found.setdefault(kind, set()).add(bytes_)
        return found
