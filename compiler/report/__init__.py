"""Plans, searches and predicted steps as text, tables, JSON and traces, and the terminal; no
torch."""
