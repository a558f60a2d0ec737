"""The best plan on one mesh without microbatches, and which meshes may hold it."""
