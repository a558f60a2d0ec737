"""Plans and steps as text, JSON and traces. No torch."""
