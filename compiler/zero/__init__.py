"""The ZeRO engine at run time: parameters gathered ahead of use, gradients reduced in groups and
buckets."""
