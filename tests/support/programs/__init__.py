"""Programs: emitted for one rank or several, planned, in stages, with events and memory."""
