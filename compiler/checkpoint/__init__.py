"""A checkpoint's folder: safetensors files, a JSON index and checksums, none of which is code."""
