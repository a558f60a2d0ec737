"""Ops that keep less for the backward than the ops in whose place capture writes them."""
