"""What a step amounts to: samples, tokens and model flops a second, and MFU.

    tflops_per_device = model flops / (step_s x devices) / 1e12
    mfu               = model flops / (step_s x sum of the devices' peaks)

Model flops count what the model asks for once (meshfold.passes.price.model_flops): what is
recomputed in the backward is work of the plan, not of the model, and lowers both figures. MFU is as
in Chowdhery et al., PaLM, 2022 (arXiv:2204.02311, appendix B).
"""

from dataclasses import dataclass

from meshfold.ir.cluster import ClusterSpec
from meshfold.ir.limits import Flops, Seconds


@dataclass(frozen=True)
class Throughput:
    """A step's rates, at the step time that the plan states."""

    step_s: Seconds
    """As simulated where the plan has a simulated step, else as added up."""
    samples_per_s: Flops
    tokens_per_s: Flops
    """0 for a model that reads no tokens."""
    tflops_per_device: Flops
    """Model TFLOP/s of one device: model flops / step_s / devices / 1e12."""
    mfu: Flops
    """Model flops over what all devices could do in that time at their dense peak in the dtype that
    most of the model computes in."""

    @classmethod
    def of(
        cls,
        step_s: float,
        cluster: ClusterSpec,
        *,
        flops: float,
        dtype: str,
        samples: int,
        tokens: int,
    ) -> "Throughput":
        """flops, samples, tokens: of one step, on all devices of `cluster`. step_s: above 0."""
        peak = sum(g.num_devices * g.device.peak(dtype) for g in cluster.groups)
        return cls(
            step_s=step_s,
            samples_per_s=samples / step_s,
            tokens_per_s=tokens / step_s,
            tflops_per_device=flops / step_s / cluster.num_devices / 1e12,
            mfu=flops / step_s / peak,
        )
