"""What the scheduler asks of mix-order reductions, by one name."""

from .gathers import gathered_whole as gathered_whole
from .mix_order_inplace import inplace_reads as inplace_reads
from .mix_order_inplace import read_before_written as read_before_written
from .mix_order_plan import partials as partials
from .mix_order_producer_sums import attach_producer_sums as attach_producer_sums
from .mix_order_profit import decides_by_cost as decides_by_cost
from .mix_order_profit import fusion_score as fusion_score
from .mix_order_reads import why_too_many_reads as why_too_many_reads
from .mix_order_reduction import final_buffer as final_buffer
from .mix_order_reduction import splits_agree as splits_agree
from .mix_order_reduction import (
    why_not_partial_accumulators as why_not_partial_accumulators,
)
from .mix_order_spills import finishes_rows as finishes_rows
from .mix_order_square import orders_differ as orders_differ
