"""Random pins: whether what the search chooses is as fast as every one of them."""
