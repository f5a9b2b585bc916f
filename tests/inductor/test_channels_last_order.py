# Owner(s): ["module: inductor"]

import unittest

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor.channels_last_order import (
    in_order_of_convolutions,
    permuted_dimensions,
)
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU
from torch.utils._ordered_set import OrderedSet


N, C, H, W = 2, 32, 12, 8
# [N, H, W, C] in the memory of a convolution's output that is channels last
PERMUTED = (H * W * C, W * C, C, 1)
# what is channels last of that by position: H innermost, then C
BY_POSITION = (H * W * C, 1, C * H, H)


def norm(y, weight, bias):
    return F.layer_norm(y, (y.shape[-1],), weight, bias)


def channels_norm(x, kernel, weight, bias):
    """Of a convolution's channels, by a permute; what is normed is used by two kernels."""
    y = F.conv2d(x, kernel, padding=1).permute(0, 2, 3, 1)
    z = norm(y, weight, bias)
    z = z + F.linear(z, kernel[:, :, 1, 1])
    return F.conv2d(z.permute(0, 3, 1, 2), kernel, padding=1)


def products(x, kernel, weight, bias):
    """A block with products of channels, of which the hidden tensor has more."""
    y = F.conv2d(x, kernel, padding=1)
    z = F.linear(norm(y.permute(0, 2, 3, 1), weight, bias), kernel.reshape(-1, C))
    z = F.gelu(z) * z
    z = F.linear(z, kernel.reshape(C, -1)).permute(0, 3, 1, 2)
    return F.conv2d(y + z, kernel, padding=1)


