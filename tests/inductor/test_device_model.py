# Owner(s): ["module: inductor"]

import ast
import dataclasses
import inspect
from unittest import mock

from torch._inductor import device_model
from torch._inductor.device_model import ARCHITECTURES, DeviceModel, SM_90
from torch._inductor.mix_order_row_cost import RowCost
from torch._inductor.mix_order_row_split import row_split
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_GPU


def properties(cc=90, **changes):
    """Of an H200, as CUDA says them."""
    return DeviceProperties(
        **{
            "type": "cuda",
            "index": 0,
            "multi_processor_count": 132,
            "cc": cc,
            "regs_per_multiprocessor": 65536,
            "max_threads_per_multi_processor": 2048,
            "warp_size": 32,
            **changes,
        }
    )


@instantiate_parametrized_tests
class DeviceModelTest(TestCase):
    """What the cost models take of a GPU."""

    def test_what_a_device_says(self):
        model = DeviceModel.of(properties(multi_processor_count=7))
        self.assertEqual(model.sms, 7)
        few = properties(regs_per_multiprocessor=32768)
        self.assertEqual(DeviceModel.of(few).registers_per_sm, 32768)
        few = properties(max_threads_per_multi_processor=1536)
        self.assertEqual(DeviceModel.of(few).warps_per_sm, 48)

    def test_bandwidth(self):
        """By the driver's bus and clock; not known where it does not say them."""
        gpu = properties(multi_processor_count=131)
        for found in (4800, 0):
            device_model._of_cuda.cache_clear()
            with (
                mock.patch.object(device_model, "get_gpu_dram_gbps") as dram,
                mock.patch.object(device_model.torch.cuda, "device"),
            ):
                dram.return_value = found
                self.assertEqual(DeviceModel.of(gpu).memory_GBs, found or None)
        device_model._of_cuda.cache_clear()

    @parametrize(
        "name, sms, cc, GHz, GBs, slots",
        (
            ("A100", 108, 80, 1.41, 2039, 11),
            ("H100", 132, 90, 1.98, 3350, 11),
            ("H200", 132, 90, 1.98, 4800, 8),
            ("B200", 148, 100, 1.965, 8000, 5),
            ("silent", 132, 90, 0, 3350, DeviceModel.slots_per_byte),
        ),
    )
    def test_slots_per_byte(self, name, sms, cc, GHz, GBs, slots):
        """What an SM issues while memory moves a byte is no constant: clock and bandwidth."""
        gpu = properties(cc, multi_processor_count=sms)
        said = {"sm_clock_rate": GHz * 1e6}
        with (
            mock.patch("triton.runtime.driver") as driver,
            mock.patch.object(device_model, "memory_GBs", return_value=GBs),
        ):
            driver.active.utils.get_device_properties.return_value = said
            model = device_model._of_cuda.__wrapped__(gpu)
        self.assertEqual(round(model.slots_per_byte), slots)

    def test_what_it_does_not_say(self):
        bare = DeviceProperties("cuda", 0, 132, 90)
        self.assertEqual(DeviceModel.of(bare), DeviceModel.of(properties()))

    def test_made_once(self):
        self.assertIs(DeviceModel.of(properties()), DeviceModel.of(properties()))
        self.assertIsNot(
            DeviceModel.of(properties()), DeviceModel.of(properties(cc=80))
        )

    def test_architectures(self):
        for cc, model in ARCHITECTURES.items():
            found = DeviceModel.of(properties(cc))
            said = {"sms": 1, "memory_GBs": None, "slots_per_byte": model.slots_per_byte}
            self.assertEqual(dataclasses.replace(found, **said), model)
        kib = [DeviceModel.of(properties(cc)).shared_memory_kib for cc in (80, 90, 100)]
        self.assertEqual(kib, [163, 227, 227])

    def test_unknown_architectures(self):
        """Shared memory where it is known; else what any GPU has."""
        for cc, kib in ((86, 99), (120, 99), (61, 48), (999, 48)):
            model = DeviceModel.of(properties(cc))
            self.assertEqual(model.shared_memory_kib, kib)
            self.assertEqual(model.prefetch_bytes > 0, cc >= 90)
            self.assertEqual(model.l2_bytes, 0)

    def test_other_vendors(self):
        model = DeviceModel.of(properties("gfx942", type="hip"))
        self.assertEqual(model, DeviceModel(type="hip", sms=132))

    def test_each_field_is_described(self):
        """By a docstring behind it: the unit and where it is from."""
        (made,) = ast.parse(inspect.getsource(DeviceModel)).body
        for field, text in zip(made.body, made.body[1:]):
            if isinstance(field, ast.AnnAssign):
                name = field.target.id
                self.assertIsInstance(text, ast.Expr, msg=name)
                self.assertIsInstance(ast.literal_eval(text.value), str, msg=name)

    def test_frozen(self):
        with self.assertRaises(dataclasses.FrozenInstanceError):
            SM_90.sms = 1

    def test_models_take_it(self):
        """Another GPU's numbers make another row split."""
        cost = RowCost(
            columns=1024,
            rnumel=1024,
            stream_bytes=4,
            streams=2,
            stores_rows=True,
            accumulators=1,
            invariants=1,
        )
        gpu = DeviceModel.of(properties())
        split = row_split(cost, gpu, None)
        self.assertEqual(split.num_programs, gpu.sms * split.programs_per_sm)
        more = row_split(cost, dataclasses.replace(gpu, sms=264), None)
        self.assertEqual(more.num_programs, 2 * split.num_programs)
        less = dataclasses.replace(gpu, flight_bytes=1024, several_flight_bytes=1024)
        less_split = row_split(cost, less, None)
        self.assertLess(
            less_split.programs_per_sm * less_split.num_stages,
            split.programs_per_sm * split.num_stages,
        )
        small = dataclasses.replace(gpu, shared_memory_kib=4)
        self.assertEqual(row_split(cost, small, None).num_stages, 1)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
