"""Bytes of a typed program: what each rank keeps, and the peak of a step."""