class PermutedDimensionsTest(TestCase):
    """What dimensions a convolution's have become."""

    def graph(self, f, channels=C):
        with FakeTensorMode():
            args = (
                torch.empty(N, channels, H, W),
                torch.empty(channels, channels, 3, 3),
                torch.empty(channels),
                torch.empty(channels),
            )
            return make_fx(f, decomposition_table=select_decomp_table())(*args).graph

    def dimensions(self, f, channels=C):
        graph = self.graph(f, channels)
        found = permuted_dimensions(graph)
        return graph, {n: found[n] for n in graph.nodes if n in found}

    def test_behind_a_permute_and_before_one(self):
        graph, found = self.dimensions(channels_norm)
        first, last = graph.find_nodes(
            op="call_function", target=torch.ops.aten.convolution.default
        )
        for node in (first, last, last.args[0]):
            self.assertNotIn(node, found)
        of_channels = [
            node
            for node in graph.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
            and tuple(node.meta["val"].shape) in ((N, H, W, C), (N, H, W, 1))
        ]
        self.assertGreater(len(of_channels), 5)
        for node in of_channels:
            self.assertEqual(found[node], (0, 2, 3, 1))

    def test_behind_a_view(self):
        graph, found = self.dimensions(products)
        hidden = [
            node
            for node in graph.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
            and tuple(node.meta["val"].shape) == (N, H, W, 9 * C)
        ]
        self.assertGreater(len(hidden), 1)
        for node in hidden:
            self.assertIsNone(found[node])
        # what comes back to the channels of a convolution is told by the permute behind it
        (add,) = (
            node
            for node in graph.nodes
            if node.target is torch.ops.aten.add.Tensor and node not in found
        )
        (back,) = (node for node in add.all_input_nodes if "permute" in node.name)
        self.assertEqual(found[back.all_input_nodes[0]], (0, 2, 3, 1))

    def test_no_permute(self):
        def f(x, kernel, weight, bias):
            y = F.conv2d(x, kernel, padding=1).relu()
            pooled = y.mean((2, 3), keepdim=True) * y
            shuffled = pooled.view(N, 2, C // 2, H, W).transpose(1, 2).reshape(y.shape)
            return F.conv2d(shuffled, kernel)

        _, found = self.dimensions(f)
        self.assertEqual(found, {})

    def test_no_convolution(self):
        _, found = self.dimensions(lambda x, kernel, weight, bias: x.permute(0, 2, 3, 1) + 1)
        self.assertEqual(found, {})

    def test_two_permutes(self):
        def f(x, kernel, weight, bias):
            y = F.conv2d(x, kernel, padding=1).permute(0, -2, -1, 1) + 1
            return y.permute(3, 1, 2, 0) * 2

        graph, found = self.dimensions(f)
        (mul,) = (n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
        self.assertEqual(found[mul], (1, 2, 3, 0))

    def test_orders(self):
        graph = self.graph(products)
        prefer = OrderedSet(graph.nodes)
        kept, orders = in_order_of_convolutions(graph, prefer)
        permuted = permuted_dimensions(graph)
        self.assertEqual(OrderedSet(orders) & kept, OrderedSet(orders))
        self.assertEqual(
            prefer - kept, OrderedSet(n for n, dims in permuted.items() if dims is None)
        )
        for order in orders.values():
            self.assertEqual(order, [3, 2, 1, 0])
        self.assertEqual(in_order_of_convolutions(graph, OrderedSet()), (OrderedSet(), {}))


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@inductor_config.patch(
    {
        "layout_optimization": True,
        "force_layout_optimization": True,
        "keep_output_stride": True,
        "shape_padding": False,
        "triton.mix_order_reduction": False,
    }
)
@instantiate_parametrized_tests
class ChannelsLastOrderTest(TestCase):
    """What is made of a convolution's output behind a permute lies in memory as it does."""

    def inputs(self, dtype):
        def make(*size, scale=1.0):
            return (scale * torch.randn(size, device=GPU_TYPE)).to(dtype)

        return (
            make(N, C, H, W),
            make(C, C, 3, 3, scale=1 / 16),
            make(C),
            make(C),
        )

    def setUp(self):
        super().setUp()
        # the reference is float64's
        context = torch.backends.cudnn.flags(allow_tf32=False)
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    def check(self, actual, f, args):
        for out, ref in zip(actual, f(*(arg.double() for arg in args))):
            scale = torch.finfo(args[0].dtype).eps * ref.abs().max().item()
            self.assertEqual(out.double(), ref.double(), atol=16 * scale, rtol=0)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_a_norm_of_channels(self, dtype):
        def f(*args):
            return (channels_norm(*args),)

        args = self.inputs(dtype)
        actual, codes = run_and_get_code(torch.compile(f), *args)
        self.check(actual, f, args)
        self.assertIn(str(PERMUTED), codes[-1])
        self.assertNotIn(str(BY_POSITION), codes[-1])

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_what_is_kept_for_a_backward(self, dtype):
        # what a forward returns for its backward is no user's: it has the layout that is best
        def f(x, kernel, weight, bias):
            y = F.conv2d(x, kernel, padding=1).permute(0, 2, 3, 1)
            var, mean = torch.var_mean(y.float(), 3, correction=0, keepdim=True)
            rstd = (var + 1e-6).rsqrt()
            normed = (y - mean) * rstd
            z = (normed * weight + bias).to(x.dtype).permute(0, 3, 1, 2)
            return F.conv2d(z, kernel, padding=1), normed, mean, rstd

        from torch._inductor.compile_fx import compile_fx_inner

        args = self.inputs(dtype)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(arg) for arg in args]
            graph = make_fx(f, decomposition_table=select_decomp_table())(*fakes)
        compiled = compile_fx_inner(graph, fakes)
        actual = compiled(list(args))
        self.check(actual, f, args)
        self.assertEqual(actual[1].stride(), PERMUTED)
        for each in actual[2:]:
            self.assertEqual(each.stride()[:3], (H * W, W, 1))

    def test_a_hidden_tensor_has_no_order(self):
        def f(*args):
            return (products(*args),)

        args = self.inputs(torch.float32)
        actual, codes = run_and_get_code(torch.compile(f), *args)
        self.check(actual, f, args)
        self.assertNotIn(str((H * W * 9 * C, 1, 9 * C * H, H)), codes[-1])

    def test_dynamic_batch(self):
        def f(*args):
            return (channels_norm(*args),)

        args = self.inputs(torch.float32)
        torch._dynamo.mark_dynamic(args[0], 0)
        actual, codes = run_and_get_code(torch.compile(f), *args)
        self.check(actual, f, args)
        self.assertNotIn(str(BY_POSITION), codes[-1])


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
