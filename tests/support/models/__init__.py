"""Models: families from their configurations, modules with one feature each, factories."""
