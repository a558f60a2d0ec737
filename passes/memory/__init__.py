"""Bytes of a typed program: which rank keeps which states (ZeRO, offload), what a region's local
program holds, the peak of the step."""
