"""
What codegen decided of a kernel's launch, as it travels to the runtime.

One entry of ``inductor_meta``, a literal of the generated source: a dictionary of those
fields of ``LaunchPlan`` that are not at their defaults. Codegen writes it, by ``add_to``;
``triton_heuristics``, in compile workers too, reads it, by ``of``. Neither the policies nor
their modules are imported here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, TYPE_CHECKING

from .registers import all_registers
from .triton_compat import Config


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .hints import DeviceProperties


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """
    num_programs: programs of a mix-order kernel's grid, and rows of its workspace; 0: as
        many as RSPLIT_SIZE makes, and of any other kernel. By
        V.choices.mix_order_row_split.
    max_xblock: rows that a tile of such a kernel has at most, autotuned or not. By the row
        split.
    sharing_programs: programs that share the registers of an SM, of which a thread is told
        its share; 0: it is not. By the row split, or by
        V.choices.persistent_inner_reduction_program.
    row_tiles: (rows, warps, stages) of its tiles, from which autotuning chooses; the first
        one is that of no autotuning. By the row split.
    rows, num_warps: of a program of a persistent inner reduction; 0 warps: the runtime
        decides. By V.choices.persistent_inner_reduction_program.
    whole_programs: whether all programs have so many rows, and codegen masks none of them
    loop: (columns a thread, warps) of a block of a looped inner reduction, which may share
        registers; None: the runtime decides. By V.choices.loop_config.
    tile: (elements of XBLOCK and of YBLOCK, where there is one; warps) of a block
        reduction; None: the runtime decides. By V.choices.block_reduction_tile.
    maxnreg: registers that a thread may have; 0: as many as ptxas takes. By the tile.
    """

    num_programs: int = 0
    max_xblock: int = 0
    sharing_programs: int = 0
    row_tiles: Sequence[tuple[int, int, int]] = ()
    rows: int = 1
    num_warps: int = 0
    whole_programs: bool = False
    loop: Optional[tuple[int, int]] = None
    tile: Optional[tuple[dict[str, int], int]] = None
    maxnreg: int = 0

    @classmethod
    def of(cls, inductor_meta: dict[str, Any]) -> LaunchPlan:
        """A kernel's; nothing is decided in one whose ``inductor_meta`` has none."""
        return cls(**inductor_meta.get("launch_plan", {}))

    def add_to(self, inductor_meta: dict[str, Any]) -> None:
        """Hand over what is decided here, beside what is handed over already."""
        inductor_meta.setdefault("launch_plan", {}).update(
            (field.name, value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        )

    def row_tile_configs(self, least_rows: int, autotune: bool) -> list[Config]:
        """Of a mix-order kernel, whose tiles have no fewer than ``least_rows``."""
        return [
            Config(
                {"XBLOCK": max(xblock, least_rows), "NUM_STAGES": num_stages},
                num_warps=num_warps,
                num_stages=1,
            )
            for xblock, num_warps, num_stages in self.row_tiles[: None if autotune else 1]
        ]

    def shared_registers(
        self, device: DeviceProperties, num_warps: int
    ) -> dict[str, int]:
        """
        The compile option ``maxnreg`` of a program of ``num_warps``; none where a thread is
        not told, or ``device`` does not say how many registers there are.
        """
        if self.maxnreg:
            return {"maxnreg": self.maxnreg}
        registers = device.regs_per_multiprocessor
        if not self.sharing_programs or not registers:
            return {}
        share = all_registers(registers, num_warps, self.sharing_programs)
        return {"maxnreg": share}
