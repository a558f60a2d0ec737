"""The format of a checkpoint on disk, which knows no model: safetensors files, a JSON index and
checksums, none of which is code."""
