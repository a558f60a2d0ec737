"""Discrete events of one step: a compute stream and one stream per link level; passes.events writes
the events."""
