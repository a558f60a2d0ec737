"""The ZeRO engine: parameters gathered ahead of use, gradients reduced in groups."""
