"""Flops, bytes and rates of attention kernels.

fused     (FlashAttention and its kin) flops of the causal half alone, at a rate of its own:

              rate(d) = peak * efficiency * (1 + C / 128) / (1 + C / d)

          Besides the products of 4 d flops forward, every score costs work that no matrix unit
          does (its exponential, maximum and sum), as much as the products of C columns do: at
          head size 64 A100s reach 0.87 of the rate at 128 (Dao, FlashAttention-2, ICLR 2024,
          figures 4 and 5), which is C = 22; the exponentials alone, at 16 a cycle in each
          multiprocessor, would be 19.
unfused   products of the whole square at the rate of other products, and the scores go through
          memory: forward written by a product, read and written by softmax, and by dropout
          with a mask of a byte, read by a product; backward written, through dropout (two read,
          one written), through softmax (two read, one written), read by two products, and what
          dropout left read by the product for the values. Backward has four products.
"""

from dataclasses import dataclass

OTHER_COLUMNS = 22
"""C above, fitted to two published rates."""

FORWARD_SHARE, BACKWARD_SHARE = 0.7, 0.59
"""Of matmul_efficiency, where a device has no rate of its own for attention: medians of 24 points
of an A100-PCIe, forward and backward (MooreThreads/SimuMax@4dcaae5, configs/system/a100_pcie.json),
over its best matrix product."""

FORWARD_PASSES, BACKWARD_PASSES = 6, 9
"""Of the scores through memory, unfused; each dropout's mask is a byte besides."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What an attention op computes over: batch x heads x queries x keys, by heads of `head_size`
    (of keys and values in the mean)."""

    num: float
    head_size: float

    @property
    def of_rate(self) -> float:
        """The rate by that at head size 128."""
        return (1 + OTHER_COLUMNS / 128) / (1 + OTHER_COLUMNS / self.head_size)

    def unfused_flops(self) -> tuple[float, float]:
        """Forward and backward, of the whole square."""
        product = 2 * self.num * self.head_size
        return 2 * product, 4 * product

    def unfused_bytes(self, item_bytes: int) -> tuple[float, float]:
        """Forward and backward, of the scores alone."""
        return (
            self.num * (FORWARD_PASSES * item_bytes + 1),
            self.num * (BACKWARD_PASSES * item_bytes + 1),
        )
