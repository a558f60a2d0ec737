"""Graph passes: op rules, conversions, fold, and the searches. No torch import here."""
