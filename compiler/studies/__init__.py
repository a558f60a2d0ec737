"""Many plans of one model: over devices, memory, batch or sequence, and under other pins."""
