"""Small models of many libraries, made from their configurations, with a batch for each."""
